"""The GPU benchmark on a CPU: its workloads cut short, a small shape, and every one of its refusals."""

import importlib
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType
from transformers import AutoModelForCausalLM

from reference.bench import __main__ as bench
from reference.bench import (
    gpu,
    gpu_ablation,
    gpu_logits,
    gpu_scaling,
    lines,
    peers,
    small_card,
    startup,
    tables,
    waiting,
)
from reference.bench.gpu_logits import HuggingFace, check_logits, recorded_logits
from reference.bench.gpu_parts import change_without
from reference.bench.gpu_runs import Run, cut, cut_answers, forget, measurements, run_floor, run_workload
from reference.bench.gpu_shapes import SHAPES, random_checkpoint
from reference.bench.gpu_split import loads_of, measure_kernels, measure_split, plot_split
from reference.bench.gpu_steady import fill_store
from reference.bench.gpu_step_times import PARTS, split_steps
from reference.bench.harness import Measurement, Result
from reference.bench.plots import heat_map, stacked
from reference.bench.provenance import ROOT, command
from reference.bench.roofline import (
    H200,
    Shape,
    decode_floor,
    decode_parts,
    generate_floor,
    prefill_floor,
    prompt_parts,
)
from reference.bench.workloads import NAMES, workloads
from stages.s01_forward.sampling_params import SamplingParams

STAGES = {6: "s06_prefix_cache", 7: "s07_cuda_graph"}
SMALL = {"max_model_len": 256, "max_num_batched_tokens": 512, "max_num_seqs": 8, "kv_cache_mb": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    random_checkpoint("tiny", folder, "cpu")
    return folder


def theirs(folder):
    return HuggingFace(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())


def engine(folder, stage=7, **options):
    llm_class = importlib.import_module(f"stages.{STAGES[stage]}.llm").LLM
    return llm_class(folder, device="cpu", **SMALL, **options)


def each_engine(test):
    kinds = {"stage 6": (6, {}), "stage 7": (7, {}), "stage 7, one after the other": (7, {"overlap": False})}
    return pytest.mark.parametrize(("stage", "options"), kinds.values(), ids=list(kinds))(test)


def test_real_shapes():
    """Bytes of K/V per token, bf16, as the published shapes have them."""
    kv_bytes = {name: Shape.from_config(config).kv_bytes() for name, config in SHAPES.items()}
    assert kv_bytes == {"qwen3-0.6b": 114_688, "qwen2.5-1.5b": 28_672, "qwen2.5-7b": 57_344, "tiny": 512}


def test_cut_keeps_what_a_workload_is_about():
    work = cut(workloads()["shared_prefix"], 3, 100)
    assert [len(prompt) for prompt in work.prompts] == [100] * 3 and work.output_lens == (32,) * 3
    assert len({prompt[:36] for prompt in work.prompts}) == 1 and len(set(work.prompts)) == 3
    assert cut(workloads()["single"], None, None) == workloads()["single"]
    work = cut_answers(workloads()["mixed"], 7, 300)
    assert work.prompts == workloads()["mixed"].prompts[:7] and max(work.output_lens) == 300 > min(work.output_lens)


class TestLogits:
    @each_engine
    def test_agree_in_chunks_in_decode_on_found_prefixes_and_at_once(self, checkpoint, stage, options):
        llm = engine(checkpoint, stage, **options)
        found = check_logits(llm, theirs(checkpoint), (1, 17, 100, 200), 3, chunk_budget=60, many=8)
        assert found.rows == 3 * (3 * 4 + 8 + 1) and found.reused == 16 + 96 + 192
        assert found.chunks >= 2 * 200 // 60 and llm.engine.scheduler.max_num_batched_tokens == 512
        assert 0 < found.theirs < 0.05 and found.ratio < gpu_logits.ALLOWED

    @each_engine
    def test_wrong_ones_are_refused(self, checkpoint, stage, options):
        llm = engine(checkpoint, stage, **options)
        llm.model.layers[1].self_attn.q_norm.weight.mul_(1.2)
        with pytest.raises(RuntimeError, match="logits differ from Hugging Face's"):
            check_logits(llm, theirs(checkpoint), (17,), 2)

    def test_one_wrong_decode_step_is_refused(self, checkpoint):
        """What is compared is what was sampled from, not what a second pass over the same ids would give."""
        llm = engine(checkpoint, few_rows=False)  # so that the model makes its logits itself
        step = llm.engine.runner.step
        logits_of, calls = step.model.logits, 0

        def logits(hidden):
            nonlocal calls
            calls += 1
            return logits_of(hidden) * (1.3 if calls == 3 else 1.0)

        step.model.logits = logits
        with pytest.raises(RuntimeError, match="logits differ from Hugging Face's"):
            check_logits(llm, theirs(checkpoint), (17,), 4)

    @each_engine
    def test_a_row_computed_in_vain_is_left_out(self, checkpoint, stage, options):
        """The third token ends the answer; with overlap a fourth is on its way by then."""
        llm = engine(checkpoint, stage, **options)
        prompts = [[5, 6, 7], [9, 9]]
        free = [o.token_ids for o in llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))]
        params = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=[free[0][2]])
        with recorded_logits(llm) as recorded:
            answers = [output.token_ids for output in llm.generate(prompts, params)]
        assert len(answers[0]) == 3
        assert [each.argmax(-1).tolist() for each in recorded.of(answers)] == answers

    def test_both_dtypes_are_the_same_weights_and_frequencies(self, checkpoint):
        """Back and forth changes nothing."""
        model, ids = theirs(checkpoint), [[5, 6, 7], [8], [1, 2, 3]]
        first = model.logits(ids, 1, torch.bfloat16)
        exact = model.logits(ids, 1, torch.float32)
        again = model.logits(ids, 1, torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        fresh = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        for each, row in zip(ids, exact, strict=True):
            torch.testing.assert_close(fresh(torch.tensor([each])).logits[0, -1:], row)


class TestRuns:
    def test_a_missing_token_is_refused(self, checkpoint):
        """The model's length ends the answer early: 128 + 512 tokens are more than 256."""
        with pytest.raises(RuntimeError, match="single: 128 tokens came, 512 were asked for"):
            run_workload(engine(checkpoint), workloads()["single"])

    @each_engine
    def test_forget_empties_the_prefix_cache_and_keeps_the_engine(self, checkpoint, stage, options):
        llm, work = engine(checkpoint, stage, **options), cut(workloads()["shared_prefix"], 2, 40)
        assert [run_workload(llm, work).reused for _ in range(2)][1] > 0
        blocks = llm.engine.scheduler.cache.pool.num_blocks
        forget(llm)
        assert llm.engine.scheduler.cache.pool.num_blocks == blocks
        run = run_workload(llm, cut(work, 1, None))
        assert run.reused == 0 and len(run.steps) >= 32 and len(run.first_tokens) == 1
        assert len(run.cycles) == len(run.steps) - 1
        assert sum(run.cycles) <= run.seconds - run.steps[0]
        assert all(cycle >= step for cycle, step in zip(run.cycles, run.steps[1:], strict=True))

    def test_what_is_shared_is_read_once(self):
        """Of 64 rows with 2,048 tokens in common, and with the 16 that are computed when the rest was found."""
        work, shape = workloads()["shared_prefix"], Shape.from_config(SHAPES["qwen3-0.6b"])
        decode = decode_parts(shape, H200, [2112] * 64, shared=2048)
        assert decode["attention"] * H200.bandwidth == pytest.approx((2048 + 64 * 64) * 114_688)
        assert decode["products"] == decode_parts(shape, H200, [2112] * 64)["products"]
        floor = run_floor(work, 64 * 2096, shape, H200)
        steps = 31 * sum(decode_parts(shape, H200, [2128] * 64, shared=2048).values())
        assert floor - steps == pytest.approx(sum(prompt_parts(shape, H200, [(2096, 16)] * 64, shared=2048).values()))
        assert run_floor(work, 0, shape, H200) > 3 * floor

    def test_the_best_run_is_held_against_the_floor(self):
        work, shape = workloads()["single"], Shape.from_config(SHAPES["qwen3-0.6b"])
        runs = [Run(2.0, [1.0, 0.5], [0.3], 7), Run(1.0, [0.25, 0.5], [0.1], 0, replays=2)]
        found = {each.name: each for each in measurements(work, runs, shape, H200)}
        assert (found["single"].median, found["single"].low, found["single"].high) == (512 / 1.5, 256, 512)
        assert found["single, best run"].median == 512
        assert found["single, best run"].roofline == generate_floor(shape, H200, [128], [512])
        assert found["single, outside the steps"].median == 0.25
        assert found["single, prompt tokens found in the cache"].median == 0
        assert found["single, step, p50"].median == 375.0
        assert found["single, steps"].note == "2 of them were a graph"


class TestSplit:
    @each_engine
    def test_the_parts_are_the_whole_and_every_token_is_in_a_step(self, checkpoint, stage, options):
        llm, work = engine(checkpoint, stage, **options), cut(workloads()["mixed"], 4, 30)
        with split_steps(llm) as steps:
            run_workload(llm, work)
        assert all(tuple(step.parts) == PARTS and step.gpu is None for step in steps)
        assert all(sum(step.parts.values()) == pytest.approx(step.seconds) for step in steps)
        assert all(value >= 0 for step in steps for value in step.parts.values())
        assert sum(step.tokens for step in steps) == work.prompt_tokens + work.output_tokens - 4
        assert sum(step.decodes for step in steps) == max(work.output_lens) - 1
        assert min(sum(step.parts[part] for step in steps) for part in PARTS) > 0

    def test_the_engine_is_as_it_was_afterwards(self, checkpoint):
        llm = engine(checkpoint)
        with split_steps(llm):
            pass
        assert not {"step"} & vars(llm.engine).keys()
        assert not {"schedule", "update"} & vars(llm.engine.scheduler).keys()
        assert "execute" not in vars(llm.engine.runner)

    def test_loads_are_steps_of_one_kind(self):
        """As many prompts as fill six steps; all rows halfway through the shortest answer; a prefix that is there."""
        found = {load.name: load for name in NAMES for load in loads_of(workloads()[name], 8192)}
        assert list(found) == [
            "mixed, decode step", "mixed, step with prompts", "decode_heavy, decode step", "single, decode step",
            "prefill, step with prompts", "shared_prefix, step with prompts", "shared_prefix, decode step",
        ]  # fmt: skip
        prompts = found["prefill, step with prompts"].work
        assert len(prompts.prompts) == 24 and set(prompts.output_lens) == {1}
        assert found["mixed, step with prompts"].work.prompt_tokens <= 6 * 8192
        assert {len(prompt) for prompt in found["decode_heavy, decode step"].work.prompts} == {32 + 512}
        shared = found["shared_prefix, step with prompts"]
        assert len(shared.work.prompts) == 64 and [shared.shared(p) for p in shared.work.prompts[:2]] == [2096, 2048]

    def test_floors_of_steps(self):
        """A decode step of one row reads the weights; a full step of prompts computes."""
        shape = Shape.from_config(SHAPES["qwen3-0.6b"])
        (single,), (prefill,) = (loads_of(workloads()[name], 8192) for name in ("single", "prefill"))
        floor = single.floor(shape, H200, 32)
        assert (
            sum(floor.values()) == decode_floor(shape, H200, [128 + 256 + 24])
            and max(floor, key=floor.get) == "products"
        )
        floor = prefill.floor(shape, H200, 6)
        lens = [2048] * 24
        assert 6 * (floor["products"] + floor["attention"]) == pytest.approx(
            prefill_floor(shape, H200, lens) + shape.head * 2 / H200.bandwidth, rel=1e-6
        )

    def test_medians_of_decode_steps_and_their_picture(self, checkpoint):
        llm, work = engine(checkpoint), cut(workloads()["decode_heavy"], 4, 30)
        (load,) = loads_of(work, 512, 20)
        fill_store(llm)
        found = measure_split(llm, load, Shape.from_config(SHAPES["tiny"]), H200)
        assert [each.name.removeprefix("decode_heavy, decode step") for each in found] == [
            "", *(f": host, {part}" for part in PARTS), ": floor",
            *(f": floor, {part}" for part in ("products", "attention", "sampling")),
        ]  # fmt: skip
        assert found[0].note == "of 20 steps" and found[0].unit == "ms"
        pictures = plot_split(found, "title")
        assert list(pictures) == ["host"] and "launch" in pictures["host"]._repr_svg_()
        assert measure_kernels(llm, load, 1.0) == []
        (load,) = loads_of(cut(workloads()["prefill"], 2, 30), 512)
        prefill = measure_split(llm, load, Shape.from_config(SHAPES["tiny"]), None)
        assert prefill[0].name == "prefill, step with prompts" and prefill[0].note == "of 1 steps"
        whole, *parts = [each.median for each in prefill]
        assert sum(parts) == pytest.approx(whole) and min(parts) > 0, "the tokens of the only step come a step later"

    @each_engine
    def test_a_filled_cache_spares_the_prompts(self, checkpoint, stage, options):
        """Every row decodes in its first step; what is shared is found; ordinary books compute prompts again."""
        llm = engine(checkpoint, stage, **options)
        fill_store(llm)
        for load in loads_of(cut(workloads()["shared_prefix"], 3, 100), 512, 4):
            load.prepare(llm)
            with split_steps(llm) as steps:
                run = run_workload(llm, load.work)
            first = next(step for step in steps if step.rows)
            assert first.rows == 3 and first.decodes == load.decodes
            assert run.reused == 96 + 32 + 32, "whole blocks: of the same prompt, and of the 36 tokens that are shared"
            assert load.decodes or [load.shared(prompt) for prompt in load.work.prompts] == [96, 32, 32]

    def test_events_and_the_profiler_tell_of_the_gpu(self, checkpoint, monkeypatch):
        """Stand-ins for both: events 2 ms apart, and in 8 steps of the profiler 12 ms of kernels, some at once."""
        llm, work, clock = engine(checkpoint), cut(workloads()["single"], 1, 30), itertools.count()

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = next(clock)

            def elapsed_time(self, other):
                return 2.0 * (other.at - self.at)

        profiled = []

        class Profile:
            def __init__(self, activities):
                assert activities == [torch.profiler.ProfilerActivity.CUDA]

            def start(self):
                profiled.append("start")

            def stop(self):
                profiled.append("stop")

            def events(self):
                ran = [(1000 * n, 1000 * n + length, name) for n in range(12) for length, name in KERNELS]
                kinds = [(DeviceType.CUDA, each) for each in ran] + [(DeviceType.CPU, (0, 90_000, "aten::mm"))]
                return [
                    SimpleNamespace(device_type=k, name=name, time_range=SimpleNamespace(start=a, end=b))
                    for k, (a, b, name) in kinds
                ]

        KERNELS = ((500, "_norm_kernel"), (1000, "nvjet_sm90_tst"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: profiled.append("wait"))
        monkeypatch.setattr(torch.profiler, "profile", Profile)
        (load,) = loads_of(work, 512, 20)
        fill_store(llm)
        load.prepare(llm)
        monkeypatch.setattr(llm, "device", torch.device("cuda"))
        monkeypatch.setattr(type(load), "prepare", lambda *_: None)
        some = measure_split(llm, load, Shape.from_config(SHAPES["tiny"]), None)
        some += measure_kernels(llm, load, 2.0)
        found = {each.name.partition(": ")[2]: each for each in some}
        assert found["GPU"].median == 2.0 and found["idle"].median >= 0
        assert found["GPU busy"].median == pytest.approx(12 / 8) and found["GPU busy"].note.startswith("3 operations")
        assert found["products"].median == found["small"].median == pytest.approx(6 / 8)
        assert found["products"].note == "nvjet_sm90_tst x1.5" and found["attention"].median == 0
        assert found["gaps"].median == pytest.approx(0.5)
        assert profiled == ["wait", "wait", "start", "wait", "stop"]
        assert all(part in plot_split(some, "title")["GPU"]._repr_svg_() for part in ("products", "nothing runs"))


class TestPeers:
    def test_figures_are_the_rates_of_the_runs(self):
        result = Result.load("peers_h200")
        sglang = result["qwen3-0.6b, decode_heavy, SGLang 0.5.17"]
        assert (sglang.repeats, sglang.unit) == (2, "tok/s") and round(sglang.high) == 34_249
        assert round(result["qwen3-0.6b, prefill, SGLang 0.5.17"].high) == 383_251
        assert all(len(peers.peers(shape, name)) >= 2 for shape in tables.SHAPES for name in NAMES)

    def test_the_best_of_them_counts(self):
        ratio, who = peers.against_best_peer("qwen2.5-1.5b", "single", 888.12)
        assert ratio == pytest.approx(2.0, rel=1e-3) and who == "vLLM 0.25.1 (444)"
        assert peers.against_best_peer("tiny", "single", 1.0) is None

    def test_table_has_the_best_in_bold(self):
        table = peers.peers_table({"qwen3-0.6b": {"single": 600.0, "mixed": 20_000.0}})
        rows = {line.split(" | ")[1]: line for line in table.splitlines()[2:]}
        assert "| **600** |" in rows["ours"] and "| 20,000 |" in rows["ours"]
        assert "**582**" not in table and "| **21,641** |" in rows["vLLM 0.25.1"]
        assert rows["ours / best peer"].split(" | ")[2:5] == ["0.92", "", "1.03"]


class TestFromEndToEnd:
    TRIAL = "--model-shape tiny --device cpu --kv-cache-mb 32 --requests 3 --tokens 24 --longest-check 17"

    def test_workloads_of_stage_06(self, tmp_path):
        gpu.main(f"{self.TRIAL} --stage 6 --workloads mixed shared_prefix --out {tmp_path}".split())
        result = Result.load("s06_gpu_tiny", tmp_path)
        assert result["mixed"].unit == "tok/s" and result["mixed"].repeats == 2
        assert result["mixed, best run"].roofline is None
        assert result["mixed, prompt tokens found in the cache"].median == 0
        assert result["shared_prefix, steps"].median >= 24 and result["mixed, steps"].note == ""
        assert result["mixed, decode step: host, launch"].median > 0
        assert (tmp_path / "s06_gpu_tiny_host.svg").is_file() and not (tmp_path / "s06_gpu_tiny_gpu.svg").exists()

    def test_all_workloads_of_stage_07(self, tmp_path):
        gpu.main(f"{self.TRIAL} --all --runs 1 --no-split --without overlap prefix_cache --out {tmp_path}".split())
        result = Result.load("s07_gpu_tiny_without_overlap_without_prefix_cache", tmp_path)
        assert [name for name in NAMES if result[name].median > 0] == list(NAMES)
        assert result["shared_prefix, prompt tokens found in the cache"].median == 0

    def test_only_where_a_steps_time_goes(self, tmp_path):
        gpu.main(f"{self.TRIAL} --workloads single --runs 0 --out {tmp_path}".split())
        names = [each.name for each in Result.load("s07_gpu_tiny", tmp_path).measurements]
        assert names[2] == "single, decode step" and not any("best run" in name for name in names)

    def test_ablation(self, tmp_path):
        gpu.main(f"{self.TRIAL} --ablation --parts graphs prefix_cache --out {tmp_path}".split())
        result = Result.load("speed_ablation_tiny", tmp_path)
        assert len(result.measurements) == 3 * 5
        assert result["mixed, everything"].note == "1.00 times the time"
        assert result["single, without graphs"].median > 0
        assert (tmp_path / "speed_ablation_tiny.svg").is_file()
        shown = tables.ablation("tiny", folder=tmp_path).splitlines()
        assert [line.split(" | ")[0] for line in shown[2:]] == [
            "| everything (tok/s)", "| without graphs", "| without prefix_cache"
        ]  # fmt: skip

    def test_batch_sizes(self, tmp_path, monkeypatch):
        stepwise = {"eager": gpu_ablation.STEPWISE["eager"], "graph + overlap": ()}
        monkeypatch.setattr(gpu_ablation, "STEPWISE", stepwise)
        gpu.main(f"{self.TRIAL} --batch-sizes 1 3 --out {tmp_path}".split())
        result = Result.load("s07_batch_tiny", tmp_path)
        names = [each.name for each in result.measurements]
        assert names[:3] == ["eager, 1 rows", "eager, 3 rows", "graph + overlap, 1 rows"]
        assert all(each.unit == "ms" and each.repeats == 24 for each in result.measurements)
        assert (tmp_path / "s07_batch_tiny.svg").is_file()

    def test_scaling(self, tmp_path):
        """Room for 27 blocks: 8 requests that end with about 45 tokens fit, with about 64 not: served in turns."""
        size = "--rows 1 8 --contexts 20 40 --prompts 50 --requests 8 --kv-cache-mb 0.22"
        gpu_scaling.main(f"--model-shape tiny --device cpu --longest-check 17 {size} --out {tmp_path}".split())
        result = Result.load("speed_scaling_tiny", tmp_path)
        assert result["8 rows, 20 tokens: rate"].median > 0 and result["1 rows, 40 tokens: step"].repeats == 32
        assert result["8 rows, 40 tokens: no room"].median == 16 * (4 * 5 + 4 * 4)
        assert 0 < result["8 rows, 40 tokens, too many: at once"].median <= 8
        assert result["K/V of a token"].median == 512 and result["one prompt of 50 tokens"].repeats == 2
        rates = gpu_scaling.cells(result, "rate", (1, 8), (20, 40))
        assert rates[1][1] is None and min(rates[0][0], rates[0][1], rates[1][0]) > 0
        assert gpu_scaling.cells(result, "floor", (1, 8), (20, 40)) is None, "the floor of this machine is not known"
        assert (tmp_path / "speed_scaling_tiny_rate.svg").is_file()

    def test_waiting(self, tmp_path):
        waiting.main(f"--queues 0 20 --running 4 --steps 10 --out {tmp_path}".split())
        result = Result.load("speed_waiting", tmp_path)
        names = [each.name for each in result.measurements]
        assert names[0] == "4 running, 0 waiting: schedule"
        assert "4 running, 20 waiting, seats but no blocks: update" in names
        assert result["20 waiting: add"].repeats == 100
        assert result["host memory of a waiting request"].median > 512 * 8

    def test_all_shapes_take_a_process_each(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=lambda command, check: calls.append(command)))
        gpu.main(["--model-shape", "all", "--device", "cpu", "--runs", "1", "--out", str(tmp_path)])
        assert [call[4:6] for call in calls] == [["--model-shape", shape] for shape in tables.SHAPES]
        assert all(call[1:4] == ["-m", "reference.bench", "gpu"] and call[-4:-2] == ["--runs", "1"] for call in calls)
        assert not list(tmp_path.iterdir()), "the processes measure, nobody else"

    def test_startup(self, tmp_path, monkeypatch):
        monkeypatch.setattr(startup, "in_fresh_process", lambda function, *arguments: function(*arguments))  # to write
        startup.main(f"--model-shape tiny --device cpu --kv-cache-mb 8 --rows 8 --warm 1 --out {tmp_path}".split())
        result = Result.load("s07_startup_tiny", tmp_path)
        total = result["warm kernel cache, to the first token"]
        parts = [result[f"warm kernel cache: {phase}"].median for phase in startup.PHASES]
        assert total.median == pytest.approx(sum(parts)) and min(parts) > 0 and total.note == "0 graphs"

    def test_small_card(self, tmp_path, monkeypatch):
        monkeypatch.setattr(small_card, "in_fresh_process", lambda function, *arguments: function(*arguments))
        small_card.main(f"--model-shape tiny --device cpu --context 64 --out {tmp_path}".split())
        result = Result.load("s07_small_card_tiny", tmp_path)
        shape = Shape.from_config(SHAPES["tiny"])
        assert result["room in the cache"].median >= 8 * 64
        assert result["weights"].median == pytest.approx(2 * (shape.body + shape.head) / 1e9, rel=0.01)


class TestRefusals:
    @pytest.mark.parametrize("module", [gpu, gpu_scaling, startup, small_card])
    def test_without_a_gpu_it_says_how_to_try_the_rest(self, module, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            module.main(["--model-shape", "qwen3-0.6b"])
        assert "--device cpu --model-shape tiny" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "name", ["bench_few_rows", "bench_many_rows", "bench_chunks", "bench_order", "tune_few_rows"]
    )
    def test_help_needs_no_gpu_and_a_run_does(self, name, monkeypatch, capsys):
        module = importlib.import_module(f"stages.s07_cuda_graph.{name}")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as end:
            module.main()
        assert end.value.code == 0 and module.__doc__.split(":")[0] in capsys.readouterr().out
        for arguments in ([], ["qwen3-0.6b"]):  # a shape, or a folder
            monkeypatch.setattr(sys, "argv", [name, *arguments])
            with pytest.raises(SystemExit):
                module.main()
            assert "error: needs a CUDA GPU" in capsys.readouterr().err

    def test_shapes_are_known_before_a_gpu_is_asked_for(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["bench_few_rows", "qwen9"])
        with pytest.raises(SystemExit):
            importlib.import_module("stages.s07_cuda_graph.bench_few_rows").main()
        assert "'qwen9' is none of qwen3-0.6b, " in capsys.readouterr().err

    def test_an_ablation_chooses_for_itself(self, capsys):
        with pytest.raises(SystemExit):
            gpu.main("--model-shape tiny --device cpu --ablation --without graphs".split())
        assert "leave out --without" in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--ablation", "--batch-sizes 4", "--without graphs"])
    def test_earlier_stages_have_no_switches(self, option, capsys):
        with pytest.raises(SystemExit):
            gpu.main(f"--model-shape tiny --device cpu --stage 6 {option}".split())
        assert "only stage 07" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("option", "error"), [("--rows 0 4", "--rows must be at least 1, got 0"), ("--contexts -3", "--contexts")]
    )
    def test_scaling_wants_rows_and_tokens(self, option, error, capsys):
        with pytest.raises(SystemExit):
            gpu_scaling.main(f"--model-shape tiny --device cpu {option}".split())
        assert error in capsys.readouterr().err

    def test_waiting_wants_a_queue(self, capsys):
        with pytest.raises(SystemExit):
            waiting.main(["--queues", "0"])
        assert "--queues wants two" in capsys.readouterr().err

    def test_a_part_that_is_gone_is_not_left_out_silently(self):
        """If the engine gave it another name, every row of the ablation would be the whole engine."""
        graphs = SimpleNamespace(chunks=True, captured={"a size": "its graph"})
        llm = SimpleNamespace(engine=SimpleNamespace(runner=SimpleNamespace(graphs=graphs)))
        change_without(llm, ["chunks"])
        assert graphs.chunks is False and not graphs.captured
        with pytest.raises(AttributeError, match="size_of"):
            change_without(llm, ["mixed_graphs"])

    def test_small_card_wants_all_at_once(self, checkpoint, monkeypatch):
        """One stream fewer at a time than the check asks for."""
        monkeypatch.setattr(small_card, "STREAMS", 3)
        admit = importlib.import_module("stages.s04_continuous_batching.scheduler").Scheduler.admit_waiting
        monkeypatch.setattr(
            "stages.s04_continuous_batching.scheduler.Scheduler.admit_waiting",
            lambda self, step: admit(self, step) if len(self.running) == 0 else None,
        )
        with pytest.raises(RuntimeError, match="rows at once"):
            small_card.fill_small_card(checkpoint, "cpu", 700)

    def test_names_of_benchmarks(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["bench", "gpus"])
        with pytest.raises(SystemExit, match="startup"):
            bench.main()
        monkeypatch.setattr(sys, "argv", ["bench", "report", "peers_h200"])
        bench.main()
        assert "SGLang 0.5.17" in capsys.readouterr().out


def test_graphs_of_decode_steps_alone():
    graphs = SimpleNamespace(size_of=lambda plan, queries: (plan, queries), captured={})
    change_without(SimpleNamespace(engine=SimpleNamespace(runner=SimpleNamespace(graphs=graphs))), ["mixed_graphs"])
    assert graphs.size_of("plan", 1) == ("plan", 1) and graphs.size_of("plan", 0) is None


def test_the_way_for_few_rows_stays_where_that_for_many_goes(checkpoint):
    llm = engine(checkpoint)
    step = llm.engine.runner.step
    vars(step)["few"] = ways = ("few", "many")
    change_without(llm, ["many_rows"])
    assert step.few == ways[:1]


class TestTables:
    def test_cells_have_the_share_of_the_floor_and_the_target(self, tmp_path):
        result = Result("s07_gpu_qwen2.5-7b", "")
        mixed = Measurement("mixed, best run", 13_726.9, 13_726.9, 13_726.9, "tok/s", roofline=0.75)
        result.measurements = [mixed, Measurement.single("single, best run", 105.0, "tok/s")]
        result.save(tmp_path)
        rows = [line.split(" | ") for line in tables.cells(folder=tmp_path).splitlines()[2:]]
        assert [row[1] for row in rows] == ["13,727 · **1.10**", "75%", "**13,700**", "12,882"]
        assert [row[3] for row in rows] == ["105 · 0.50", "", "268", "259"]

    def test_split_adds_up_beside_its_floor(self, tmp_path):
        parts = {
            "": 2.0, "GPU": 1.9, "GPU busy": 1.8, "products": 1.0, "attention": 0.5, "sampling": 0.1, "small": 0.15,
            "other": 0.05, "gaps": 0.1, "idle": 0.1, "floor": 1.5, "floor, products": 0.9, "floor, attention": 0.5,
            "floor, sampling": 0.1, **{f"host, {part}": 0.1 for part in PARTS},
        }  # fmt: skip
        result = Result("s07_gpu_qwen3-0.6b", "")
        for part, value in parts.items():
            name = "single, decode step" + (f": {part}" if part else "")
            result.measurements.append(Measurement.single(name, value, "ms"))
        result.save(tmp_path)
        assert tables.split("qwen3-0.6b", folder=tmp_path).splitlines()[2] == (
            "| qwen3-0.6b | single, decode step | 2 | 1 (0.9) | 0.5 (0.5) | 0.1 (0.1) | 0.15 | 0.05 | 0.1 | 0.1 | 0.4 "
            "| 1.5 | 75% |"
        )
        assert tables.left("qwen3-0.6b", folder=tmp_path).splitlines()[2] == (
            "| qwen3-0.6b | single, decode step | 25 | 5 | 0 | 0 | **10** | **10** |"
        )

    def test_names_of_tables(self, capsys):
        tables.main(["lines"])
        assert "lines of code" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            tables.main(["sizes"])


def test_lines_are_what_the_engine_imports(tmp_path):
    """From the entry on, inside functions, too; no test, no comment, no docstring."""
    stage = tmp_path / "stages" / "s01_forward"
    stage.mkdir(parents=True)
    (tmp_path / "stages" / "__init__.py").write_text("X = 1\n", encoding="utf-8")
    (stage / "__init__.py").write_text('"""A stage."""\n', encoding="utf-8")
    (stage / "llm.py").write_text(
        '"""Two\nlines."""\n\nimport torch\n\n# why\ndef f():\n    """Doc."""\n'
        "    from stages.s01_forward import layers  # late\n    return layers(\n        1\n    )\n",
        encoding="utf-8",
    )
    (stage / "layers.py").write_text('import stages.s01_forward.llm\nTEXT = """\na\n"""\n', encoding="utf-8")
    (stage / "test_layers.py").write_text("import stages.s01_forward.layers\n", encoding="utf-8")
    found = lines.reachable("stages.s01_forward.llm", tmp_path)
    assert {path.name for path in found} == {"llm.py", "layers.py", "__init__.py"}
    assert [lines.code_lines((stage / name).read_text(encoding="utf-8")) for name in ("llm.py", "layers.py")] == [6, 4]
    sources = '"""Read later: x."""\n', '"""X."""\n', "import triton\n", "from triton.experimental import gluon\n"
    assert [lines.kind_of(source) for source in sources] == ["read later", "to read", "kernels", "kernels"]


def test_command_names_no_place_of_the_machine(monkeypatch, tmp_path):
    arguments = ["python", "-m", "reference.bench", "gpu", "--out", str(tmp_path), str(ROOT / "reference" / "x.json")]
    monkeypatch.setattr(sys, "orig_argv", arguments)
    place = json.dumps(str(tmp_path.parent))
    assert place not in command()
    assert command().startswith(f"python -m reference.bench gpu --out {tmp_path.name} ")
    assert command().endswith("x.json") and "reference" in command().split()[-1]


def test_heat_map():
    values = [[1.0, 2345.6], [None, 20.0]]
    svg = heat_map(values, (1, 2), (256, 16_384), ("requests", "tokens", "ms"), "tiny")._repr_svg_()
    assert all(text in svg for text in ("2,346", "16,384", "requests", "tiny: ms", ">20<"))
    assert "ms" in heat_map([[3.0]], (1,), (1,), ("a", "b", "ms"), log=False)._repr_svg_(), "one cell has no range"
    with pytest.raises(ValueError, match="2 rows of 1 values"):
        heat_map(values, (1, 2), (256,), ("requests", "tokens", "ms"))
    with pytest.raises(ValueError, match="at least one value"):
        heat_map([[None]], (1,), (1,), ("a", "b", "ms"))


def test_plots_of_parts():
    svg = stacked({"host": {"launch": 1.0, "wait": 2.0}, "GPU": {"GPU": 3.5}}, "ms")._repr_svg_()
    assert "launch" in svg and "3.5 ms" in svg
    with pytest.raises(ValueError, match="at least one row"):
        stacked({}, "ms")
