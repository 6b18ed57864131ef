"""Chat messages to token ids and back: chat template, token encoding, images."""
