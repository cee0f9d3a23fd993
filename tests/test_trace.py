"""The picture of recorded steps: what is read from a trace, counted and drawn. The recording itself needs a GPU."""

import argparse
import json
import re

import pytest

from reference.bench import trace
from reference.bench.harness import Result
from reference.bench.kernel_kinds import OTHER, Ran, by_kind, kind_of, longest_names, shares, union
from reference.bench.provenance import ROOT
from reference.bench.trace import Event


def chrome_trace():
    """A launch and its kernel, a copy on the way back, the wait for it, and what is no affair of ours."""
    calls = [
        ("cuda_runtime", "cudaLaunchKernel", 100.5, 4.0), ("kernel", "one_row_kernel", 106.5, 10.0),
        ("gpu_memcpy", "Memcpy DtoH", 117.5, 2.0), ("cuda_runtime", "cudaEventSynchronize", 105.5, 14.0),
        ("cpu_op", "aten::mm", 99.0, 9.0),
    ]  # fmt: skip
    events = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in calls]
    return json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]})


def test_a_trace_is_read():
    events = trace.parse(chrome_trace())
    assert events["host"] == [Event(0.0, 4.0, "cudaLaunchKernel"), Event(5.0, 14.0, "cudaEventSynchronize")]
    assert events["GPU"] == [Event(6.0, 10.0, "one_row_kernel"), Event(17.0, 2.0, "Memcpy DtoH")]


def test_steps_are_counted():
    found = {each.name: each for each in trace.counted("x", trace.parse(chrome_trace()))}
    assert found["x: calls of the host"].median == found["x: operations on the GPU"].median == 2 / trace.STEPS
    assert found["x: GPU busy"].median == pytest.approx(0.012 / trace.STEPS)
    assert found["x: step"].median == pytest.approx(0.019 / trace.STEPS)


def test_the_window_is_the_middle_and_begins_at_zero():
    """Of 2,700 microseconds, those from 600 to 2,100."""
    events = {"host": [Event(0.0, 5.0, "early")], "GPU": [Event(100.0 * n, 100.0, "k" * 99) for n in range(27)]}
    cut = trace.window(events)
    assert [event.start for event in cut["GPU"]] == [100.0 * n for n in range(15)]
    assert (cut["host"], {len(event.name) for event in cut["GPU"]}) == ([], {60})


@pytest.mark.parametrize(
    ("row", "name", "kind"),
    [
        ("host", "cudaGraphLaunch", "launch of a graph"),
        ("host", "cuLaunchKernelEx", "launch"),
        ("host", "cudaMemcpyAsync", "other"),
        ("GPU", "nvjet_sm90_tst_384x8_64x16_4x1_v_bz_TNT", "products"),
        ("GPU", "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "products"),
        ("GPU", "void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("GPU", "one_row_kernel", "products"),
        ("GPU", "few_rows_kernel", "products"),
        ("GPU", "_attention_kernel", "attention"),
        ("GPU", "_merge_kernel", "attention"),
        ("GPU", "_chunk_kernel", "attention"),
        ("GPU", "hopper_chunk_kernel", "attention"),
        ("GPU", "_rope_store_kernel", "small"),
        ("GPU", "_store_kernel", "small"),
        ("GPU", "_norm_kernel", "small"),
        ("GPU", "_norm_rope_kernel", "small"),
        ("GPU", "_silu_mul_kernel", "small"),
        ("GPU", "_filter_kernel", "sampling"),
        ("GPU", "_weigh_kernel", "sampling"),
        ("GPU", "_race_kernel", "sampling"),
        ("GPU", "_keep_kernel", "sampling"),
        ("GPU", "_fill_kernel", "other"),
        ("GPU", "_unpack_kernel", "other"),
        ("GPU", "Memcpy DtoH (Device -> Pinned)", "other"),
        ("GPU", "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor>", "other"),
    ],
)
def test_kinds(row, name, kind):
    assert kind_of(name, trace.KINDS[row]) == kind


def test_every_kernel_of_the_stage_has_a_kind():
    """By its name in the source: what the profile calls it. Those that only move the state are `other`."""
    kernels = set()
    for path in (*(ROOT / "stages/s07_cuda_graph").glob("*kernel*.py"), *(ROOT / "stages/s03_paged_kv").glob("*.py")):
        kernels |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(kernels) >= 14
    assert {name for name in kernels if kind_of(name) == OTHER} <= {"_fill_kernel", "_unpack_kernel"}


def test_time_in_which_several_run_counts_once_for_the_first():
    """The norm waits behind the product for 4 of its 5 microseconds; a gap of 2 belongs to nobody."""
    ran = [
        Ran(6.0, 11.0, "_norm_kernel"),
        Ran(0.0, 10.0, "nvjet_sm90"),
        Ran(13.0, 14.0, "memcpy"),
        Ran(1.0, 2.0, "_race"),
    ]
    assert shares(ran) == [10.0, 0.0, 1.0, 1.0]
    assert by_kind(ran) == {"attention": 0.0, "sampling": 0.0, "small": 1.0, "products": 10.0, "other": 1.0}
    assert longest_names(ran, "products") == [("nvjet_sm90", 10.0, 1)] and longest_names(ran, "attention") == []
    assert union([each[:2] for each in ran]) == sum(by_kind(ran).values()) == 12.0
    assert union([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4 and union([]) == 0


def test_a_picture_has_all_lines():
    drawn = trace.draw({"by one": trace.parse(chrome_trace()), "as one": trace.parse(chrome_trace())}, "Steps")
    svg = drawn._repr_svg_()
    assert all(text in svg for text in ("by one", "as one", "host", "GPU", "products", "launch of a graph", "Steps"))


def test_the_command_runs(tmp_path, monkeypatch):
    """On a CPU, where nothing is recorded."""
    monkeypatch.setattr(trace, "record", lambda step, steps=1: (step(), trace.parse(chrome_trace()))[1])
    monkeypatch.setattr(trace, "WARM", 3)
    monkeypatch.setattr(trace, "in_fresh_process", lambda function, *arguments: function(*arguments))
    trace.measure_trace(argparse.Namespace(model_shape="tiny", out=tmp_path, device="cpu", rows=2))
    assert len(Result.load("s07_trace_tiny", tmp_path).measurements) == 4 * len(trace.VARIANTS)
    events = json.loads((tmp_path / "s07_trace_tiny_events.json").read_text(encoding="utf-8"))
    assert set(events) == set(trace.VARIANTS) and (tmp_path / "s07_trace_tiny.svg").is_file()
