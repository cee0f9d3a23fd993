"""`python -m reference.gpu_checks`: what can only be checked on a CUDA GPU, in one command, with one report."""
