"""What stage 07 computes in its own way on a CPU: the matrix product, and the forward pass of a decode step."""

from typing import Any

import pytest
import torch

from reference.checkpoints import tiny_names
from stages.s01_forward.layers import rms_norm
from stages.s01_forward.sampling_params import SamplingParams
from stages.s07_cuda_graph import cpu_forward, cpu_linear
from stages.s07_cuda_graph.llm import LLM


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """So many threads of PyTorch's, of which the product takes one part each."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 17, 32, 33, 70])
@pytest.mark.parametrize(("outputs", "bias", "tile"), [(96, False, 2**21), (97, True, 2**21), (96, True, 48 * 20)])
def test_product(dtype, tokens, outputs, bias, tile, threads, monkeypatch):
    """Against float64, whole and in tiles of 20 of the 96 outputs, whether or not the threads divide them."""
    monkeypatch.setattr(cpu_linear, "TILE", tile)
    monkeypatch.setattr(cpu_linear, "multiplies_bf16", lambda: False)
    rng = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, 48, generator=rng).to(dtype) for n in (tokens, outputs))
    b = torch.randn(outputs, generator=rng).to(dtype) if bias else None
    out = cpu_linear.linear(x, weight, b)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    assert out.dtype == dtype
    assert out.is_contiguous()
    rtol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=10 * rtol)


def test_a_processor_with_bf16_multiplies_it_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_linear, "product", None)  # not called
    x, weight = torch.randn(9, 48).bfloat16(), torch.randn(5, 48).bfloat16()
    assert torch.equal(cpu_linear.linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype):
    x, weight = torch.randn(5, 3, 48).to(dtype), torch.randn(48).to(dtype)
    ours, theirs = cpu_forward.rms_norm(x, weight, 1e-2), rms_norm(x, weight, 1e-2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("name", tiny_names())
def test_forward_gives_the_logits_of_the_model(name, tiny):
    """Step by step, for rows of unequal lengths that join and leave; and its own way is taken."""
    prompts = [[5] * 3, [6, 7] * 9, [8], list(range(3, 40))]
    params = [SamplingParams(max_tokens=n) for n in (9, 4, 6, 7)]
    taps: list[list[torch.Tensor]] = []
    for few_rows in (False, True):
        llm = LLM(tiny(name), device="cpu", dtype="float32", kv_cache_mb=4, few_rows=few_rows)
        runner: Any = llm.engine.runner
        assert bool(runner.step.few) == few_rows
        runner.tap = []
        llm.generate(prompts, params)
        taps.append(runner.tap)
    assert len(taps[0]) == len(taps[1]) > 4
    for model, own in zip(*taps, strict=True):
        torch.testing.assert_close(own, model, rtol=0, atol=1e-4)
