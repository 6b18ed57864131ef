"""What generates, scores and learns: transformers in this process, with vLLM beside it on request."""
