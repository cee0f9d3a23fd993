"""Which checks stay together when they are shared out among processes."""

import pytest

import tests.test_workshop as workshop
from tests.parallel import lot_of


def test_a_file_is_a_lot():
    lots = {lot_of(f"stages/s01_toy/test_a.py::{name}") for name in ("test_x", "TestX::test_y[a::b]", "test_z[01.1]")}
    assert lots == {"stages/s01_toy/test_a.py"}


def test_the_proofs_of_a_stage_are_one():
    proofs = workshop.test_exercise.__name__
    lots = [lot_of(f"tests/test_workshop.py::{proofs}[{number}-{variant}]") for number, variant in workshop.VARIANTS]
    assert set(lots) == {f"tests/test_workshop.py::{stage.number}" for stage in workshop.read_stages()}


def test_pytest_xdist_is_told(request: pytest.FixtureRequest):
    """Where it is there, and asked for what a file's checks need."""
    pytest.importorskip("xdist")
    hook = request.config.hook.pytest_xdist_make_scheduler
    assert any(implementation.plugin_name == "tests.parallel" for implementation in hook.get_hookimpls())
