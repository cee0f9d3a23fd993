"""Stage 08: speculative decoding."""
