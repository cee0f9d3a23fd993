"""Build a folder all at once: readers see the finished folder or none, also when two processes build it together."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """Where StepInfer keeps what it has prepared: `STEPINFER_CACHE`, else the usual place of the platform."""
    if override := os.environ.get("STEPINFER_CACHE"):
        return Path(override).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "stepinfer"
    return Path.home() / ".cache" / "stepinfer"


def build_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, made by `build(folder)` if it is not there yet.

    The work happens in a sibling folder that takes its final name in one rename. Two processes may both do
    the work; the first rename wins and the other result is dropped. A crash leaves `target` absent, never half full.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(building)
        building.chmod(0o755)  # mkdtemp makes it private; a finished folder has ordinary rights
        try:
            os.rename(building, target)
        except OSError:  # a folder that is not empty is never replaced: either somebody was faster, or it is an error
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target
