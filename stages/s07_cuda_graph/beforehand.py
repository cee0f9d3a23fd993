"""For checks: kernels in Triton's interpreter take half of this stage's checks' time, and a process of their own. So it
begins when the checks have been collected, and works while others run. A test file asks for this plugin by its name:

    pytest_plugins = ["stages.s07_cuda_graph.beforehand"]

    @beforehand(lambda case: (compare_norm, case))  # from the check's parameters: a function and its arguments
    def test_kernel_equals_torch(answer, case):  # `answer`: what the function returned there

It has no assertions that pytest would have to rewrite: PYTEST_DONT_REWRITE.
"""

import importlib.util
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

import pytest

from stages.s03_paged_kv.interpreted import interpreter

Check = TypeVar("Check", bound=Callable[..., None])
CALL = "called_beforehand"
POOL = pytest.StashKey[ProcessPoolExecutor]()
ANSWER = pytest.StashKey["Future[Any]"]()


def beforehand(call: Callable[..., tuple[Any, ...]]) -> Callable[[Check], Check]:
    """Marks a check with what it wants of the interpreter."""

    def mark(check: Check) -> Check:
        setattr(check, CALL, call)
        return check

    return mark


def submit(pool: ProcessPoolExecutor, item: Any) -> "Future[Any]":
    """A check's call, in the interpreter's process."""
    function, *arguments = getattr(item.function, CALL)(**(item.callspec.params if hasattr(item, "callspec") else {}))
    return pool.submit(function, *arguments)


def pytest_collection_finish(session: pytest.Session) -> None:
    """All calls, in the order of their checks. Not where a process has only some of the checks (pytest-xdist)."""
    wanted = [item for item in session.items if hasattr(getattr(item, "function", None), CALL)]
    config = session.config
    if config.option.collectonly or hasattr(config, "workerinput") or importlib.util.find_spec("triton") is None:
        return
    if wanted:
        pool = session.stash[POOL] = interpreter()
        for item in wanted:
            item.stash[ANSWER] = submit(pool, item)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Whatever nobody asked for any more is not computed."""
    if POOL in session.stash:
        session.stash[POOL].shutdown(cancel_futures=True)


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Any:
    """What the check's call returned."""
    item = request.node
    if ANSWER not in item.stash:
        item.stash[ANSWER] = submit(request.getfixturevalue("interpreted"), item)
    return item.stash[ANSWER].result()
