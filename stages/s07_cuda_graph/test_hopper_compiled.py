"""The Hopper kernel compiled, for which nobody needs the GPU: it fits, and gives no tile back too early."""

import importlib.util
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from stages.s03_paged_kv.attention_plan import Launch
from stages.s07_cuda_graph.chunk_tiles import HOPPER_TILES
from stages.s07_cuda_graph.machine_code import compiling, tool

TRITONS = ("3.6.", "3.7.", "3.8.")  # that compile it, be it that nobody ran it yet; 3.9 has no `_reinterpret`


def compiles() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return triton.__version__.startswith(TRITONS)


pytestmark = pytest.mark.skipif(not compiles(), reason="no Triton that compiles this Gluon")


@pytest.fixture(scope="module", params=[(128, torch.bfloat16), (64, torch.float16)], ids=["128-bf16", "64-fp16"])
def compiled(request: pytest.FixtureRequest) -> Any:
    """The kernel that the launcher asks for: 28 heads, 4 KV heads, blocks of 16."""
    from stages.s07_cuda_graph import hopper_chunk

    head_dim, dtype = request.param
    q, k, v = torch.zeros(512, 36, head_dim, dtype=dtype).split((28, 4, 4), dim=1)
    cache = torch.zeros(8, 16, 4, head_dim, dtype=dtype)
    table, lens, cu_q, tile_map = (torch.zeros(*n, dtype=torch.int32) for n in ((4, 64), (4,), (5,), (2, 16)))
    launch = Launch(HOPPER_TILES, 16, HOPPER_TILES.block_m, tile_map, 0, 1)
    with (
        compiling(hopper_chunk, "hopper_chunk_kernel") as kernel,
        patch.object(hopper_chunk, "num_programs", return_value=132),
    ):
        out = torch.empty(512, 28, head_dim, dtype=dtype)
        hopper_chunk.chunk_attention(q, k, v, cache, cache.clone(), table, lens, cu_q, launch, 0.1, out)
    return kernel.result


@pytest.fixture(scope="module")
def instructions(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The machine code as text."""
    return tool("nvdisasm", "-c", compiled, tmp_path_factory.mktemp("code"))


def test_fits(compiled: Any, tmp_path: Path):
    """168 registers for each of 384 threads are all there are; shared memory: 227 KiB. At most a few scalars spill."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage", compiled, tmp_path))
    assert found is not None
    assert (int(found[1]), compiled.metadata.num_warps) == (168, 12)
    assert int(found[2]) <= 32
    assert compiled.metadata.shared <= 227 * 1024


def test_a_tile_is_given_back_when_all_warps_have_read_it(instructions: str):
    """One thread arrives at the barrier for its warpgroup: between whatever its warps read and that, they must meet."""
    reads = re.compile(r"HGMMA|WARPGROUP.DEPBAR|LDS|PHASECHK")
    arrivals, met = 0, False
    for line in instructions.splitlines():
        if reads.search(line):
            met = False
        elif re.search(r"BAR.SYNC\S* 0x\d, 0x80", line):
            met = True
        elif "SYNCS.ARRIVE.TRANS64.A1T0" in line:
            assert met, f"the four warps do not meet in front of {line}"
            arrivals += 1
    assert arrivals == 2 * 8, "two warpgroups: K and V in the loop, before and behind it, Q twice, the other's K and V"


def test_products_run_under_the_softmax(instructions: str):
    """In the loop the wait for the last product stands behind all exponentials; else none of them would be hidden."""
    parts = re.split(r"WARPGROUP.DEPBAR.LE gsb0, (0x\d)", instructions)
    hidden = [later.count("MUFU.EX2") for wait, later in zip(parts[1::2], parts[2::2], strict=True) if wait == "0x1"]
    assert hidden == [HOPPER_TILES.block_n // 2 + 2] * 2


def test_nothing_is_read_before_the_kernel_in_front_has_ended(compiled: Any):
    """Programmatic dependent launch: those in front may still be writing lengths, queries and keys."""
    ptx = compiled.asm["ptx"]
    waits = ptx.index("griddepcontrol.wait")
    assert waits < ptx.index("griddepcontrol.launch_dependents")
    assert waits < min(ptx.index(read) for read in ("ld.global", "cp.async.bulk", "setmaxnreg.dec"))
