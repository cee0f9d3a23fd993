"""Stage 09: a server that people use. The engine in a process of its own, an OpenAI-compatible API before it."""
