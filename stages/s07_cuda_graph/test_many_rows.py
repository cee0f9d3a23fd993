"""The forward pass for many rows in Triton's interpreter and, there, on a GPU: the model's own result."""

import importlib.util

import pytest
import torch

from stages.s01_forward.layers import Linear
from stages.s01_forward.model import Model
from stages.s07_cuda_graph import few_rows
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.few_cases import ALLOWED
from stages.s07_cuda_graph.few_model_cases import ALLOWED_MODEL, TINY
from stages.s07_cuda_graph.many_cases import PartsCase, case_error, gpu_cases, small_cases
from stages.s07_cuda_graph.many_rows import forward_many, product
from stages.s07_cuda_graph.step import few_rows as ways

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no package for this platform"
)


@needs_triton
@beforehand(lambda case: (case_error, case))
@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_equals_the_model_or_the_sum(answer, case):
    assert answer <= (ALLOWED if isinstance(case, PartsCase) else ALLOWED_MODEL)[case.dtype]


def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
    made = Linear(inputs, outputs, bias).to_empty(device="cpu")
    for weight in made.parameters():
        weight.normal_()
    return made


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 2048), (8200, 2050)])
def test_a_product_of_few_columns_comes_in_halves(inputs, outputs):
    x, projection, half = torch.randn(3, inputs), linear(inputs, outputs), inputs // 2
    parts = product(x, projection)
    assert parts.shape == (2, 3, outputs)
    torch.testing.assert_close(parts[0], x[:, :half] @ projection.weight[:, :half].T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(parts.sum(0), projection(x), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 2049, False), (64, 16, True), (65, 16, False)])
def test_any_other_product_is_the_models(inputs, outputs, bias):
    """One of many columns, one with a bias, which belongs to the sum, and one that has no halves."""
    x, projection = torch.randn(3, inputs), linear(inputs, outputs, bias)
    assert torch.equal(product(x, projection), projection(x))


@needs_triton
@pytest.mark.parametrize(
    "x", [torch.ones(2, 3, 5), torch.ones(2, 4, 4), torch.ones(2, 4, 5).half(), torch.ones(2, 5, 4).mT]
)
def test_parts_that_do_not_fit_are_refused(x):
    from stages.s07_cuda_graph.norm_kernel import add_rms_norm

    with pytest.raises(ValueError, match=r"residual \(4, 5\).* does not fit"):
        add_rms_norm(x, torch.ones(4, 5), torch.ones(5), 1e-5)


def test_few_rows_first_and_then_many(monkeypatch):
    """Of the ways through a model, the first with room for a step's tokens serves it."""
    model = Model(TINY, device="meta")
    assert ways(model) == ()
    monkeypatch.setattr(few_rows, "supports", lambda model: None)
    assert [(way.forward, way.most) for way in ways(model)] == [(few_rows.forward_few, 1), (forward_many, 384)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_the_gpu():
    assert not [(name, error) for name, error, allowed in gpu_cases() if not error <= allowed]
