"""A picture of guesses: which stood in each step, which fell, and what the model said itself."""

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Rectangle

from reference.picture import GREY, Picture, colour

LONGEST = 12  # characters of a token that are written


def drafts(steps: Sequence[tuple[Sequence[str], int, str]]) -> Picture:
    """A row per step: the guesses from left to right, and the model's own token in place of the first that fell.

    Args:
        steps: Per step the texts of the guesses, how many of them stood, and the text of the model's own token, "" if
            the answer ended before it.

    Raises:
        ValueError: More guesses stood than were made.
    """
    for number, (guesses, stood, _) in enumerate(steps):
        if not 0 <= stood <= len(guesses):
            raise ValueError(f"step {number}: {stood} guesses stood; there were {len(guesses)}")
    columns = max((len(guesses) + 1 for guesses, _, _ in steps), default=1)
    picture = Picture(width=1.2 + 1.05 * columns, height=0.9 + 0.3 * len(steps))
    ax = picture.axes_grid()[0, 0]
    faces: dict[str, dict[str, Any]] = {
        "stood": {"fc": colour(2), "ec": "none"},
        "the model's own": {"fc": colour(0), "ec": "none"},
        "fell": {"fc": "none", "ec": colour(5), "ls": ":"},
    }
    for y, (guesses, stood, own) in enumerate(steps):
        cells = [(x, text, "stood" if x < stood else "fell") for x, text in enumerate(guesses)]
        if own:
            cells = [cell for cell in cells if cell[0] != stood] + [(stood, own, "the model's own")]
        for x, text, kind in cells:
            ax.add_patch(Rectangle((x + 0.03, y + 0.1), 0.94, 0.8, lw=1.0, **faces[kind]))
            label = repr(text)[1:-1][:LONGEST]
            ax.text(
                x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=7, color=GREY if kind == "fell" else "white"
            )
    ax.set(xlim=(0, columns), ylim=(max(len(steps), 1), 0), ylabel="step")
    ax.set_xticks([x + 0.5 for x in range(columns)], [str(x + 1) for x in range(columns)])
    ax.set_yticks([y + 0.5 for y in range(len(steps))], [str(y + 1) for y in range(len(steps))])
    handles = [Rectangle((0, 0), 1, 1, lw=1.0, label=kind, **face) for kind, face in faces.items()]
    picture.legend(handles=handles, loc="outside upper center", ncols=3, labelcolor=GREY, frameon=False)
    return picture
