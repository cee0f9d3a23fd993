"""Stage 06: the prefix cache. What two prompts share at their beginning is computed once."""
