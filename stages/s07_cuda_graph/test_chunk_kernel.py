"""Attention for chunks against exact attention, in Triton's interpreter, and when the engine asks for it."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from stages.s03_paged_kv.tile_sizes import AttentionShape
from stages.s07_cuda_graph import chunk_tiles
from stages.s07_cuda_graph.beforehand import beforehand
from stages.s07_cuda_graph.chunk_cases import ALLOWED, ChunkCase, small_cases
from stages.s07_cuda_graph.chunk_gpu_cases import LAUNCHES, large_cases, racing_cases
from stages.s07_cuda_graph.chunk_tiles import HOPPER_TILES, TRITON_TILES
from stages.s07_cuda_graph.padded_plan import ChunkPlan, mixed_size, padded_plan
from stages.s07_cuda_graph.step_inputs import StepInputs

pytest_plugins = ["stages.s07_cuda_graph.beforehand"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no package for this platform"
)
QWEN3 = AttentionShape(16, 8, 128, 16, 2)


@needs_triton
@beforehand(lambda case: (case.run,))
@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_equals_exact_attention(answer: float, case: ChunkCase):
    assert answer <= ALLOWED[case.dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", list(large_cases()), ids=str)
def test_on_the_gpu(case: ChunkCase):
    assert case.run("cuda") <= ALLOWED[case.dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", list(racing_cases()), ids=str)
def test_bits_do_not_depend_on_who_runs_beside_whom(case: ChunkCase):
    assert case.differing(LAUNCHES) == 0


@pytest.mark.parametrize(
    ("shape", "major", "gluon", "tiles"),
    [
        (QWEN3, 9, True, HOPPER_TILES),
        (QWEN3, 9, False, TRITON_TILES),
        (QWEN3, 10, True, TRITON_TILES),  # Blackwell has other instructions
        (QWEN3, 8, True, None),
        (replace(QWEN3, block_size=8), 9, True, HOPPER_TILES),
        (replace(QWEN3, block_size=128), 9, True, HOPPER_TILES),
        (replace(QWEN3, block_size=256), 9, True, TRITON_TILES),  # larger than a tile
        (replace(QWEN3, block_size=4), 9, True, TRITON_TILES),  # less than the pattern in which a tile lies
        (replace(QWEN3, element_size=4), 9, True, None),
        (replace(QWEN3, head_dim=80), 9, True, None),  # a tile of columns would reach into the next head
    ],
)
def test_which_kernel_serves(shape, major, gluon, tiles):
    with (
        patch("torch.cuda.get_device_capability", return_value=(major, 0)),
        patch("importlib.util.find_spec", return_value=object()),
        patch.object(chunk_tiles, "has_gluon", return_value=gluon),
    ):
        assert chunk_tiles.chunk_tiles(shape, torch.device("cuda")) == tiles
    assert chunk_tiles.chunk_tiles(shape, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("version", "broken", "there"),
    [
        ("3.6.0", None, True),
        ("3.6.1+cu130", None, True),
        ("3.5.1", None, False),
        ("3.7.0", None, False),
        ("3.10.0", None, False),
        ("3.6.0", ImportError("no module named gluon"), False),
        ("3.6.0", AttributeError("no attribute jit"), False),
    ],
)
def test_a_gluon_that_is_not_known_is_not_used(version, broken, there, caplog):
    """Whatever a Triton of another version does with the kernel, nobody's engine depends on it; a warning says why."""
    with (
        patch.dict("sys.modules", {"triton": SimpleNamespace(__version__=version)}),
        patch("importlib.import_module", side_effect=broken),
    ):
        assert chunk_tiles.has_gluon.__wrapped__() is there
    said = [record.message for record in caplog.records]
    assert said == [] if there else (str(broken) if broken else version) in said[0]


@needs_triton
def test_each_kernel_is_found_by_its_tiles():
    found = [chunk_tiles.chunk_attention(tiles).__module__ for tiles in (TRITON_TILES, HOPPER_TILES)]
    assert found == ["stages.s07_cuda_graph.chunk_kernel", "stages.s07_cuda_graph.hopper_chunk"]


@pytest.mark.parametrize("tiles", [TRITON_TILES, HOPPER_TILES])
@pytest.mark.parametrize(("tokens", "chunks"), [(64, False), (1024, False), (2048, True), (8192, True)])
def test_only_steps_that_fill_the_gpu_without_splits_take_it(tokens, chunks, tiles):
    """264 programs on 132 processors: 16 heads in 17 tiles of 64 queries."""
    size = mixed_size(tokens, 16, QWEN3, 4096, tiles)
    assert size.chunks == chunks
    assert not mixed_size(tokens, 16, QWEN3, 4096).chunks
    plan = padded_plan(StepInputs(size, 256, torch.device("cpu")), QWEN3, 4096)
    assert isinstance(plan, ChunkPlan) == chunks
    if isinstance(plan, ChunkPlan):
        assert plan.chunks.sizes == tiles
        assert (plan.chunks.num_tiles, plan.chunks.num_splits) == (size.long_tiles, 1)
        assert size.long_tiles == tokens // tiles.block_m + 16
        assert plan.chunks.queries_per_tile == size.queries_per_tile == tiles.block_m
        assert len(plan.launches) == 1, "rows of one token keep the kernel that they had"
