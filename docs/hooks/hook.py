"""MkDocs events: expands the directives of site_includes, serves plots and results, holds lessons to their form."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_includes import KINDS, ROOT, IncludeError, expand, missing_checks, read, titles

LESSON = re.compile(r"^stages/(\d\d)")
LESSON_SECTIONS = [
    "Where we are",
    "By the end you can",
    "Predict",
    "The idea",
    "Invariants",
    "Build it",
    "Measure it",
    "What changed",
    "How the real ones do it",
    "Common mistakes",
    "Questions",
    "Further reading",
]
PICTURES = (".svg", ".png")


def our_module(name: str) -> Any:
    """A module of the benchmarks that makes tables: standard library only."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"reference.bench.{name}")


def result(name: str) -> str:
    """A result file as a Markdown table, made by the same function as the benchmark's own report."""
    read(f"reference/results/{name}.json")
    return our_module("report").markdown_table(ROOT / "reference" / "results" / f"{name}.json").rstrip()


def table(name: str, *shapes: str) -> str:
    """A table that several results make together."""
    tables = our_module("tables").TABLES
    if name not in tables:
        raise IncludeError(f"no table {name!r}; there are {', '.join(tables)}")
    return tables[name](*shapes)


def plot_for(page: Page) -> Any:
    def plot(name: str, *words: str) -> str:
        for suffix in PICTURES:
            if (ROOT / "reference" / "results" / (name + suffix)).is_file():
                up = "../" * page.file.src_uri.count("/")
                return f"![{' '.join(words)}]({up}results/{name}{suffix})"
        raise IncludeError(f"no plot reference/results/{name}.svg or .png")

    return plot


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Plots of the committed results are pictures of the site, without a copy in docs/."""
    for path in sorted((ROOT / "reference" / "results").glob("*")):
        if path.suffix in PICTURES:
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    try:
        if match := LESSON.match(source):
            found = list(titles(markdown))
            if found != LESSON_SECTIONS:
                raise IncludeError(f"the sections of a lesson are {LESSON_SECTIONS}, found {found}")
            if missing := missing_checks(markdown, match[1]):
                raise IncludeError(f"there is no check {', '.join(missing)}")
        return expand(markdown, KINDS | {"result": result, "table": table, "plot": plot_for(page)})
    except IncludeError as error:
        raise PluginError(f"{source}: {error}") from error
