"""The learner's tool: exercises cut from the tested source, their checks, hints and progress."""
