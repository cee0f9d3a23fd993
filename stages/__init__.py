"""The nine stages. `from stages import LLM` gives the engine of the latest one; nothing else is imported here."""

import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.s01_forward.llm import LLM as LLM

STAGES_DIR = Path(__file__).resolve().parent


def stage_names() -> list[str]:
    """The stage packages that are here, in order: `["s01_forward", ...]`."""
    names = (p.parent.name for p in STAGES_DIR.glob("s[0-9][0-9]_*/__init__.py"))
    return sorted(n for n in names if re.fullmatch(r"s\d\d_\w+", n))


def workspace_dir() -> Path:
    """The learner's folder: `workspace/` beside `stages/`, or the one that STEPINFER_WORKSPACE names."""
    return Path(os.environ.get("STEPINFER_WORKSPACE") or STAGES_DIR.parent / "workspace").resolve()


def use_workspace(which: str = "all") -> list[str]:
    """Put the learner's files before the shipped ones, file by file, in the stages that `which` names.

    `which` is "all" or stage numbers ("01,03"). Call it before any stage module is imported: a module that is loaded
    stays loaded. Returns the names of the stages that now take files from the workspace. It also sets STEPINFER_MINE,
    so that child processes do the same.
    """
    wanted = [n for n in stage_names() if which == "all" or n[1:3] in which.split(",")]
    taken = [n for n in wanted if (workspace_dir() / n).is_dir()]
    loaded = [m for n in taken for m in sys.modules if m.startswith(f"stages.{n}.")]
    if loaded:
        raise RuntimeError(f"the workspace must be chosen before stage modules are imported; loaded: {loaded}")
    for name in taken:
        path = importlib.import_module(f"stages.{name}").__path__
        folder = str(workspace_dir() / name)
        if folder not in path:
            path.insert(0, folder)
    os.environ["STEPINFER_MINE"] = ",".join(n[1:3] for n in taken)
    return taken


def __getattr__(name: str) -> Any:
    if name == "LLM":
        for stage in reversed(stage_names()):
            if (STAGES_DIR / stage / "llm.py").exists():
                return importlib.import_module(f"stages.{stage}.llm").LLM
        raise AttributeError("no stage with an llm.py is here")
    raise AttributeError(f"module 'stages' has no attribute {name!r}")


if os.environ.get("STEPINFER_MINE"):
    use_workspace(os.environ["STEPINFER_MINE"])
