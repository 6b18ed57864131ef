"""Messages to token ids: chat templates, token encoding, images."""
