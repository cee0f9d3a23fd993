"""Stage 01: a forward pass that matches Hugging Face, one sequence at a time."""
