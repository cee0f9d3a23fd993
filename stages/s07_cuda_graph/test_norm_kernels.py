"""The fused norm, rope and SwiGLU kernels against the torch functions, in Triton's interpreter and, there, on a GPU."""

import importlib.util
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stages.s01_forward import layers
from stages.s01_forward.ops import TORCH_OPS
from stages.s03_paged_kv.ops import PagedOps
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.fused_ops import fused_ops
from stages.s07_cuda_graph.interpreted import compare_norm, run_norm
from stages.s07_cuda_graph.norm_cases import EPS, NormCase, gpu_cases, small_cases

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no package for this platform"
)


@needs_triton
@beforehand(lambda case: (compare_norm, case))
@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_kernel_equals_torch(answer, case):
    """The interpreter cuts digits off where a GPU rounds to bf16, so there up to four units in the last place."""
    truncated = case.dtype == torch.bfloat16
    assert answer.error <= 4 * 2**-7 if truncated else answer.within_limits(case.dtype), answer


@needs_triton
@beforehand(lambda op, sizes: (partial(compare_norm, many=1), NormCase(op, sizes, torch.float16, 1)))
@pytest.mark.parametrize(
    ("op", "sizes"),
    [("rms_norm", (45, 24)), ("add_rms_norm", (9, 100)), ("norm_rope", (5, 7, 1, 20)), ("norm_rope", (8, 4, 2, 8))],
)
def test_several_rows_in_a_program(answer, op, sizes):
    """As with many tokens; the last program is not full."""
    assert answer.within_limits(torch.float16), answer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_the_gpu():
    assert not [(name, error) for name, error, allowed in gpu_cases(torch.device("cuda")) if not error <= allowed]


def keep_memory() -> list[bool]:
    """Are the results' tensors those of the inputs? (In the interpreter's process: what comes back is a copy.)"""
    qkv, angles = torch.randn(3, 4, 8), torch.randn(3, 4)
    norm = torch.ones(3, 4), torch.ones(3, 4), torch.ones(4), EPS
    rope = qkv[:, :2], qkv[:, 2:3], None, None, angles.cos(), angles.sin(), EPS
    pairs = zip(run_norm("add_rms_norm", *norm)[1:] + run_norm("norm_rope", *rope), norm[1:2] + rope[:2], strict=True)
    return [out is given for out, given in pairs]


@needs_triton
@beforehand(lambda: (keep_memory,))
def test_results_lie_over_the_inputs(answer):
    """What `Ops` allows."""
    assert answer == [True] * 3


def refusal(op: str, *arguments: Any) -> str:
    """The words."""
    try:
        run_norm(op, *arguments)
    except ValueError as error:
        return str(error)
    return "nothing is wrong"


@needs_triton
@beforehand(lambda op, arguments, words: (refusal, op, *arguments))
@pytest.mark.parametrize(
    ("op", "arguments", "words"),
    [
        ("rms_norm", (torch.ones(2, 4), torch.ones(5), EPS), r"weight \(5,\)"),
        ("rms_norm", (torch.ones(2, 4), torch.ones(4).half(), EPS), "float16 does not fit"),
        ("rms_norm", (torch.ones(4, 2).T, torch.ones(4), EPS), "rows without gaps"),
        ("add_rms_norm", (torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), EPS), r"residual \(3, 4\)"),
        ("add_rms_norm", (torch.ones(2, 4), torch.ones(2, 4).half(), torch.ones(4), EPS), "float16 .* does not fit"),
        ("silu_mul", (torch.ones(2, 5),), "even number of columns, not 5"),
        ("silu_mul", (torch.ones(4, 2).T,), "rows without gaps"),
    ],
)
def test_what_does_not_fit_is_refused(answer, op, arguments, words):
    assert re.search(words, answer)


def rope_arguments(**change: Any) -> list[Any]:
    arguments = {
        "q": torch.ones(3, 2, 8), "k": torch.ones(3, 1, 8), "q_weight": None, "k_weight": None,
        "cos": torch.ones(3, 4), "sin": torch.ones(3, 4),
    }  # fmt: skip
    return [*(arguments | change).values(), EPS]


@needs_triton
@beforehand(lambda change, words: (refusal, "norm_rope", *rope_arguments(**change)))
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.ones(2, 1, 8)}, "equal tokens"),
        ({"k": torch.ones(3, 1, 6)}, "equal tokens"),
        ({"k": torch.ones(3, 1, 8).half()}, "equal tokens, dtypes"),
        ({"q": torch.ones(3, 2, 7), "k": torch.ones(3, 1, 7)}, "even head sizes"),
        ({"q": torch.ones(3, 8, 2).transpose(1, 2)}, "heads without gaps"),
        ({"k_weight": torch.ones(8)}, "both or neither"),
        ({"q_weight": torch.ones(4), "k_weight": torch.ones(8)}, r"weight \(4,\)"),
        ({"cos": torch.ones(2, 4)}, r"contiguous \[3, 4\]"),
        ({"sin": torch.ones(4, 3).T}, r"contiguous \[3, 4\]"),
    ],
)
def test_heads_and_angles_that_do_not_fit_are_refused(answer, change, words):
    assert re.search(words, answer)


class TestTheComparison:
    """It notices what a kernel is likely to get wrong."""

    @pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "silu_mul", "norm_rope"])
    def test_the_torch_version_passes(self, op):
        case = NormCase(op, (5, 6, 2, 64) if op == "norm_rope" else (5, 1000), torch.bfloat16, 1)
        errors = case.compare(getattr(TORCH_OPS, op), CPU)
        assert (errors.error, errors.share) == (0.0, 0.0)

    def test_weight_before_the_cast(self):
        def wrong(x, weight, eps):
            return (weight.float() * layers.rms_norm(x.float(), torch.ones(()), eps)).to(x.dtype)

        assert self.share_of("rms_norm", wrong) > 0.1

    def test_sum_not_rounded_before_the_norm(self):
        def wrong(x, residual, weight, eps):
            total = x.float() + residual.float()
            return weight * layers.rms_norm(total, torch.ones(()), eps).to(x.dtype), total.to(x.dtype)

        assert self.share_of("add_rms_norm", wrong) > 0.05

    def test_silu_not_rounded_before_the_product(self):
        def wrong(gate_up):
            gate, up = gate_up.float().chunk(2, dim=-1)
            return (F.silu(gate) * up).to(gate_up.dtype)

        assert self.share_of("silu_mul", wrong) > 0.1

    def test_norm_after_the_rotation(self):
        def wrong(q, k, q_weight, k_weight, *rest):
            q, k = layers.norm_rope(q, k, None, None, *rest)
            return layers.rms_norm(q, q_weight, EPS), layers.rms_norm(k, k_weight, EPS)

        assert self.share_of("norm_rope", wrong, (5, 6, 2, 64)) > 0.5

    def test_a_write_outside_the_heads(self):
        def wrong(q, k, *rest):
            q.as_strided(q.shape, q.stride(), q.storage_offset() + 1).zero_()
            return layers.norm_rope(q, k, *rest)

        assert self.share_of("norm_rope", wrong, (5, 6, 2, 64)) == 1.0

    @staticmethod
    def share_of(op, function, sizes=(5, 1000)):
        """Of elements that differ, in a comparison that fails."""
        case = NormCase(op, sizes, torch.bfloat16, 1)
        errors = case.compare(function, CPU)
        assert not errors.within_limits(case.dtype)
        return errors.share


def test_table():
    """Switched off it is stage 03's; on a CPU rotation is."""
    assert fused_ops(CPU, fused=False) == PagedOps()
    own = {name for name, op in vars(fused_ops(CPU)).items() if op is not getattr(PagedOps(), name)}
    assert own == {"rms_norm", "add_rms_norm", "linear", "make_plan", "paged_attention"}
