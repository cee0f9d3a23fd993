"""For checks: kernels in Triton's interpreter take half of this stage's checks' time, and a process of their own. So it
begins when the checks have been collected, and works while others run. What else takes long and needs nothing of the
checks' own process may go there too. A test file asks for this plugin by its name:

    pytest_plugins = ["stages.s07_cuda_graph.beforehand"]

    @beforehand(lambda case: (compare_norm, case))  # from the check's parameters: a function and its arguments
    def test_kernel_equals_torch(answer, case):  # `answer`: what the function returned there

These checks come last, when most of their answers are there. A function that raises does so in its check.

It has no assertions that pytest would have to rewrite: PYTEST_DONT_REWRITE.
"""

import importlib.util
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
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


def is_marked(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "function", None), CALL)


def submit(pool: ProcessPoolExecutor, item: Any) -> "Future[Any]":
    """A check's call, in the interpreter's process."""
    function, *arguments = getattr(item.function, CALL)(**(item.callspec.params if hasattr(item, "callspec") else {}))
    return pool.submit(function, *arguments)


def remember_builtins() -> None:
    """In the interpreter's process: Triton looks through its language for builtins once, not at each function's call.

    That takes a quarter of the interpreter's time. What it finds is patched as before. Other versions are left alone.
    """
    import triton
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    if not triton.__version__.startswith(("3.6.", "3.7.")):
        return

    @cache
    def names(package: Any) -> list[str]:
        return [name for name in dir(package) if is_builtin(getattr(package, name, None))]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):  # else a caller's patch is there still
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those who wait come last. Not where a process has only some of the checks (pytest-xdist)."""
    if not hasattr(config, "workerinput"):
        items.sort(key=is_marked)


def pytest_collection_finish(session: pytest.Session) -> None:
    """All calls, in the order of their checks; under pytest-xdist each when its check comes."""
    wanted, config = list(filter(is_marked, session.items)), session.config
    if config.option.collectonly or hasattr(config, "workerinput") or importlib.util.find_spec("triton") is None:
        return
    if wanted:
        pool = session.stash[POOL] = interpreter()
        pool.submit(remember_builtins)
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
