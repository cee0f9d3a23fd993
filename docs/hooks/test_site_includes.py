"""The directives of the site's pages: what they include, and that a wrong name fails the build."""

import re

import pytest
import site_includes
from site_includes import KINDS, IncludeError, expand, extract, missing_checks, titles

SOURCE = '''\
LIMIT = 3


@decorated
def first(x):
    """One."""
    return x


class Box:
    size: int = 1

    def area(self):
        """Of the box."""
        # a comment
        return self.size**2

    def volume(self):
        return 0
'''


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A small repository in place of this one."""
    monkeypatch.setattr(site_includes, "ROOT", tmp_path)
    stage = tmp_path / "stages" / "s01_forward"
    stage.mkdir(parents=True)
    (stage / "layers.py").write_text(SOURCE, encoding="utf-8")
    (stage / "newer.py").write_text(SOURCE.replace("**2", "**3"), encoding="utf-8")
    (stage / "exercises.toml").write_text(
        """
[[exercise]]
id = "01.1"
title = "Area"
minutes = 5
target = "stages.s01_forward.layers.Box.area"
hints = ["one", "two", "three"]
checks = ["test_layers.py"]
""",
        encoding="utf-8",
    )
    return tmp_path


def test_functions_methods_classes_and_constants(repository):
    path = "stages/s01_forward/layers.py"
    assert extract(path, ["first"]).startswith("@decorated\ndef first(x):")
    assert (
        extract(path, ["Box.area"])
        == 'def area(self):\n    """Of the box."""\n    # a comment\n    return self.size**2'
    )
    assert extract(path, ["LIMIT", "Box"]) == "LIMIT = 3\n\n\n" + SOURCE[SOURCE.index("class Box") :].strip()
    assert extract(path, []) == SOURCE.strip()


def test_a_directive_becomes_a_titled_block_at_its_indent(repository):
    page = expand('??? note "n"\n    {{ code stages/s01_forward/layers.py LIMIT }}\n', KINDS)
    assert page == (
        '??? note "n"\n    ```python title="stages/s01_forward/layers.py · LIMIT"\n    LIMIT = 3\n    ```\n'
    )


def test_solutions_of_exercises_are_folded(repository):
    page = expand("{{ code stages/s01_forward/layers.py Box.area }}", KINDS)
    assert page.startswith('??? success "Our Box.area: the solution of 01.1"\n    ```python')
    assert expand("{{ code stages/s01_forward/layers.py first }}", KINDS).startswith("```python")


def test_of_a_class_or_a_file_only_the_solution_is_folded(repository):
    for whole in ("Box", "first Box", "Box.size Box.area Box.volume", ""):
        page = expand(f"{{{{ code stages/s01_forward/layers.py {whole}".rstrip() + " }}", KINDS)
        shown, fold, solution = page.partition('??? success "Our Box.area: the solution of 01.1"')
        assert fold
        assert re.search(r'def area\(self\):\n +"""Of the box."""\n +...  # exercise 01.1\n', shown)
        assert "size: int = 1" in shown and "return 0" in shown
        assert "return self.size**2" not in shown and "return self.size**2" in solution


def test_a_diff_counts_and_folds(repository):
    page = expand("{{ diff stages/s01_forward/layers.py stages/s01_forward/newer.py }}", KINDS)
    assert "+1 −1 lines" in page
    assert "+        return self.size**3" in page and page.startswith("??? note")


def test_exercises_name_the_learners_file_and_fold_one_hint_into_the_other(repository):
    page = expand("{{ exercises 01 }}", KINDS)
    assert "| 01.1 | Area | 5 | `workspace/s01_forward/layers.py` | `Box.area` |" in page
    assert page.index('"Hint 1 of 3"') < page.index('"Hint 2 of 3"') < page.index('"Hint 3 of 3"')
    assert '            ??? tip "Hint 3 of 3"' in page


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        (
            "code stages/s01_forward/layers.py second",
            "has no 'second'; it has: LIMIT, first, Box, Box.size, Box.area, Box.volume",
        ),
        ("code stages/s01_forward/none.py", "no such file"),
        ("diff stages/s01_forward/layers.py", "missing 1 required positional argument"),
        ("diff stages/s01_forward/layers.py stages/s01_forward/layers.py", "do not differ"),
        ("exercises 02", "0 folders match"),
        ("exercises 01 01.7", "has no exercise 01.7"),
        ("drawing none", "no such file"),
        ("picture none", "unknown directive 'picture'; known: code, diff, exercises, drawing"),
    ],
)
def test_a_wrong_name_is_an_error_that_names_it(directive, words, repository):
    with pytest.raises(IncludeError) as error:
        expand("{{ " + directive + " }}", KINDS)
    assert words in str(error.value)


def test_titles_of_a_page_are_not_those_of_its_code():
    assert list(titles("# A\n\n## One\n\n```text\n## not this\n```\n\n## Two {#two}\n")) == ["One", "Two"]


def test_checks_that_a_page_names_must_exist(repository):
    page = "`layers.py::Box::area`, `stages/s01_forward/layers.py::first`, `layers.py::Box::gone`, `no.py`"
    assert missing_checks(page, "01") == ["layers.py::Box::gone"]
