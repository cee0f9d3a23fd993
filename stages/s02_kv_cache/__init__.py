"""Stage 02: a KV cache, so that each token is computed once."""
