"""The kernels for few rows in Triton's interpreter and, there, on a GPU: exact products, and the model's own result."""

import importlib.util
from dataclasses import replace
from functools import partial

import pytest
import torch

from stages.s01_forward.families import MoeConfig
from stages.s01_forward.model import Model
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.few_attention_cases import attention_cases
from stages.s07_cuda_graph.few_cases import ALLOWED, small_cases
from stages.s07_cuda_graph.few_interpreted import case_error, run_skinny_linear
from stages.s07_cuda_graph.few_model_cases import ALLOWED_MODEL, TINY, gpu_cases, model_cases
from stages.s07_cuda_graph.few_rows import most_rows, supports
from stages.s07_cuda_graph.skinny_linear import PAYS_TO, Tile, pays, skinny_linear

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no package for this platform"
)


@needs_triton
@beforehand(lambda case: (case_error, case))
@pytest.mark.parametrize("case", [*small_cases(), *attention_cases()], ids=str)
def test_kernel_is_exact(answer, case):
    assert answer <= ALLOWED[case.dtype]


@needs_triton
@beforehand(lambda case: (case_error, case))
@pytest.mark.parametrize("case", list(model_cases()), ids=str)
def test_forward_equals_the_models(answer, case):
    assert answer <= ALLOWED_MODEL[case.dtype]


def randoms(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """The same for the same shapes."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng) for shape in shapes]


@needs_triton
@beforehand(
    lambda rows, tile: (
        partial(run_skinny_linear, tile=tile, glu=True, norm_weight=torch.ones(300)),
        *randoms((rows, 300), (10, 300)),
    )
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tile", [Tile(2, 64, 1), Tile(16, 64, 2), Tile(8, 512, 8)])
def test_any_tile_gives_the_same_answer(answer, rows, tile):
    """From a chunk that holds every column to chunks that were not all asked for early."""
    x, weight = randoms((rows, 300), (10, 300))
    gate, up = (torch.nn.functional.rms_norm(x, (300,)) @ weight.T).chunk(2, 1)
    torch.testing.assert_close(answer, torch.nn.functional.silu(gate) * up, atol=1e-4, rtol=1e-4)


def among_neighbours() -> list[torch.Tensor]:
    """The first three of eight rows, among these and among others."""
    x, weight = randoms((8, 200), (33, 200))
    other = torch.cat((x[:3], torch.full((3, 200), 1e30)))
    return [run_skinny_linear(rows, weight, norm_weight=torch.ones(200))[:3] for rows in (x, other)]


@needs_triton
@beforehand(lambda: (among_neighbours,))
def test_a_row_depends_on_no_neighbour(answer):
    """Not one bit, and not on how many there are, as long as the same kernel serves them."""
    whole, other = answer
    assert torch.equal(other, whole)


def large() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 64), 6e4).half(), randoms((16, 64))[0].half()


@needs_triton
@beforehand(lambda: (partial(run_skinny_linear, norm_weight=torch.full((64,), 8.0).half()), *large()))
def test_large_values_in_half_precision(answer):
    """x times the norm's weight exceeds float16, the norm of x does not."""
    expected = torch.full((2, 64), 8.0) @ large()[1].float().T
    torch.testing.assert_close(answer.float(), expected, atol=0.1, rtol=1e-2)


@pytest.mark.parametrize(
    ("x", "others", "message"),
    [
        ((17, 8), {}, r"x \[17, 8\].*need \[1 to 16, K\]"),
        ((0, 8), {}, r"x \[0, 8\]"),
        ((2, 9), {}, r"x \[2, 9\], weight \[6, 8\]"),
        ((2, 8), {"bias": torch.ones(5)}, r"bias \[5\].*must be \[6\]"),
        ((2, 8), {"norm_weight": torch.ones(6)}, r"norm_weight \[6\].*must be \[8\]"),
        ((2, 8), {"residual": torch.ones(2, 6), "glu": True}, r"residual \[2, 6\].*must be \[2, 3\]"),
        ((2, 8), {"residual": torch.ones(6, 2).T}, "contiguous"),
        ((2, 8), {"residual": torch.ones(2, 6).half()}, "must have the weight's dtype, torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(x, others, message):
    with pytest.raises(ValueError, match=message):
        skinny_linear(torch.ones(x), torch.ones(6, 8), **others)


def test_what_would_overwrite_its_input_is_refused():
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="residual must not be x"):
        skinny_linear(x, torch.ones(8, 8), residual=x)
    with pytest.raises(ValueError, match=r"weight \[7, 8\] cannot hold gate and up"):
        skinny_linear(x, torch.ones(7, 8), glu=True)


def test_who_is_served():
    assert "CUDA" in supports(Model(TINY))
    sparse = Model(replace(TINY, moe=MoeConfig(4, 2, 8, True, 1, frozenset({0}))), device="meta")
    assert "layer 1 has a sparse MLP" in supports(sparse)


def test_up_to_how_many_rows_it_pays(monkeypatch):
    """As many as the poorest of a layer's projections allows; one, where nobody measured."""
    model = Model(TINY, device="meta")
    assert (most_rows(model), pays(1, 80, 24), pays(2, 80, 24)) == (1, True, False)
    layer = model.layers[0]
    every = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    for projection, rows in zip(every, (16, 8, 6, 16), strict=True):
        monkeypatch.setitem(PAYS_TO, tuple(projection.weight.shape), rows)
    assert most_rows(model) == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_the_gpu():
    assert not [(name, error) for name, error, allowed in gpu_cases() if not error <= allowed]
