"""Plots of results: bars for a comparison, lines for a sweep. They return a `Picture`; `.save("x.svg")` writes it."""

from collections.abc import Mapping, Sequence

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


def grouped(groups: Mapping[str, Sequence[Measurement]], title: str = "") -> Picture:
    """Bars side by side: a group per entry, in it the bars of its measurements, named once for all groups.

    Raises:
        ValueError: The groups have not the same bars, or units differ.
    """
    names = {tuple(each.name for each in group) for group in groups.values()}
    units = {each.unit for group in groups.values() for each in group}
    if len(names) != 1 or len(units) != 1:
        raise ValueError(f"groups need the same bars of one unit, got {sorted(names)} in {sorted(units)}")
    unit, bars_of_each = units.pop(), names.pop()
    picture = Picture(height=3.8)
    ax = picture.axes_grid()[0, 0]
    width = 0.84 / len(bars_of_each)
    for index, name in enumerate(bars_of_each):
        at = [number + (index - (len(bars_of_each) - 1) / 2) * width for number in range(len(groups))]
        heights = [group[index].median for group in groups.values()]
        ax.bar(at, heights, width=0.92 * width, color=colour(index), label=name)
        for x, height in zip(at, heights, strict=True):
            ax.text(x, height, f"{height:.3g}", ha="center", va="bottom", color=GREY, fontsize=8)
    ax.set_xticks(range(len(groups)), list(groups))
    ax.set_ylabel(unit)
    ax.set_title(title)
    picture.legend(loc="outside lower center", ncols=3, labelcolor=GREY, framealpha=0)
    return picture
