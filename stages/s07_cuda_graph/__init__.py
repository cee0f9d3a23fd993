"""Stage 07: the fast path. CUDA graphs over state that lives on the GPU, fused kernels, and overlap with the host."""
