"""Plots of results: bars, lines for a sweep, a map for two. They return a `Picture`; `.save("x.svg")` writes it."""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from reference.bench.harness import Measurement
from reference.bench.report import quantity
from reference.picture import GREY, Picture, colour


def bars(measurements: Sequence[Measurement], title: str = "") -> Picture:
    """One horizontal bar per measurement, all of one unit: the median, with a whisker from lowest to highest.

    Raises:
        ValueError: There is no measurement, or their units differ.
    """
    units = {each.unit for each in measurements}
    if len(units) != 1:
        raise ValueError(f"bars compare figures of one unit, got {sorted(units) or 'no measurement'}")
    unit = units.pop()
    picture = Picture(height=0.9 + 0.45 * len(measurements))
    ax = picture.axes_grid()[0, 0]
    longest = max(each.high for each in measurements)
    for row, each in enumerate(measurements):
        ax.barh(row, each.median, height=0.6, color=colour(row))
        if each.repeats > 1:
            whisker = [[each.median - each.low], [each.high - each.median]]
            ax.errorbar(each.median, row, xerr=whisker, ecolor=GREY, capsize=3, fmt="none")
        ax.text(each.high + 0.015 * longest, row, quantity(each.median, unit), va="center", color=GREY)
    ax.set_yticks(range(len(measurements)), [each.name for each in measurements])
    ax.invert_yaxis()  # first measurement on top
    ax.set_xlim(0, 1.22 * longest)  # room for the figures behind the bars
    ax.set_xlabel(unit)
    ax.set_title(title)
    return picture


def lines(
    series: Mapping[str, Sequence[Measurement]], xs: Sequence[float], xlabel: str, title: str = "", log: bool = False
) -> Picture:
    """One line per entry of `series`, its measurements at `xs`: medians, with a band from lowest to highest.

    Args:
        log: Logarithmic axes, a tick at powers of two.

    Raises:
        ValueError: A series does not have one measurement per x, or units differ.
    """
    for name, values in series.items():
        if len(values) != len(xs):
            raise ValueError(f"series {name!r} has {len(values)} measurements for {len(xs)} x values")
    units = {each.unit for values in series.values() for each in values}
    if len(units) != 1:
        raise ValueError(f"lines compare figures of one unit, got {sorted(units) or 'no measurement'}")
    picture = Picture(height=3.8)
    ax = picture.axes_grid()[0, 0]
    for index, (name, values) in enumerate(series.items()):
        ax.fill_between(xs, [v.low for v in values], [v.high for v in values], color=colour(index), alpha=0.2, lw=0)
        ax.plot(xs, [v.median for v in values], color=colour(index), marker="o", markersize=4, label=name)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
    else:
        ax.set_ylim(bottom=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.grid(color=GREY, alpha=0.25)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(units.pop())
    ax.set_title(title)
    if len(series) > 1:
        ax.legend(labelcolor=GREY, framealpha=0)
    return picture


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str, title: str = "") -> Picture:
    """One horizontal bar per row, made of its parts end to end. A part has one colour in all rows."""
    if not rows:
        raise ValueError("stacked bars need at least one row, got none")
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    picture = Picture(height=1.3 + 0.36 * len(rows))
    ax = picture.axes_grid()[0, 0]
    ends = [0.0] * len(rows)
    for index, part in enumerate(parts):
        values = [row.get(part, 0.0) for row in rows.values()]
        ax.barh(range(len(rows)), values, left=ends, height=0.66, color=colour(index), label=part)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for row, end in enumerate(ends):
        ax.text(end + 0.015 * max(ends), row, quantity(end, unit), va="center", color=GREY)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.2 * max(ends))
    ax.set_xlabel(unit)
    ax.set_title(title)
    picture.legend(loc="outside lower center", ncols=len(parts), labelcolor=GREY, framealpha=0)
    return picture


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[object],
    columns: Sequence[object],
    labels: tuple[str, str, str],
    title: str = "",
    log: bool = True,
) -> Picture:
    """A cell for each of `values` [rows][columns], with its figure; None: an empty one. labels: rows, columns, values.

    log: colours by the logarithm.

    Raises:
        ValueError: The values have another shape, or there is none.
    """
    if [len(row) for row in values] != [len(columns)] * len(rows):
        raise ValueError(
            f"{len(rows)} rows of {len(columns)} values each are wanted, got {[len(row) for row in values]}"
        )
    known = [value for row in values for value in row if value is not None]
    if not known:
        raise ValueError("a heat map needs at least one value, got none")
    picture = Picture(width=2.0 + len(columns), height=1.3 + 0.42 * len(rows))
    ax = picture.axes_grid()[0, 0]
    scale = LogNorm(min(known), max(known) * (1 + 1e-9)) if log else Normalize(min(known), max(known))
    shades = matplotlib.colormaps["viridis"]
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            shade = (0.5, 0.5, 0.5, 0.15) if value is None else shades(scale(value))
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=shade, linewidth=0))
            if value is not None:
                dark = sum(weight * part for weight, part in zip((0.3, 0.59, 0.11), shade[:3], strict=True)) < 0.5
                text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                ax.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(-0.5, len(rows) - 0.5)
    ax.set_xticks(range(len(columns)), [f"{each:,}" if isinstance(each, int) else str(each) for each in columns])
    ax.set_yticks(range(len(rows)), [f"{each:,}" if isinstance(each, int) else str(each) for each in rows])
    ax.set_ylabel(labels[0])
    ax.set_xlabel(labels[1])
    ax.set_title(f"{title}: {labels[2]}" if title else labels[2])
    return picture
