"""How checks are shared out among processes: `pytest -n 2 --dist loadfile` (pytest-xdist), as `course.py test` has it.

A file's checks stay together, since they share servers and engines, and may come in an order. The proofs of exercises
are one file, and a large part of all the work: there the checks of a stage stay together, and go first.
"""

import re
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours for `--dist loadfile`, else pytest-xdist's own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LoadScheduling(LoadScopeScheduling):
        """Gives the next lot of checks to the process that is about to have none; the lots of most checks go first."""

        def _split_scope(self, nodeid: str) -> str:
            return lot_of(nodeid)

    return LoadScheduling(config, log)


def lot_of(nodeid: str) -> str:
    """Checks of one name stay together."""
    file, _, name = nodeid.partition("::")
    proof = re.match(r"test_exercise\[(\d\d)\.", name)  # they share a process: `proofs` of tests/test_workshop.py
    return f"{file}::{proof[1]}" if proof else file
