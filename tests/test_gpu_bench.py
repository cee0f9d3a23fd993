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
from reference.bench import gpu, gpu_ablation, gpu_logits, peers, small_card, startup
from reference.bench.gpu import summary
from reference.bench.gpu_logits import HuggingFace, check_logits, recorded_logits
from reference.bench.gpu_runs import Run, cut, cut_answers, forget, measurements, run_workload
from reference.bench.gpu_shapes import SHAPES, random_checkpoint
from reference.bench.gpu_split import PARTS, measure_kernels, measure_split, plot_split, split_steps, union
from reference.bench.harness import Measurement, Result
from reference.bench.plots import grouped, stacked
from reference.bench.provenance import ROOT, command
from reference.bench.roofline import H200, Shape, generate_floor
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
        llm = engine(checkpoint)
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
        assert sum(run.cycles) == pytest.approx(run.seconds - run.steps[0], rel=0.2)

    def test_the_best_run_is_held_against_the_floor(self):
        work, shape = workloads()["single"], Shape.from_config(SHAPES["qwen3-0.6b"])
        runs = [Run(2.0, [1.0, 0.5], [0.3], 0), Run(1.0, [0.25, 0.5], [0.1], 7, replays=2)]
        found = {each.name: each for each in measurements(work, runs, shape, H200)}
        assert (found["single"].median, found["single"].low, found["single"].high) == (512 / 1.5, 256, 512)
        assert found["single, best run"].median == 512
        assert found["single, best run"].roofline == generate_floor(shape, H200, [128], [512])
        assert found["single, outside the steps"].median == 0.25
        assert found["single, prompt tokens found in the cache"].median == 7
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

    def test_medians_of_decode_steps_and_their_picture(self, checkpoint):
        llm, work = engine(checkpoint), cut(workloads()["decode_heavy"], 4, 30)
        found = measure_split(llm, work)
        assert [each.name.removeprefix("decode_heavy, decode step") for each in found] == [
            "", *(f": host, {part}" for part in PARTS)
        ]  # fmt: skip
        assert found[0].note == "of 29 steps" and found[0].unit == "ms"
        assert "launch" in plot_split(found, "title")._repr_svg_()
        assert measure_kernels(llm, work) == []
        prefill = measure_split(llm, cut(workloads()["prefill"], 2, 30))
        assert prefill[0].name == "prefill, step" and prefill[0].note == "of 1 steps"
        whole, *parts = [each.median for each in prefill]
        assert sum(parts) == pytest.approx(whole) and min(parts) > 0, "the tokens of the only step come a step later"

    def test_events_and_the_profiler_tell_of_the_gpu(self, checkpoint, monkeypatch):
        """Stand-ins for both: events 2 ms apart, and in 8 steps of the profiler 16 ms of kernels, some at once."""
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
                spans = [(1000 * n, 1000 * n + length) for n in range(16) for length in (1000, 500)]
                kinds = [(DeviceType.CUDA, span) for span in spans] + [(DeviceType.CPU, (0, 90_000))]
                return [
                    SimpleNamespace(device_type=k, time_range=SimpleNamespace(start=a, end=b)) for k, (a, b) in kinds
                ]

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: profiled.append("wait"))
        monkeypatch.setattr(torch.profiler, "profile", Profile)
        monkeypatch.setattr(llm, "device", torch.device("cuda"))
        found = {each.name: each for each in measure_split(llm, work) + measure_kernels(llm, work)}
        assert found["single, decode step: GPU"].median == 2.0
        assert found["single, step with prompts: GPU"].note == "of 1 steps"
        kernels = found["single, decode step: kernels"]
        assert kernels.median == pytest.approx(16 / 8) and kernels.note.startswith("4 operations")
        assert profiled == ["wait", "wait", "start", "wait", "stop"]
        assert "GPU" in plot_split(list(found.values()), "title")._repr_svg_()

    def test_union(self):
        assert union([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4
        assert union([]) == 0


class TestPeers:
    def test_figures_are_the_rates_of_the_runs(self):
        result = Result.load("peers_h200")
        sglang = result["qwen3-0.6b, decode_heavy, SGLang 0.5.17"]
        assert (sglang.repeats, sglang.unit) == (2, "tok/s") and round(sglang.high) == 34_249
        assert round(result["qwen3-0.6b, prefill, SGLang 0.5.17"].high) == 383_251
        assert all(len(peers.peers(shape, name)) >= 2 for shape in gpu.ALL_SHAPES for name in NAMES)

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

    def test_summary_has_the_best_runs_beside_the_best_peers(self, tmp_path):
        result = Result("s07_gpu_qwen2.5-7b", "")
        result.measurements = [
            Measurement("mixed, best run", 13_726.9, 13_726.9, 13_726.9, "tok/s", roofline=0.75),
            Measurement.single("single, best run", 105.0, "tok/s"),
        ]
        result.save(tmp_path)
        Result("s07_gpu_qwen2.5-7b_without_graphs", "", result.measurements).save(tmp_path)
        found = summary(7, tmp_path).measurements
        assert [each.name for each in found] == ["qwen2.5-7b, mixed", "qwen2.5-7b, single"]
        assert found[0].roofline == 0.75 and found[0].note.startswith("**1.10** x vLLM 0.25.1 (12,479); ")
        assert found[1].note.startswith("0.50 x SGLang")


class TestFromEndToEnd:
    TRIAL = "--model-shape tiny --device cpu --kv-cache-mb 32 --requests 3 --tokens 24 --longest-check 17"

    def test_workloads_of_stage_06(self, tmp_path):
        gpu.main(f"{self.TRIAL} --stage 6 --workloads mixed shared_prefix --out {tmp_path}".split())
        result = Result.load("s06_gpu_tiny", tmp_path)
        assert result["mixed"].unit == "tok/s" and result["mixed"].repeats == 2
        assert result["mixed, best run"].roofline is None
        assert result["mixed, prompt tokens found in the cache"].median == 0
        assert result["shared_prefix, steps"].median >= 24 and result["mixed, steps"].note == ""
        split = Result.load("s06_split_tiny", tmp_path)
        assert split["mixed, decode step: host, launch"].median > 0
        assert (tmp_path / "s06_split_tiny.svg").is_file()

    def test_all_workloads_of_stage_07(self, tmp_path):
        gpu.main(f"{self.TRIAL} --stage 7 --all --runs 1 --without overlap fused --out {tmp_path}".split())
        result = Result.load("s07_gpu_tiny_without_overlap_without_fused", tmp_path)
        assert [name for name in NAMES if result[name].median > 0] == list(NAMES)

    def test_ablation_and_batch_sizes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(gpu_ablation, "SWITCHES", ("graphs", "overlap"))
        stepwise = {"eager": gpu_ablation.SWITCHES, "graph + overlap": ()}
        monkeypatch.setattr(gpu_ablation, "STEPWISE", stepwise)
        gpu.main(f"{self.TRIAL} --ablation --batch-sizes 1 3 --out {tmp_path}".split())
        result = Result.load("s07_ablation_tiny", tmp_path)
        assert len(result.measurements) == 3 * 3
        assert result["mixed, everything"].note == "1.00 times the time"
        assert result["single, without overlap"].median > 0
        result = Result.load("s07_batch_tiny", tmp_path)
        names = [each.name for each in result.measurements]
        assert names[:3] == ["eager, 1 rows", "eager, 3 rows", "graph + overlap, 1 rows"]
        assert all(each.unit == "ms" and each.repeats == 24 for each in result.measurements)
        for name in ("ablation", "batch"):
            assert (tmp_path / f"s07_{name}_tiny.svg").is_file()

    def test_all_shapes_take_a_process_each(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(run=lambda command, check: calls.append(command)))
        gpu.main(["--model-shape", "all", "--device", "cpu", "--runs", "1", "--out", str(tmp_path)])
        assert [call[4:6] for call in calls] == [["--model-shape", shape] for shape in gpu.ALL_SHAPES]
        assert all(call[1:4] == ["-m", "reference.bench", "gpu"] and call[-4:-2] == ["--runs", "1"] for call in calls)
        assert not list(tmp_path.iterdir()), "nothing was measured, so there is no summary"

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
    @pytest.mark.parametrize("module", [gpu, startup, small_card])
    def test_without_a_gpu_it_says_how_to_try_the_rest(self, module, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit):
            module.main(["--model-shape", "qwen3-0.6b"])
        assert "--device cpu --model-shape tiny" in capsys.readouterr().err

    def test_an_ablation_chooses_for_itself(self, capsys):
        with pytest.raises(SystemExit):
            gpu.main("--model-shape tiny --device cpu --ablation --without graphs".split())
        assert "leave out --without" in capsys.readouterr().err

    @pytest.mark.parametrize("option", ["--ablation", "--batch-sizes 4", "--without graphs"])
    def test_earlier_stages_have_no_switches(self, option, capsys):
        with pytest.raises(SystemExit):
            gpu.main(f"--model-shape tiny --device cpu --stage 6 {option}".split())
        assert "only stage 07" in capsys.readouterr().err

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


def test_command_names_no_place_of_the_machine(monkeypatch, tmp_path):
    arguments = ["python", "-m", "reference.bench", "gpu", "--out", str(tmp_path), str(ROOT / "reference" / "x.json")]
    monkeypatch.setattr(sys, "orig_argv", arguments)
    place = json.dumps(str(tmp_path.parent))
    assert place not in command()
    assert command().startswith(f"python -m reference.bench gpu --out {tmp_path.name} ")
    assert command().endswith("x.json") and "reference" in command().split()[-1]


def test_plots_of_parts_and_groups():
    svg = stacked({"host": {"launch": 1.0, "wait": 2.0}, "GPU": {"GPU": 3.5}}, "ms")._repr_svg_()
    assert "launch" in svg and "3.5 ms" in svg
    with pytest.raises(ValueError, match="at least one row"):
        stacked({}, "ms")
    bars = [Measurement.single("a", 1.0, "x"), Measurement.single("b", 0.25, "x")]
    assert "0.25" in grouped({"one": bars, "two": bars})._repr_svg_()
    with pytest.raises(ValueError, match="same bars"):
        grouped({"one": bars, "two": bars[:1]})
