"""Lets `pytest stages/01` name a stage by its number, and loads what the checks of all stages share."""

import pytest

pytest.register_assert_rewrite("tests.contract")

pytest_plugins = ["stages.workshop.plugin", "tests.fixtures", "tests.parallel"]
