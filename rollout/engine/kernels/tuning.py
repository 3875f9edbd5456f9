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
    programs_per_sm: int = 1  # persistent programs (decode only)


# (largest head_dim, element bytes) -> tiles, smallest first. Those for head_dim 128 and 2 bytes are what
# recipes/bench_kernels.py --tune sweeps.
# NOTE: pieces are dealt in advance, so programs_per_sm must not pass what fits: registers and shared memory allow
# three programs of 72 KB and 138 registers a thread.
_DECODE = {
    (64, 2): Tiles(16, 64, 4, 4, 3),
    (128, 2): Tiles(16, 64, 4, 3, 3),
    (256, 2): Tiles(16, 32, 4, 3, 2),
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


def num_splits(rows: int, kv_heads: int, sm_count: int) -> int:
    """The most pieces a row's KV is cut into.

    A function of the batch's size and never of KV lengths. One long row must be able to fill the GPU by itself, and
    among many short ones it must not be what everyone waits for; beyond that, splits only cost workspace.
    """
    pairs = rows * kv_heads
    least = 8 if pairs <= 32 * sm_count else 4
    return max(least, min(64, _power_of_two(-(-16 * sm_count // pairs))))


def split_tokens(rows: int, kv_heads: int, sm_count: int) -> int:
    """The KV positions below which a piece is not cut further: shorter ones where programs are scarce."""
    pairs = rows * kv_heads
    return 512 if pairs >= 8 * sm_count else 256 if pairs >= sm_count else 128


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
