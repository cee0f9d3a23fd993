"""The picture of guesses: every token in its place, in the colour of what became of it."""

import pytest

from reference.draw_drafts import drafts
from reference.picture import colour


def test_what_stood_what_fell_and_the_models_own():
    picture = drafts([(["its", "keeper", "sings", "loud"], 2, "climbs"), (["the"], 1, "ninety"), ([], 0, "steps\n")])
    ax = picture.axes[0]
    drawn = {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in ax.texts}
    assert drawn == {
        (0, 0): "its", (0, 1): "keeper", (0, 2): "climbs", (0, 3): "loud",
        (1, 0): "the", (1, 1): "ninety",
        (2, 0): "steps\\n",
    }  # fmt: skip
    faces = {(int(box.get_y()), int(box.get_x())): box for box in ax.patches}
    assert faces.keys() == drawn.keys()
    assert faces[0, 0].get_facecolor() == faces[1, 0].get_facecolor() != faces[0, 2].get_facecolor()
    assert faces[0, 3].get_facecolor()[3] == 0, "what fell is an outline"
    svg = picture._repr_svg_()
    assert all(word in svg for word in ("stood", "fell", "climbs", colour(2), colour(5)))


def test_an_answer_may_end_with_a_guess():
    ax = drafts([(["a", "b"], 2, "")]).axes[0]
    assert [text.get_text() for text in ax.texts] == ["a", "b"]


def test_no_more_guesses_stand_than_were_made():
    with pytest.raises(ValueError, match="step 1: 3 guesses stood; there were 2"):
        drafts([(["a"], 0, "b"), (["a", "b"], 3, "")])
