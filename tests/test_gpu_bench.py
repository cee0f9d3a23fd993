"""The GPU benchmark on a CPU: its workloads cut short, a small shape, and every one of its refusals."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from reference.bench import gpu
from reference.bench.gpu import Run, check_logits, cut, forget, measurements, run_workload
from reference.bench.gpu_shapes import SHAPES, random_checkpoint
from reference.bench.harness import Result
from reference.bench.roofline import H200, Shape, generate_floor
from reference.bench.workloads import workloads
from stages.s06_prefix_cache.llm import LLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    random_checkpoint("tiny", folder, "cpu")
    return folder


def hf_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def engine(folder):
    return LLM(folder, device="cpu", max_model_len=256, max_num_batched_tokens=512, max_num_seqs=8, kv_cache_mb=8)


def test_real_shapes():
    """Bytes of K/V per token, bf16, as the published shapes have them."""
    kv_bytes = {name: Shape.from_config(config).kv_bytes() for name, config in SHAPES.items()}
    assert kv_bytes == {"qwen3-0.6b": 114_688, "qwen2.5-1.5b": 28_672, "qwen2.5-7b": 57_344, "tiny": 512}


def test_cut_keeps_what_a_workload_is_about():
    work = cut(workloads()["shared_prefix"], 3, 100)
    assert [len(prompt) for prompt in work.prompts] == [100] * 3 and work.output_lens == (32,) * 3
    assert len({prompt[:36] for prompt in work.prompts}) == 1 and len(set(work.prompts)) == 3
    assert cut(workloads()["single"], None, None) == workloads()["single"]


def test_logits_agree_in_chunks_in_decode_and_on_found_prefixes(checkpoint):
    llm = engine(checkpoint)
    found = check_logits(llm, hf_model(checkpoint), (1, 17, 100, 200), 3, chunk_budget=60)
    assert found.rows == 3 * 4 * 3 and found.reused == 16 + 96 + 192
    assert found.chunks >= 2 * 200 // 60 and llm.engine.scheduler.max_num_batched_tokens == 512
    assert 0 < found.theirs < 0.05 and found.ratio < gpu.ALLOWED


def test_wrong_logits_are_refused(checkpoint):
    llm = engine(checkpoint)
    llm.model.layers[1].self_attn.q_norm.weight.mul_(1.2)
    with pytest.raises(RuntimeError, match="logits differ from Hugging Face's"):
        check_logits(llm, hf_model(checkpoint), (17,), 2)


def test_a_missing_token_is_refused(checkpoint):
    """The model's length ends the answer early: 128 + 512 tokens are more than 256."""
    with pytest.raises(RuntimeError, match="single: 128 tokens came, 512 were asked for"):
        run_workload(engine(checkpoint), workloads()["single"])


def test_forget_empties_the_prefix_cache_and_keeps_the_engine(checkpoint):
    llm, work = engine(checkpoint), cut(workloads()["shared_prefix"], 2, 40)
    assert [run_workload(llm, work).reused for _ in range(2)][1] > 0
    blocks = llm.engine.scheduler.cache.pool.num_blocks
    forget(llm)
    assert llm.engine.scheduler.cache.pool.num_blocks == blocks
    run = run_workload(llm, cut(work, 1, None))
    assert run.reused == 0 and len(run.steps) >= 32 and len(run.first_tokens) == 1


def test_the_best_run_is_held_against_the_floor():
    work, shape = workloads()["single"], Shape.from_config(SHAPES["qwen3-0.6b"])
    runs = [Run(2.0, [1.0, 0.5], [0.3], 0), Run(1.0, [0.25, 0.5], [0.1], 7)]
    found = {each.name: each for each in measurements(work, runs, shape, H200)}
    assert (found["single"].median, found["single"].low, found["single"].high) == (512 / 1.5, 256, 512)
    assert found["single, best run"].median == 512
    assert found["single, best run"].roofline == generate_floor(shape, H200, [128], [512])
    assert found["single, outside the steps"].median == 0.25
    assert found["single, prompt tokens found in the cache"].median == 7
    assert found["single, step, p50"].median == 375.0


def test_from_end_to_end(tmp_path):
    gpu.main(
        f"--model-shape tiny --stage 6 --workloads mixed shared_prefix --device cpu --kv-cache-mb 32 --requests 3 "
        f"--tokens 24 --longest-check 17 --out {tmp_path}".split()
    )
    result = Result.load("s06_gpu_tiny", tmp_path)
    assert result["mixed"].unit == "tok/s" and result["mixed"].repeats == 2
    assert result["mixed, best run"].roofline is None and result["mixed, prompt tokens found in the cache"].median == 0
    assert result["shared_prefix, steps"].median >= 24


def test_without_a_gpu_it_says_how_to_try_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--model-shape", "qwen3-0.6b"])
    assert "--device cpu --model-shape tiny" in capsys.readouterr().err
