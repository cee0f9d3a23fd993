"""cuBLAS without memory of its own: then no memset stands in front of a large product.

For products of many rows cuBLAS has kernels whose processors take one tile after another by a counter, which lies in
that memory and is cleared by a memset before each launch. Without, it takes the same kernels with their tiles dealt out
beforehand: on an H200 1 or 2 % faster in the smaller models; in the 7B some sizes are faster and some slower, and
320 rows were so much slower that `many_rows.py` mends it (lesson 07b).
"""

from __future__ import annotations

import os

import torch

NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
HOPPER = 9


def drop_workspace(device: torch.device) -> None:
    """For the whole process, where it was measured to pay: PyTorch reads this before its first product on a GPU.

    What the environment says already stays. cuBLASLt, where PyTorch was told to prefer it, insists on a workspace.
    """
    measured = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == HOPPER
    if measured and torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:
        for name, value in NO_WORKSPACE.items():
            os.environ.setdefault(name, value)
