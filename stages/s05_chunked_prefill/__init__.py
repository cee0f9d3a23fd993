"""Stage 05: chunked prefill. A long prompt no longer holds up the others."""
