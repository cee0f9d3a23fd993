"""The one look of all pictures: SVG on a transparent ground, mid-grey text, colours for colour-blind readers too.

Mid-grey (#808080) reads on white and on black, so one file serves the light and the dark site. A picture is a plain
matplotlib figure made without pyplot: nothing global changes, no window opens, and a notebook shows it as SVG.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

GREY = "#808080"
# Okabe and Ito's palette without its black and its yellow, which vanish on one of the two grounds.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "legend.facecolor", "legend.edgecolor"), "none"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10.0,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "stepinfer",  # the same picture is the same file
}


class Picture(Figure):
    """A matplotlib figure in the course's style; the last expression of a notebook cell shows it."""

    def __init__(self, width: float = 7.0, height: float = 3.2) -> None:
        """Size in inches."""
        with matplotlib.rc_context(STYLE):
            super().__init__(figsize=(width, height), layout="constrained")

    def axes_grid(self, rows: int = 1, columns: int = 1, **options: Any) -> Any:
        """Axes in the course's style, as a 2-D array [rows, columns]."""
        with matplotlib.rc_context(STYLE):
            return self.subplots(rows, columns, squeeze=False, **options)

    def save(self, path: str | Path) -> Path:
        """Write the picture as SVG, without date, so that the same picture gives the same bytes."""
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"pictures are saved as .svg, got {path.name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._repr_svg_(), encoding="utf-8", newline="\n")
        return path

    def _repr_svg_(self) -> str:
        buffer = BytesIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return buffer.getvalue().decode("utf-8")


def colour(index: int) -> str:
    """The index-th colour; they repeat after six."""
    return COLOURS[index % len(COLOURS)]
