"""Fixtures that every stage shares; the root `conftest.py` loads this module as a plugin."""

import asyncio
import gc
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from reference.checkpoints import FAMILIES, build_tiny, demo_model

__all__ = ["FAMILIES", "demo_folder", "each_family", "tiny"]

each_family = pytest.mark.parametrize("family", FAMILIES)  # a family's name is also the name of its tiny checkpoint


def pytest_configure() -> None:
    """One thread per process: sharing out a tiny matmul costs more than it saves, 10 to 30 times on a busy machine.

    Hypothesis makes up the same examples in every run, and takes its time for them.
    """
    torch.set_num_threads(1)
    settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported meanwhile is no garbage: half a million objects, through which nobody need look again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a check draws without a generator of its own is the same in every run, and alone as after others."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny(name) -> folder` of a tiny random checkpoint, built at its first use and shared by the whole run.

    Many runs share theirs in the folder `STEPINFER_TINY`, if there is one.
    """
    base = tmp_path_factory.getbasetemp()
    # Under pytest-xdist each worker has its own base folder below the one of the run: share the one of the run.
    shared = base.parent if base.name.startswith("popen-") else base
    folder = Path(os.environ.get("STEPINFER_TINY") or shared / "tiny")

    def folder_of(name: str) -> Path:
        return build_tiny(name, folder / name)

    return folder_of


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder, prepared in the cache at the first use (seconds)."""
    return demo_model()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[ProcessPoolExecutor]:
    """One process in which Triton's kernels are interpreted, for all that ask; to start it takes seconds."""
    from stages.s03_paged_kv.interpreted import interpreter

    with interpreter() as executor:
        yield executor


@pytest.fixture(scope="session")
def launched(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`stepinfer serve`, in processes of its own, told what to do by a file and by its command line; and all in one.

    Started, and not waited for: it takes seconds.
    """
    from stages.s09_server.server_process import ServerProcess

    file = tmp_path_factory.mktemp("config") / "serve.yaml"
    file.write_text("served-model-name: [story, m]\nmax_model_len: 250\nmax-num-seqs: 3\ndry_run_step_ms: 8\n")
    dry = (tiny("llama"), "--dry-run", "--config", file)
    started = {
        "processes": ServerProcess(*dry, "--max-num-seqs", "2", "--on-engine-death", "restart"),
        "one process": ServerProcess(*dry, "--in-process"),
    }
    yield started
    for it in started.values():
        it.kill()


@pytest.fixture(scope="session")
def dry_engines(tiny: Callable[[str], Path]) -> Iterator[tuple[asyncio.Runner, dict[str, Any]]]:
    """The same dry engine in a thread, in a process and in two: tasks that start an `AsyncLLM` each, and their loop.

    The first has started; nobody has waited for the processes: they take seconds.
    """
    from stages.s09_server.async_llm import AsyncLLM
    from stages.s09_server.engine_process import EngineSettings

    settings = EngineSettings(str(tiny("qwen2")), {"device": "cpu"}, dry_run=True)
    ways: dict[str, Any] = {"thread": {"in_process": True}, "process": {}, "text process": {"text_process": True}}

    async def start() -> dict[str, Any]:
        tasks = {how: asyncio.create_task(AsyncLLM.start(settings, **way)) for how, way in ways.items()}
        await tasks["thread"]
        return tasks

    async def end(tasks: dict[str, Any]) -> None:
        for task in tasks.values():
            await (await task).close()

    with asyncio.Runner() as runner:
        tasks = runner.run(start())
        yield runner, tasks
        runner.run(end(tasks))


def start_early(request: pytest.FixtureRequest, fixture: str, file: str) -> None:
    """Start what takes seconds while other checks go on, if those of `file` are to follow in this process."""
    follow = any(item.path.name == file for item in request.session.items)
    if follow and not hasattr(request.config, "workerinput"):  # pytest-xdist tells nobody what follows
        request.getfixturevalue(fixture)
