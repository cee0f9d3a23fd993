"""Pictures of a batch: they show every state, and refuse what is no timeline."""

import pytest

from reference import draw
from reference.picture import colour


def test_timeline_colours_states_and_writes_tokens():
    picture = draw.batch_timeline(
        {"A": ["chunk", "prefill", "decode", "decode"], "B": ["waiting", "prefill", "preempted", ""]},
        {"A": [37, 23, 1, 1], "B": [0, 41, 0, 0]},
    )
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts == ["37", "23", "41"], "only what is more than a token"
    assert len(picture.axes[0].patches) == 7
    svg = picture._repr_svg_()
    assert all(word in svg for word in (*draw.STATES, ">A<", ">B<")) and colour(2) in svg


def test_timeline_refuses_ragged_rows_and_unknown_states():
    with pytest.raises(ValueError, match="request B needs one of prefill, .* each of 2 steps"):
        draw.batch_timeline({"A": ["decode", "decode"], "B": ["decode"]})
    with pytest.raises(ValueError, match="request A"):
        draw.batch_timeline({"A": ["asleep"]})


def test_computed_and_reused_stand_one_behind_the_other():
    bars = draw.computed_and_reused({"A": (30, 0), "B": (6, 24)}).axes[0].patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 30), (0, 6), (30, 0), (6, 24)]


def test_percentiles_are_told_in_milliseconds():
    seconds = [0.010] * 98 + [0.5, 1.0]
    svg = draw.latency_percentiles({"whole": seconds, "chunks": [0.02]})._repr_svg_()
    assert "whole: p50 10 ms, p99 505 ms" in svg and "chunks: p50 20 ms" in svg
    with pytest.raises(ValueError, match="'none' has no latency"):
        draw.latency_percentiles({"none": []})
