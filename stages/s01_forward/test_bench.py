"""The benchmark runs from end to end on a tiny model and writes what it promises; its figures are not judged here."""

from reference.bench.harness import Result
from reference.checkpoints import tiny_names
from stages.s01_forward import bench


def test_quick_run(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "peak_memory", lambda target, arguments: None)  # a process of its own, tested elsewhere
    bench.main(["--quick", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "s01_forward.json",
        "s01_forward.svg",
        "s01_forward_length.svg",
        "s01_forward_load.json",
        "s01_forward_load.svg",
        "s01_forward_logits.json",
    ]
    logits = Result.load("s01_forward_logits", tmp_path)
    assert [each.name for each in logits.measurements] == list(tiny_names())
    assert all(each.median <= 1e-4 for each in logits.measurements)
    speed = Result.load("s01_forward", tmp_path)
    for engine in ("stage 01", "HF, eager attention", "HF, default attention"):
        assert speed[f"{engine}, float32"].note == "", "the same token ids"
        assert speed[f"{engine}, bfloat16"].median > 0
