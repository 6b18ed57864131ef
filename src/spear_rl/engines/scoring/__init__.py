"""Log-probabilities of the tokens that train, in micro-batches; float32 master weights."""
