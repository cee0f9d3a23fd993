"""Which kernel attends for chunks of prompts, and how large its tiles are: asked once, when an engine is made.

Both compute the same. `chunk_kernel` is the readable one, and runs in Triton's interpreter and on every GPU with a copy
engine. `hopper_chunk` is faster, a tenth to a quarter on fresh prompts and two thirds behind older keys, but on Hopper
alone, and in a language that is still called experimental.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch

from stages.s03_paged_kv.tile_sizes import PROCESSORS, AttentionShape, TileSizes

log = logging.getLogger(__name__)

TRITON_TILES = TileSizes(64, 64, 4, 3, True)  # queries of one head, keys: the fastest of 24 on an H200
HOPPER_TILES = TileSizes(128, 128, 4, 3, True)  # queries of both warpgroups, keys
CHUNK_TILES = {tiles.block_m: tiles for tiles in (TRITON_TILES, HOPPER_TILES)}  # by the queries of a tile
CHUNK_HEADS = (64, 128)  # sizes of a head: with 128 the tiles were measured, and with 64 they are smaller
LEAST_QUERIES = 2 * PROCESSORS * TRITON_TILES.block_m  # of all heads: enough to fill a GPU without splitting keys
GLUON_VERSIONS = ((3, 6),)  # Tritons whose `hopper_chunk_kernel` ran on a GPU; 3.7 and 3.8 compile it, 3.9 does not


def chunk_tiles(shape: AttentionShape, device: torch.device) -> TileSizes | None:
    """The tiles of the kernel that serves chunks there; None if none does.

    It needs the copy engine that came with Hopper, 16-bit numbers, heads of 64 or 128. The faster kernel also needs
    Hopper's own tensor core instructions, and blocks of 8 to 128 keys of which a tile is made up: in shared memory the
    order of a tile's numbers repeats every 8 keys.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return None
    major = torch.cuda.get_device_capability(device)[0]
    if major < 9 or shape.element_size != 2 or shape.head_dim not in CHUNK_HEADS:
        return None
    whole_blocks = shape.block_size % 8 == 0 and HOPPER_TILES.block_n % shape.block_size == 0
    return HOPPER_TILES if major == 9 and whole_blocks and has_gluon() else TRITON_TILES


def chunk_attention(tiles: TileSizes) -> Callable[..., None]:
    """The kernel that has these tiles."""
    if tiles == HOPPER_TILES:
        from stages.s07_cuda_graph import hopper_chunk

        return hopper_chunk.chunk_attention
    from stages.s07_cuda_graph import chunk_kernel

    return chunk_kernel.chunk_attention


@functools.cache
def has_gluon() -> bool:
    """Is there a Gluon that is known to compile the faster kernel? If not, a warning says so once."""
    import triton

    why = ""
    if tuple(map(int, triton.__version__.split(".")[:2])) not in GLUON_VERSIONS:
        why = f"it was never checked with Triton {triton.__version__}"
    else:
        try:
            importlib.import_module("stages.s07_cuda_graph.hopper_chunk")
        except (ImportError, AttributeError) as error:
            why = str(error)
    if why:
        log.warning("prompts attend with chunk_kernel, not with the faster hopper_chunk: %s", why)
    return not why
