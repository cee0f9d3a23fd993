"""Stage 03: paged KV cache, and attention over its blocks."""
