"""The kernels' choices of tile, warps, stages and splits, as numbers to be changed after a measurement.

Owns every launch number that depends on hardware or shape. Pure functions: no Triton, no device, no KV length, since a
CUDA graph bakes in what they return and is replayed at any length.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """How an attention kernel cuts its work."""

    block_m: int  # query tokens a program (prefill only)
    block_n: int  # KV positions a tile
    warps: int
    stages: int  # tiles in flight
    programs_per_sm: int = 1  # programs that run at once (decode only)


# (largest head_dim, element bytes) -> tiles, smallest first. Those for head_dim 128 and 2 bytes are what
# recipes/bench_kernels.py --tune sweeps. programs_per_sm is what registers and shared memory let run at once.
_DECODE = {
    (64, 2): Tiles(16, 64, 2, 3, 4),
    (128, 2): Tiles(16, 32, 2, 3, 4),
    (256, 2): Tiles(16, 32, 2, 2, 4),
    (64, 4): Tiles(16, 64, 4, 2, 2),
    (128, 4): Tiles(16, 32, 4, 2, 2),
    (256, 4): Tiles(16, 16, 4, 2, 2),
}
_PREFILL = {
    (64, 2): Tiles(128, 64, 4, 3),
    (128, 2): Tiles(128, 64, 8, 3),
    (256, 2): Tiles(64, 32, 4, 2),
    (64, 4): Tiles(32, 32, 4, 2),
    (128, 4): Tiles(32, 32, 4, 2),
    (256, 4): Tiles(16, 16, 4, 2),
}


def decode_tiles(head_dim: int, itemsize: int) -> Tiles:
    """Tiles of the decode kernel. head_dim in elements, itemsize in bytes."""
    return _look_up(_DECODE, head_dim, itemsize)


def prefill_tiles(head_dim: int, itemsize: int) -> Tiles:
    """Tiles of the prefill kernel. head_dim in elements, itemsize in bytes."""
    return _look_up(_PREFILL, head_dim, itemsize)


def num_splits(rows: int, kv_heads: int, programs: int) -> int:
    """The most pieces a row's KV is cut into, on a GPU that runs that many programs at once.

    A function of the batch's size and never of KV lengths. The rows of a small batch must be able to fill the GPU; in
    a large one a row of 16K positions must not be what everyone waits for, and beyond that, pieces only cost memory.
    """
    pairs = rows * kv_heads
    return max(16 if pairs <= 8 * programs else 4, min(64, programs // pairs))


def split_tokens(rows: int, kv_heads: int, sm_count: int) -> int:
    """The KV positions below which a piece is not cut further.

    Pieces take time to begin and to join, so they are as long as they can be: rows of 1,024 positions give an SM two
    pieces, which is about where memory bandwidth is all used.
    """
    return min(1024, max(64, _power_of_two(512 * rows * kv_heads // sm_count)))


def sample_block(rows: int, vocab: int, sm_count: int) -> int:
    """Vocabulary ids a program of the sampler takes."""
    return 4096 if rows * vocab >= 4096 * 4 * sm_count else 1024


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device. A CPU stands in for a small GPU, so that its tests see programs take turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _look_up(table: dict[tuple[int, int], Tiles], head_dim: int, itemsize: int) -> Tiles:
    for (limit, size), tiles in table.items():
        if size == itemsize and head_dim <= limit:
            return tiles
    raise ValueError(
        f"no attention kernel for head_dim {head_dim} with elements of {itemsize} bytes: "
        "head_dim may be at most 256, and the dtype bfloat16, float16 or float32"
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
