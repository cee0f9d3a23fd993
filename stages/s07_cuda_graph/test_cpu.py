"""What stage 07 computes in its own way on a CPU: products, attention of one query, decode steps, compiled ones."""

import sys
from typing import Any

import pytest
import torch

from reference.checkpoints import tiny_names
from stages.s01_forward.layers import rms_norm
from stages.s01_forward.sampling_params import SamplingParams
from stages.s03_paged_kv.attention_cases import exact_attention, make_case
from stages.s07_cuda_graph import cpu_attention, cpu_compiled, cpu_forward, cpu_linear
from stages.s07_cuda_graph.llm import LLM

PROMPTS, LENGTHS = [[5] * 3, [6, 7] * 9, [8], list(range(3, 40))], (9, 4, 6, 7)


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


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_lies_as_its_operand_does(bias):
    x, weight, b = torch.randn(48, 16).t(), torch.randn(96, 48), torch.randn(96) if bias else None
    out = cpu_linear.linear(x, weight, b)
    assert out.stride() == (1, 16)
    torch.testing.assert_close(out, torch.nn.functional.linear(x.contiguous(), weight, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((1,), (1,)), ((1,), (130,)), ((1, 1, 1), (5, 33, 20)), ((1, 1), (7, 200)), ((1, 4, 1, 1), (9, 30, 0, 140))],
    ids=["one key", "one row", "of about one length", "in two calls", "with a chunk and a padding row"],
)
@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_attention(q_lens, kv_lens, group, layout):
    """Against float64; in the second layout, which cannot be seen as vectors, it is stage 03's."""
    case = make_case(q_lens, kv_lens, group=group, layout=layout)
    plan = cpu_attention.make_plan(q_lens, kv_lens, case.block_table, case.shape)
    assert isinstance(plan, cpu_attention.CpuPlan)
    out = cpu_attention.paged_attention(*case.inputs, plan, case.scale)
    torch.testing.assert_close(out.double(), exact_attention(case), rtol=1e-5, atol=1e-5)


def test_attention_in_another_dtype_is_that_of_stage_03():
    case = make_case((1, 1), (7, 20), dtype=torch.bfloat16)
    plan = cpu_attention.make_plan((1, 1), (7, 20), case.block_table, case.shape)
    assert not isinstance(plan, cpu_attention.CpuPlan)
    out = cpu_attention.paged_attention(*case.inputs, plan, case.scale)
    torch.testing.assert_close(out.double(), exact_attention(case), rtol=2e-2, atol=2e-2)


def logits(llm: LLM, copies: int) -> list[torch.Tensor]:
    """What every step of a run found, for rows of unequal lengths that join and leave."""
    runner: Any = llm.engine.runner
    runner.tap = []
    llm.generate(PROMPTS * copies, [SamplingParams(max_tokens=n, ignore_eos=True) for n in LENGTHS * copies])
    tap: list[torch.Tensor] = runner.tap
    assert len(tap) > 4
    return tap


def same(own: list[torch.Tensor], model: list[torch.Tensor], atol: float = 1e-4) -> None:
    assert len(own) == len(model)
    for ours, theirs in zip(own, model, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("name", tiny_names())
def test_forward_gives_the_logits_of_the_model(name, copies, tiny):
    """For up to 4 rows, and for up to 12, which lie column by column; and its own way is taken."""
    taps = []
    for few_rows in (False, True):
        llm = LLM(tiny(name), device="cpu", dtype="float32", kv_cache_mb=8, few_rows=few_rows)
        runner: Any = llm.engine.runner
        assert bool(runner.step.few) == few_rows
        taps.append(logits(llm, copies))
    same(*taps)


@pytest.mark.parametrize("name", [name for name in tiny_names() if "moe" not in name])
def test_what_is_compiled_gives_the_logits_of_the_model(name, tiny, monkeypatch):
    """Before it is compiled: its arithmetic and its padding, for up to 4 rows; 12 rows go the usual way."""
    monkeypatch.setattr(cpu_compiled, "compiled", lambda part: part)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_mb": 8}
    own, model = LLM(tiny(name), compiled=True, **options), LLM(tiny(name), few_rows=False, **options)
    runner: Any = own.engine.runner
    assert [way.most for way in runner.step.few] == [8, sys.maxsize]
    for copies in (1, 3):
        same(logits(own, copies), logits(model, copies))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("outputs", [96, 98, 97])
def test_compiled_product(tokens, outputs):
    """Before it is compiled; of W four, two or one row at once."""
    x, weight, bias = torch.randn(tokens, 48), torch.randn(outputs, 48), torch.randn(outputs)
    exact = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(cpu_compiled.product(x, weight, bias), exact, rtol=1e-5, atol=1e-5)


def test_compiled(tiny, monkeypatch):
    """By the compiler, where there is one, and nothing later than at the start; where there is none, as before."""
    monkeypatch.setattr(cpu_compiled, "ROWS", (1,))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_mb": 8}
    own, model = LLM(tiny("qwen3"), compiled=True, **options), LLM(tiny("qwen3"), few_rows=False, **options)
    made = dict(torch._dynamo.utils.counters["stats"])
    same(logits(own, 1), logits(model, 1))
    assert made == torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("llama", "float32", "No working C.. compiler found"),
        ("qwen3_moe", "float32", "the model has sparse MLPs"),
        ("llama", "bfloat16", "it pays for weights in float32, and these are in torch.bfloat16"),
    ],
)
def test_what_is_not_compiled_is_computed_as_before(name, dtype, message, tiny, monkeypatch):
    """A warning says why, and the answers are the same."""

    def refuse(part):
        raise RuntimeError("No working C++ compiler found\nmany lines more")

    monkeypatch.setattr(cpu_compiled, "compiled", refuse)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "kv_cache_mb": 8}
    with pytest.warns(UserWarning, match=f"decode steps are not compiled: {message}$"):
        own = LLM(tiny(name), compiled=True, **options)
    same(logits(own, 1), logits(LLM(tiny(name), **options), 1), atol=0)
