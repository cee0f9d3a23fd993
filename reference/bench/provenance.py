"""Where a result comes from: machine, versions, commit and command. No host name, user name or absolute path."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, torch's threads, memory, operating system, and the GPUs if any."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _cpu_model() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python and the packages that decide speed; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str:
    """Commit of the working tree, with "+changes" when the code differs from it; "unknown" outside a git clone."""
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    # Results are written by the very run they belong to: they do not make the code another one.
    changed = _output_of("git", "status", "--porcelain", "--", ".", ":(exclude)reference/results", ":(exclude)docs")
    return f"{commit}+changes" if changed else commit


def command() -> str:
    """The command line of this process, with `python` for the interpreter and paths from the repository's root.

    Of a path elsewhere on the machine only the last part is told.
    """
    arguments = [argument.replace(f"{ROOT}{os.sep}", "") for argument in sys.orig_argv[1:]]
    return " ".join(["python", *(Path(each).name if Path(each).is_absolute() else each for each in arguments)])


def _output_of(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
