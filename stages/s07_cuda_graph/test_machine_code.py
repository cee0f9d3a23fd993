"""Kernels compiled for a GPU that is not there: their products read shared memory where the tile is."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.s07_cuda_graph.machine_code import compiling, products, tool

# The second half of a product, as ptxas 12.8 assembled it when 8 warps shared its 64 rows: R0 is the program's number,
# and stands where the tile's address should. Below, the same as it should be.
WRONG = """
        /*0010*/                   S2R R0, SR_CTAID.X ;
        /*1620*/                   SGXT.U32 R64, R24, 0xe ;
        /*1630*/                   ISETP.GE.AND P0, PT, R0, 0x4, PT ;
        /*1660*/                   R2UR UR12, R64.reuse ;
        /*5870*/                   IADD3 R35, P4, R0.reuse, 0x2, RZ ;
        /*5890*/                   IADD3.X R36, R0, -0x80000000, RZ, P4, !PT ;
        /*58d0*/                   R2UR UR6, R35 ;
        /*58f0*/                   R2UR UR7, R36 ;
        /*5930*/                   IMAD.U32 R168, RZ, RZ, UR6 ;
        /*5960*/                   IMAD.U32 R169, RZ, RZ, UR7 ;
        /*9f30*/                   UMOV UR10, UR12 ;
        /*9f50*/                   UMOV UR11, 0x80000000 ;
        /*9fb0*/                   R2UR UR18, R168 ;
        /*9fd0*/                   R2UR UR19, R169 ;
        /*a1a0*/                   HGMMA.64x8x8.F32.TF32 R36, R24, gdesc[UR8], RZ, !UPT ;
        /*a1b0*/                   HGMMA.64x8x8.F32.TF32 R36, R28, gdesc[UR16], R36, gsb0 ;
"""
RIGHT = WRONG.replace("R0.reuse, 0x2", "R64.reuse, 0x2").replace("R36, R0, -0x8", "R36, RZ, -0x8")


def test_a_wrong_register_is_seen():
    assert products(WRONG) == (2, ["HGMMA.64x8x8.F32.TF32 R36, R28, gdesc[UR16], R36, gsb0"])
    assert products(RIGHT) == (2, [])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton to compile")
def test_attention_of_few_rows_reads_its_own_tiles(tmp_path: Path):
    """The shape that was assembled wrongly: groups of 7, 5 tokens of a row, heads of 8, in fp32, keys in splits."""
    from stages.s03_paged_kv import merge_kernel
    from stages.s07_cuda_graph import few_attention, few_attention_kernel

    rows, queries, q_heads, kv_heads, dim = 3, 5, 14, 2, 8
    tokens, gain = rows * queries, torch.zeros(dim)
    long, short = torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows + 1, dtype=torch.int32)
    table = torch.zeros(rows, 16, dtype=torch.int32)
    ctx = SimpleNamespace(slots=long, block_table=table, cu_q=short, scale=dim**-0.5)
    qkv, cache = torch.zeros(tokens, q_heads + 2 * kv_heads, dim), torch.zeros(64, 16, kv_heads, dim)
    angles = (torch.zeros(256, dim // 2), torch.zeros(256, dim // 2))
    with compiling(merge_kernel, "_merge_kernel"), compiling(few_attention_kernel, "few_attention_kernel") as kernel:
        few_attention.few_attention(qkv, (gain, gain), 1e-6, angles, long, (cache, cache.clone()), ctx, queries)
    count, strange = products(tool("nvdisasm", "-c", kernel.result, tmp_path))
    assert not strange
    assert count > 0
