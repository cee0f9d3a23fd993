"""Attention for chunks against exact attention, in Triton's interpreter, and when the engine asks for it."""

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

import pytest
import torch

from stages.s03_paged_kv.tile_sizes import AttentionShape
from stages.s07_cuda_graph.chunk_cases import ALLOWED, ChunkCase, large_cases, small_cases
from stages.s07_cuda_graph.padded_plan import CHUNK_TILES, ChunkPlan, mixed_size, padded_plan, serves_chunks
from stages.s07_cuda_graph.step_inputs import StepInputs

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no package for this platform"
)
QWEN3 = AttentionShape(16, 8, 128, 16, 2)


@needs_triton
@pytest.mark.parametrize("case", list(small_cases()), ids=str)
def test_equals_exact_attention(interpreted: ProcessPoolExecutor, case: ChunkCase):
    assert interpreted.submit(case.run).result() <= ALLOWED[case.dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", list(large_cases()), ids=str)
def test_on_the_gpu(case: ChunkCase):
    assert case.run("cuda") <= ALLOWED[case.dtype]


@pytest.mark.parametrize(
    ("shape", "hopper", "served"),
    [
        (QWEN3, True, True),
        (QWEN3, False, False),
        (AttentionShape(16, 8, 128, 16, 4), True, False),  # fp32
        (AttentionShape(16, 8, 80, 16, 2), True, False),  # a tile of columns would reach into the next head
    ],
)
def test_where_it_runs(shape, hopper, served):
    with patch("torch.cuda.get_device_capability", return_value=(9 if hopper else 8, 0)):
        with patch("importlib.util.find_spec", return_value=object()):
            assert serves_chunks(shape, torch.device("cuda")) == served
    assert not serves_chunks(shape, torch.device("cpu"))


@pytest.mark.parametrize(("tokens", "chunks"), [(64, False), (1024, False), (2048, True), (8192, True)])
def test_only_steps_that_fill_the_gpu_without_splits_take_it(tokens, chunks):
    """264 programs on 132 processors: 16 heads in 17 tiles."""
    size = mixed_size(tokens, 16, QWEN3, 4096, chunks=True)
    assert size.chunks == chunks
    assert not mixed_size(tokens, 16, QWEN3, 4096).chunks
    plan = padded_plan(StepInputs(size, 256, torch.device("cpu")), QWEN3, 4096)
    assert isinstance(plan, ChunkPlan) == chunks
    if isinstance(plan, ChunkPlan):
        assert (plan.chunks.num_tiles, plan.chunks.num_splits) == (size.long_tiles, 1)
        assert plan.chunks.queries_per_tile == size.queries_per_tile == CHUNK_TILES.block_m
        assert len(plan.launches) == 1, "rows of one token keep the kernel that they had"
