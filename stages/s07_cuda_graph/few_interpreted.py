"""The kernels for few rows in Triton's interpreter; each function here runs in the process of `interpreter()`."""

from typing import Any

import torch

from stages.s03_paged_kv.interpreted import interpreter as interpreter
from stages.s07_cuda_graph.few_attention_cases import AttentionCase
from stages.s07_cuda_graph.few_cases import LinearCase, RopeCase
from stages.s07_cuda_graph.few_model_cases import ModelCase


def case_error(case: AttentionCase | LinearCase | RopeCase | ModelCase) -> float:
    return case.error(torch.device("cpu"))


def run_skinny_linear(*arguments: Any, **options: Any) -> torch.Tensor:
    from stages.s07_cuda_graph.skinny_linear import skinny_linear

    return skinny_linear(*arguments, **options)
