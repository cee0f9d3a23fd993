"""Stage 04: continuous batching. Requests join and leave the batch at every step."""
