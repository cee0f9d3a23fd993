"""Pictures of a run, from plain lists and arrays: what is drawn is what the reader's own engine says it did."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from reference.picture import COLOURS, GREY, Picture, colour


def kv_blocks(
    owners: Sequence[str | None], used: Sequence[int], block_size: int, *, dummy: int | None = 0, columns: int = 16
) -> Picture:
    """The KV blocks of a pool: who owns each, and how many of its slots hold a token.

    Args:
        owners: Per block id, the name of its owner, such as "A" or "A, B" for a shared block; None for a free one.
        used: Per block id, slots that hold a token, 0 to `block_size`.
        block_size: Slots per block.
        dummy: Id of the block that takes padding and belongs to nobody; None if the pool has none.
        columns: Blocks per row of the picture.

    Raises:
        ValueError: The lists differ in length, or a block uses more slots than it has.
    """
    if len(owners) != len(used):
        raise ValueError(f"owners and used must have one entry per block, got {len(owners)} and {len(used)}")
    for block, count in enumerate(used):
        if not 0 <= count <= block_size:
            raise ValueError(f"block {block} uses {count} slots, but a block has 0 to {block_size}")
    columns = max(1, min(columns, len(owners)))
    rows = math.ceil(len(owners) / columns)
    colours = _colours({name for name in owners if name is not None})
    picture = Picture(width=0.55 * columns + 0.4, height=0.62 * rows + 0.4)
    ax = picture.axes_grid()[0, 0]
    for block, (owner, count) in enumerate(zip(owners, used, strict=True)):
        x, y = block % columns, block // columns
        is_dummy = block == dummy
        hatch = "///" if is_dummy else None
        ax.add_patch(Rectangle((x + 0.06, y + 0.46), 0.88, 0.3, fill=False, ec=GREY, lw=0.8, hatch=hatch))
        if owner is not None and count:
            width = 0.88 * count / block_size  # filled from the left, as slots are
            ax.add_patch(Rectangle((x + 0.06, y + 0.46), width, 0.3, color=colours[owner], lw=0))
        label = "dummy" if is_dummy else owner or ""
        size = 7 if len(label) > 3 else 10
        ax.text(x + 0.5, y + 0.26, label, ha="center", va="center", fontsize=size, color=GREY)
        ax.text(x + 0.5, y + 0.88, str(block), ha="center", va="center", fontsize=6, color=GREY)
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    ax.axis("off")
    return picture


def _colours(names: set[str]) -> dict[str, str]:
    """A colour per name, the same in every picture, unless two names of one picture would have to share it."""
    free = set(range(len(COLOURS)))
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):  # "A" before "A, B"
        wanted = sum(name.encode()) % len(COLOURS)
        index = wanted if wanted in free or not free else min(free)
        free.discard(index)
        chosen[name] = COLOURS[index]
    return chosen


def causal_mask(queries: int, keys: int) -> Picture:
    """Which keys each query may see, when the queries are the newest `queries` of `keys` tokens (bottom-right aligned).

    Raises:
        ValueError: There are more queries than keys: a query always sees itself.
    """
    if not 1 <= queries <= keys:
        raise ValueError(f"queries must be 1 to {keys} (the number of keys), got {queries}")
    visible = np.arange(keys)[None, :] <= np.arange(keys - queries, keys)[:, None]  # [queries, keys]
    picture = attention_weights(visible.astype(float), title="coloured: may be seen")
    ax = picture.axes[0]
    ax.set_yticks(range(queries), [str(p) for p in range(keys - queries, keys)])
    ax.set(xlabel="key position", ylabel="query position")
    return picture


def attention_weights(weights: ArrayLike, tokens: Sequence[str] | None = None, title: str = "") -> Picture:
    """Heat map of one head's attention weights [T, S]: row t says where token t looks; darker is more.

    Args:
        weights: Values in [0, 1], a list of lists, an array or a CPU tensor.
        tokens: Names of the S keys; the T queries are the last T of them.
    """
    values = np.asarray(weights, dtype=float)
    if values.ndim != 2:
        raise ValueError(f"attention weights of one head are 2-D [T, S], got shape {values.shape}")
    rows, columns = values.shape
    if tokens is not None and len(tokens) != columns:
        raise ValueError(f"tokens must name the {columns} keys, got {len(tokens)} names")
    picture = Picture(width=min(7.0, 1.6 + 0.35 * columns), height=min(7.0, 1.4 + 0.35 * rows))
    ax = picture.axes_grid()[0, 0]
    for t in range(rows):
        for s in range(columns):
            if values[t, s] > 0:
                ax.add_patch(Rectangle((s - 0.5, t - 0.5), 1, 1, color=colour(0), alpha=min(1.0, values[t, s]), lw=0))
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal", title=title)
    if tokens is not None:
        ax.set_xticks(range(columns), tokens, rotation=90)
        ax.set_yticks(range(rows), tokens[columns - rows :])
    return picture


def rope_rotation(inv_freq: Sequence[float], positions: Sequence[int] = range(8)) -> Picture:
    """How RoPE turns each pair of a head: one clock per pair, one hand per position, the oldest position the faintest.

    Args:
        inv_freq: Radians per position of each pair [D/2]; the first pair turns fastest.
        positions: Positions to draw.
    """
    columns = min(8, len(inv_freq))
    rows = math.ceil(len(inv_freq) / columns)
    picture = Picture(width=1.1 * columns, height=1.35 * rows)
    grid = picture.axes_grid(rows, columns).flat
    circle = np.linspace(0, 2 * np.pi, 100)
    for pair, ax in enumerate(grid):
        ax.axis("off")
        if pair >= len(inv_freq):
            continue
        ax.plot(np.cos(circle), np.sin(circle), color=GREY, lw=0.8)
        for age, position in enumerate(reversed(positions)):
            angle = position * inv_freq[pair]
            faint = 1 - 0.85 * age / len(positions)
            ax.plot([0, np.cos(angle)], [0, np.sin(angle)], color=colour(0), alpha=faint)
        ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
        ax.set_title(f"pair {pair}\n{inv_freq[pair]:.3g} rad", fontsize=7)
    return picture


STATES = ("prefill", "chunk", "decode", "preempted", "waiting")


def batch_timeline(states: Mapping[Any, Sequence[str]], tokens: Mapping[Any, Sequence[int]] | None = None) -> Picture:
    """The batch over time: a row per request, a column per step, coloured by what the request did in it.

    Args:
        states: By request, in the order of the rows: for each step one of `STATES`, or "" where it was not there.
        tokens: By request, tokens that it computed in each step: written into its prefills and chunks.

    Raises:
        ValueError: A request has another number of steps than the first, or a state is unknown.
    """
    steps = max((len(row) for row in states.values()), default=0)
    for name, row in states.items():
        if len(row) != steps or not set(row) <= {*STATES, ""}:
            raise ValueError(f"request {name} needs one of {', '.join(STATES)} or '' for each of {steps} steps")
    faces: dict[str, dict[str, Any]] = {state: {"fc": colour(i), "ec": "none"} for i, state in enumerate(STATES[:3])}
    faces["preempted"] = {"fc": "none", "ec": colour(5), "hatch": "xxxx"}
    faces["waiting"] = {"fc": GREY, "ec": "none", "alpha": 0.2}
    picture = Picture(width=min(10.0, 1.8 + 0.3 * steps), height=1.2 + 0.32 * len(states))
    ax = picture.axes_grid()[0, 0]
    for y, (name, row) in enumerate(states.items()):
        for x, state in enumerate(row):
            if not state:
                continue
            ax.add_patch(Rectangle((x + 0.04, y + 0.12), 0.92, 0.76, lw=0.6, **faces[state]))
            if tokens is not None and state in ("prefill", "chunk"):
                ax.text(x + 0.5, y + 0.5, str(tokens[name][x]), ha="center", va="center", fontsize=6, color="white")
    ax.set(xlim=(0, max(steps, 1)), ylim=(len(states), 0), xlabel="step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_yticks([y + 0.5 for y in range(len(states))], [str(name) for name in states])
    used = [state for state in STATES if any(state in row for row in states.values())]
    handles = [Rectangle((0, 0), 1, 1, lw=0.6, label=state, **faces[state]) for state in used]
    if handles:
        picture.legend(handles=handles, loc="outside upper center", ncols=len(handles), labelcolor=GREY, frameon=False)
    return picture


def computed_and_reused(counts: Mapping[Any, tuple[int, int]]) -> Picture:
    """Per request, a bar of the tokens that were computed for it, and behind it those that were there already."""
    picture = Picture(height=1.2 + 0.32 * len(counts))
    ax = picture.axes_grid()[0, 0]
    computed, reused = ([pair[i] for pair in counts.values()] for i in (0, 1))
    ax.barh(range(len(counts)), computed, height=0.7, color=colour(0), label="computed")
    ax.barh(range(len(counts)), reused, left=computed, height=0.7, color=colour(2), alpha=0.5, label="reused")
    ax.set_yticks(range(len(counts)), [str(name) for name in counts])
    ax.invert_yaxis()
    ax.set_xlabel("tokens")
    picture.legend(loc="outside upper center", ncols=2, labelcolor=GREY, frameon=False)
    return picture


def latency_percentiles(series: Mapping[str, Sequence[float]], xlabel: str = "inter-token latency") -> Picture:
    """How many percent of the latencies (seconds) are below each value, a curve per series; p50 and p99 are marked.

    Raises:
        ValueError: A series is empty.
    """
    picture = Picture(height=3.4)
    ax = picture.axes_grid()[0, 0]
    shares = np.linspace(0, 100, 401)
    for index, (name, seconds) in enumerate(series.items()):
        if not seconds:
            raise ValueError(f"series {name!r} has no latency to draw")
        milliseconds = 1000 * np.asarray(seconds, dtype=float)
        p50, p99 = np.percentile(milliseconds, (50, 99))
        label = f"{name}: p50 {p50:.3g} ms, p99 {p99:.3g} ms"
        ax.plot(np.percentile(milliseconds, shares), shares, color=colour(index), label=label)
        ax.plot([p50, p99], [50, 99], "o", color=colour(index), markersize=4)
    ax.set(xlabel=f"{xlabel}, ms", ylabel="percent below", xscale="log")
    ax.grid(color=GREY, alpha=0.25)
    ax.legend(labelcolor=GREY, framealpha=0)
    return picture
