"""The GPU checks, as far as a CPU can run them: they pass, and they notice what is broken. The report's sections."""

import argparse
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference.bench.harness import Measurement, Result
from reference.gpu_checks import attention, fast_engine, guessing, two_gpus
from reference.gpu_checks import run as command
from reference.gpu_checks.check import Check, within
from stages.s07_cuda_graph import sample_torch, step
from stages.s07_cuda_graph.device_state import DeviceState
from stages.s07_cuda_graph.fake_graphs import FakeGraphs
from stages.s07_cuda_graph.llm import LLM
from stages.s08_speculative.llm import LLM as Guessing

CPU_CHECKS = [
    (function, arguments)
    for function, arguments in fast_engine.parts("cpu")
    # The long ones: stages/07 has them with fewer steps.
    if function is not fast_engine.check_overlap and arguments[1:] not in (("qwen3",), ("qwen3_moe",), ("llama",))
]


@pytest.mark.parametrize(("function", "arguments"), CPU_CHECKS, ids=[each[0].__name__ for each in CPU_CHECKS])
def test_the_engine_passes(function, arguments):
    checks = function(*arguments)
    assert checks and all(check.passed for check in checks), [str(check) for check in checks if not check.passed]


@pytest.mark.parametrize(
    ("function", "devices"), [(two_gpus.check_engines, "cpu"), (two_gpus.check_turns, ("cpu", "cpu"))]
)
def test_engines_beside_each_other_pass(function, devices):
    checks = function(devices)
    assert len(checks) >= len(two_gpus.ENGINES) and all(check.passed for check in checks), [*map(str, checks)]


def padded(llm_class: Any) -> Any:
    """As on a GPU, with stand-ins for graphs: padded sizes, fixed memory, NaN in all that is not to be read."""

    class Padded(llm_class):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            runner = self.engine.runner
            runner.graphs = FakeGraphs(
                runner.step, self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.common_prefix
            )

    return Padded


Padded = padded(LLM)


@pytest.mark.parametrize(
    "function",
    [
        fast_engine.check_buckets,
        fast_engine.check_padding,
        fast_engine.check_preemption,
        partial(fast_engine.check_common_prefix, family="qwen2"),
    ],
)
def test_padded_steps_pass(function, monkeypatch):
    monkeypatch.setattr(fast_engine, "LLM", Padded)
    checks = function("cpu")
    assert all(check.passed for check in checks), [str(check) for check in checks if not check.passed]


@pytest.mark.parametrize("padding", [False, True], ids=["as they are", "padded"])
@pytest.mark.parametrize(
    ("function", "arguments"), guessing.parts("cpu", ["qwen2"]), ids=["rates", "guessers", "padding"]
)
def test_the_engine_that_guesses_passes(function, arguments, padding, monkeypatch):
    monkeypatch.setattr(guessing, "VARIANTS", {name: guessing.VARIANTS[name] for name in ("all on", "2 guesses")})
    if padding:
        monkeypatch.setattr(guessing, "LLM", padded(Guessing))
    checks = function(*arguments)
    assert checks and all(check.passed for check in checks), [str(check) for check in checks if not check.passed]


def test_guesses_that_are_all_believed_are_noticed(monkeypatch):
    monkeypatch.setattr("stages.s08_speculative.speculative_runner.matching", lambda drafts, sampled: len(drafts))
    assert not all(check.passed for check in guessing.check_rates("cpu", "qwen2"))


def test_padding_that_reaches_a_row_is_noticed(monkeypatch):
    """Padding rows write their tokens where the first row has its own."""
    monkeypatch.setattr(fast_engine, "LLM", Padded)
    keep = step.keep_tokens

    def careless(tokens, slots, state):
        keep(tokens, torch.where(slots == 0, slots[0], slots), state)

    monkeypatch.setattr(step, "step_ops", lambda kernels: step.StepOps(keep=careless))
    monkeypatch.setattr("stages.s07_cuda_graph.llm.step_ops", step.step_ops)
    assert not all(check.passed for check in fast_engine.check_padding("cpu"))


@pytest.mark.parametrize("guesses", [False, True])
def test_what_lay_in_shared_memory_is_noticed(guesses, monkeypatch):
    """Logits to which zero times what lay there is added: wrong once that is not a number."""
    pytest.importorskip("triton.experimental.gluon")
    from reference.gpu_checks import leftovers

    shared, reads = [0.0], []

    class Reading(padded(Guessing if guesses else LLM)):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            logits = self.model.logits
            self.model.logits = lambda hidden: logits(hidden) + (0 * shared[0] if reads else 0)

    monkeypatch.setattr(guessing if guesses else fast_engine, "LLM", Reading)
    monkeypatch.setattr(leftovers, "fill_shared_memory", lambda value, *others: shared.__setitem__(0, value.item()))
    gpu = SimpleNamespace(multi_processor_count=1, shared_memory_per_block_optin=2**16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    checks = leftovers.check_leftovers("cpu", "qwen2", guesses)
    assert len(checks) == 4 and all(check.passed for check in checks), [*map(str, checks)]
    reads.append("it is read")
    shared[0] = 0.0
    assert not any(check.passed for check in leftovers.check_leftovers("cpu", "qwen2", guesses)[::2])


def test_a_block_that_is_never_sent_is_noticed(monkeypatch):
    """The third block of every table stays the dummy."""
    edit_blocks = DeviceState.edit_blocks

    def forgetful(self, slot, first, blocks):
        edit_blocks(self, slot, first, [0 if first + i == 2 else block for i, block in enumerate(blocks)])

    monkeypatch.setattr(DeviceState, "edit_blocks", forgetful)
    checks = fast_engine.check_buckets("cpu")
    assert not checks[-1].passed or not all(check.passed for check in checks)
    assert "differs from token" in next(check.note for check in checks if not check.passed)


def test_a_neighbour_in_the_noise_is_noticed(monkeypatch):
    """Randomness by place in the batch in place of the request's seed."""
    seeds = sample_torch.seeds
    monkeypatch.setattr(sample_torch, "seeds", lambda slots, columns: seeds(torch.arange(len(slots)), columns))
    assert not all(check.passed for check in fast_engine.check_neighbours("cpu"))


def test_where_answers_differ_is_told():
    assert fast_engine.same("x", [[1], [2, 3]], [[1], [2, 3]]).passed
    assert (
        fast_engine.same("x", [[1], [2, 3]], [[1], [2, 4]]).note
        == "answer 1 of 2 differs from token 1 on: [3] instead of [4]"
    )
    assert fast_engine.same("x", [[1, 2]], [[1]]).note == "answer 0 of 1 differs from token 1 on: [2] instead of []"


class TestReport:
    def checks(self):
        return [
            within("a", 1e-3, 2e-3, "bfloat16"), within("b", float("nan"), 1.0, "bfloat16"), Check("c", True),
        ]  # fmt: skip

    def test_nan_and_too_much_fail(self):
        assert [check.passed for check in self.checks()] == [True, False, True]
        assert not within("d", 2.0, 1.0).passed and str(within("d", 2.0, 1.0)) == "d: 2, 1 allowed"

    def test_a_section_alone_replaces_its_own_lines(self, tmp_path):
        engine = command.measurements("07-engine", self.checks()[:1], 3.2)
        assert [each.name for each in engine[:2]] == ["07-engine: checks", "07-engine: failed"]
        assert engine[3].median == 0.5 and engine[3].name == "07-engine: share of what is allowed, bfloat16"
        assert "done after 3 s" in engine[0].note
        other = [Measurement.single("07-norm: checks", 5, "")]
        command.merged({"07-engine": engine, "07-norm": other}, tmp_path).save(tmp_path)
        again = command.measurements("07-engine", self.checks()[1:], 4.0)
        command.merged({"07-engine": again}, tmp_path).save(tmp_path)
        names = [each.name for each in Result.load("gpu_checks", tmp_path).measurements]
        assert names[:3] == ["07-norm: checks", "07-engine: checks", "07-engine: failed"] and len(names) == 5
        assert Result.load("gpu_checks", tmp_path)["07-engine: failed"].note == "b"

    def test_the_sections_have_work(self):
        options = argparse.Namespace(dtypes=attention.DTYPES, every=1)
        sizes = {section: len(command.tasks(section, options)) for section in command.TITLES}
        assert sizes["03-attention"] == 3 * 5 * 6 * 3 and min(sizes.values()) == 1
        assert sizes["07-engine"] > 15 and sizes["08-engine"] > 7

    def test_processes_share_the_work(self, monkeypatch, capsys):
        """Sections end when their last piece has; a piece that fails is one failed check."""
        pieces = {"07-norm": ["qwen2", "gpt5"], "07-engine": ["llama"]}
        work = {name: [(fast_engine.check_reference_logits, ("cpu", f)) for f in each] for name, each in pieces.items()}
        monkeypatch.setattr(command, "tasks", lambda section, options: work[section])
        done = dict(command.run(list(pieces), argparse.Namespace(workers=1)))
        assert [[check.passed for check in done[name]] for name in pieces] == [[False, True], [True]]
        assert "FAILED 07-norm: check_reference_logits(cpu, gpt5)" in capsys.readouterr().out

    def test_an_error_is_a_failed_check(self):
        [check] = command.guarded(fast_engine.check_variants, ("cpu", "gpt5"))
        assert not check.passed and check.name == "check_variants(cpu, gpt5)" and "ValueError" in check.note

    @pytest.mark.parametrize("count", [1, 2])
    def test_what_needs_two_gpus_is_left_out_where_there_is_one(self, count, monkeypatch, tmp_path, capsys):
        """And stays in the report as it is there."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
        command.merged({"two-gpus": [Measurement.single("two-gpus: checks", 77, "")]}, tmp_path).save(tmp_path)
        monkeypatch.setattr(command, "run", lambda sections, options: ((name, self.checks()[:1]) for name in sections))
        assert command.main(["--only", "07-norm", "two-gpus", "--out", str(tmp_path)]) == 0
        assert Result.load("gpu_checks", tmp_path)["two-gpus: checks"].median == (77 if count == 1 else 1)
        assert ("left out" in capsys.readouterr().out) == (count == 1)
        assert command.main(["--only", "two-gpus", "--out", str(tmp_path)]) == (2 if count == 1 else 0)

    def test_without_a_gpu_it_says_so(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert command.main([]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().out
