"""The kernels' choices of tile, warps, stages and splits, as numbers to be changed after a measurement.

Owns every launch number that depends on hardware or shape. Pure functions, but for the few that ask what a device has:
no Triton, no KV length, since a CUDA graph bakes in what they return and is replayed at any length.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

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


def decode_tiles(head_dim: int, itemsize: int, rows: int, *, few: bool = False) -> Tiles:
    """Tiles of the decode kernel for a batch of `rows`. head_dim in elements, itemsize in bytes.

    `few`: of the one in `kernels.few_attention`. It holds two tiles of keys and two of values in registers, and has
    room for 16 KB of them a warp. One row is left to half as many programs of twice the size, which have half the
    pieces to join: on an H200, -1.5% of a step of a 1.7B model at 4K and 8K, where two rows would take 1% longer.
    """
    tiles = _look_up(_DECODE, head_dim, itemsize)
    if few and head_dim * itemsize > 256:
        return tiles._replace(block_n=16)
    if few and rows == 1:
        block_n, warps, programs = 2 * tiles.block_n, 2 * tiles.warps, max(1, tiles.programs_per_sm // 2)
        return tiles._replace(block_n=block_n, warps=warps, programs_per_sm=programs)
    return tiles


def prefill_tiles(head_dim: int, itemsize: int) -> Tiles:
    """Tiles of the prefill kernel. head_dim in elements, itemsize in bytes."""
    return _look_up(_PREFILL, head_dim, itemsize)


FUSED_HEAD_DIMS = (32, 64, 128, 256)
"""Sizes of heads that `kernels.fused_attention` takes."""


def fuses_attention(rows: int, kv_heads: int, head_dim: int, itemsize: int, sm_count: int) -> bool:
    """Whether a decode step does rotary positions, KV write and attention in one kernel.

    Where hardly a program has more than one row to begin with, for each beginning takes longer so. On an H200 that
    saves 2% of a step of 64 rows of a 1.7B model with a KV of 512, and would cost 1 to 2% at 256 rows.
    """
    if head_dim not in FUSED_HEAD_DIMS:
        return False
    pairs = rows * kv_heads
    return pairs <= decode_programs(pairs, decode_tiles(head_dim, itemsize, rows), sm_count)


LEAST_SHARE_TOKENS = 64
"""KV positions of a kv head that are worth a program of their own in decode attention."""


def decode_programs(pairs: int, tiles: Tiles, sm_count: int, *, few: bool = False) -> int:
    """Programs of decode attention that run at once, for `pairs` of row and kv head.

    A function of the batch's size and never of KV lengths. No more than are of use: a GPU that also starts idle ones
    shares the others out among its SMs unevenly. `few`: of `kernels.few_attention`, which holds less in flight and
    takes all there can be: on an H200 a step of 8 rows of 4K takes 24% longer with half of them.
    """
    at_once = 4 if few else max(2, min(4, -(-pairs // sm_count)))
    return sm_count * min(at_once, tiles.programs_per_sm)


def early_stages(tiles: Tiles, line_bytes: int, programs_per_sm: int, shared: int) -> int | None:
    """Tiles in flight of decode attention that is launched early.

    As many as leave no room for one program more: while the kernel before still runs on some SMs, others would be given
    more than their due. On an H200 that costs 10% of a step of 32 rows of 4K of a 1.7B model; this way 2% are gained.

    Args:
        tiles: chosen for programs that don't start early.
        line_bytes: of keys and values at one position of a kv head.
        programs_per_sm: that there are.
        shared: bytes of shared memory that a program, or little more than those of an SM, may have.

    Returns:
        None where such a kernel had better not start early. So it is with three programs on an SM, by a measurement.
    """
    if programs_per_sm == tiles.programs_per_sm:
        return tiles.stages  # registers let no more of them run
    if tiles.programs_per_sm % programs_per_sm:
        return None
    tile_bytes = tiles.block_n * line_bytes
    buffers = shared // ((programs_per_sm + 1) * tile_bytes) + 1  # a stage more than there are buffers
    return buffers + 1 if programs_per_sm * (buffers * tile_bytes + 4096) <= shared else None


def joined_at_once(values: int, tiles: Tiles, *, few: bool = False) -> int:
    """Pieces of a row that attention joins at a time, of `values` each: 64 values a thread, or 128 where rows are few.

    There a row has up to 66 pieces, and each further round of loads costs about a microsecond.
    """
    return max(1, min(32 if few else 16, (4096 if few else 2048) * tiles.warps // values))


FEW_TOKENS = 8
"""Most tokens that are multiplied by the kernels for few, which round tokens up to 8. On an H200, with a KV of 1K, the
chain of early kernels takes a quarter off a step of a 1.7B model at one token, and a fifth at eight."""
FEW_WIDTH = 2048
"""Widest residual stream for which they are taken: a program holds sixteen rows of that many weights in registers."""
FEW_REGISTERS = 168
"""Registers of such a program's thread: what lets three programs run at once on an SM."""
ALONE_TOKENS = 2
"""Most tokens whose products hold each weight row at two sets of inner positions, see `kernels.few_products`.

On an H200 that takes 1 to 2% off a step of one row of a 1.7B model, and 3% off one of two rows of 1K; 4 and 8 rows gain
nothing.
"""
APART_TOKENS = 1
"""Most tokens whose norms in a chain of early kernels have multiprocessors to themselves, see `kernels.placement`.

On an H200 that takes 1.2% off the decoder's part of a step of one row of a 1.7B model of 1K, and 0.3 to 0.5% at 4K to
16K. Two rows gain nothing, and eight lose 3%: it takes time until so many are empty.
"""
FEW_DEPTH = 2048
"""Inner positions of a weight that a program takes at a time, where partial sums can be added up."""


def few_warps(tokens: int, programs: int, depth: int, sm_count: int) -> int:
    """Warps of a program of such a product, which holds sixteen rows of a weight, `depth` inner positions of each.

    Four: 128 registers a thread for weights. With eight, a step of a 1.7B model on an H200 takes 13% longer. But where
    each program could have an SM to itself, the GPU, which starts them while attention ends, puts up to three on one,
    or two of eight warps. So one token's take eight: -1% at a KV of 4K, -0.5% at 8K and 16K, +1.3% at 1K.
    """
    return 8 if tokens == 1 and programs <= sm_count and depth >= 2048 else 4


def few_rounds(tiles: int, sm_count: int) -> int:
    """Tiles of sixteen rows that a program of such a product takes one after the other.

    Three programs run at once on an SM. Where there would be more of them, each takes several tiles, and asks for the
    next one's weights before it writes: sooner than a new program could. 2.5% of a step of a 1.7B model on an H200.
    """
    return -(-tiles // (3 * sm_count))


def few_turn_ns(tokens: int, programs: int, rounds: int, tile_bytes: int, device: torch.device, *, gated: bool) -> int:
    """Nanoseconds by which programs of such a product on one SM begin after one another, see `kernels.early`.

    About what memory takes to read the first tile of one program on each SM; half of it where that is a third of its
    weights or less, or where programs don't begin all at once, behind a norm (as `gated` ones do), but as those of the
    product before end. On an H200 that takes 2 to 3% off a step of one row, or of two at a KV of 4K, of a 1.7B model.
    Longer pauses cost more than they gain: 2,500 ns instead of 1,600 there, and of Qwen2.5-1.5B, whose programs take
    three tiles, the whole instead of half. With more rows, or where two programs share an SM, any pause costs time.
    """
    if tokens > ALONE_TOKENS or programs <= 2 * sm_count(device):
        return 0
    read_ns = tile_bytes * sm_count(device) / memory_bandwidth(device) * 1e9
    return int((0.9 if gated and rounds <= 2 else 0.45) * read_ns)


OUTPUT_DEPTH = 256
"""Inner positions that a program of `kernels.few_output` takes. With 128, and half as many warps or twice as many
outputs, a step of one row of a 1.7B model on an H200 takes 3 to 7% longer."""
OUTPUT_WARPS = 8
"""Its warps, of sixteen outputs each."""
JOINED_PIECES = 64
"""Most pieces that it joins: all at once, in 64 registers."""


def joins_in_product(tokens: int, shares: int, head_dim: int) -> bool:
    """Whether a decode step's pieces of attention, `shares` of a row at most, are joined by the output product."""
    whole_heads = OUTPUT_DEPTH % head_dim == 0 and head_dim >= OUTPUT_DEPTH // OUTPUT_WARPS  # for programs and warps
    return tokens == 1 and shares <= JOINED_PIECES and whole_heads


def part_dtype(dtype: torch.dtype) -> torch.dtype:
    """What parts of a sum are kept in that is of `dtype` in the end.

    float32 would be more bytes than they are worth, but float16 may not reach as far as a part of a sum.
    """
    return torch.float32 if dtype == torch.float16 else dtype


STREAMED_TOKENS = 64
"""Most tokens that are multiplied by `kernels.streamed_products`.

On an H200, with a KV of 1K, they and attention between them take 6% off a step of a 1.7B model at 64 rows and 10 to 12%
at 16 and 32, and 4 to 8% off one of an 8B model at 1 to 64. At 128 rows nothing is gained.
"""
STREAMED_HEAD_TOKENS = 32
"""Most tokens whose logits are. On an H200: -0.4 to -1.2% of a step of 1 to 32 rows of a 1.7B model; +0.3% at 64."""


def streams(widths: tuple[int, ...]) -> bool:
    """Whether `kernels.streamed_products` take products of these inner dimensions."""
    return all(width % 64 == 0 for width in widths)


def streamed_splits(inputs: int) -> int:
    """Parts of an inner dimension whose sums are added up later, so that a product of few outputs fills the GPU."""
    return next(splits for splits in (4, 3, 2, 1) if inputs % (64 * splits) == 0)


def streamed_rows(*, gated: bool) -> int:
    """Rows of a weight that a program of such a product takes."""
    return 128 if gated else 64


def streamed_tiles(line_bytes: int, depth: int, *, alone: bool, shared: int) -> tuple[int, int]:
    """Inner positions of a tile, and tiles in flight.

    Args:
        line_bytes: of weight and input at one inner position.
        depth: inner positions of a program, a multiple of 64.
        alone: whether a program is to have a multiprocessor to itself. With room for two, the GPU puts them together
            on some and leaves others idle: then the MLP of a 1.7B model takes a sixth longer at 32 rows.
        shared: bytes of shared memory that a program, or little more than those of an SM, may have.
    """
    step = 128 if depth % 128 == 0 and 3 * 128 * line_bytes <= shared else 64
    tile_bytes = step * line_bytes
    wanted = max(6, shared // 2 // tile_bytes + 1) if alone else 4
    return step, max(1, min(wanted, shared // tile_bytes))


def sample_block(rows: int, vocab: int, sm_count: int) -> int:
    """Vocabulary ids a program of the sampler takes."""
    return 4096 if rows * vocab >= 4096 * 4 * sm_count else 1024


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device. A CPU stands in for a small GPU, so that its tests see programs take turns."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def may_start_early(device: torch.device) -> bool:
    """Whether kernels may be launched before their predecessor has ended, see `kernels.early`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second, by the memory's clock and width. A copy on an H200 reaches 88% of it."""
    if device.type != "cuda":
        return 1e11
    properties: Any = torch.cuda.get_device_properties(device)  # whose type leaves these out
    return float(2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return 1 << 16
    properties: Any = torch.cuda.get_device_properties(device)  # whose type leaves this one out
    return int(properties.shared_memory_per_block_optin)


def _look_up(table: dict[tuple[int, int], Tiles], head_dim: int, itemsize: int) -> Tiles:
    for (limit, size), tiles in table.items():
        if size == itemsize and head_dim <= limit:
            return tiles
    raise ValueError(
        f"no attention kernel for head_dim {head_dim} with elements of {itemsize} bytes: "
        "head_dim may be at most 256, and the dtype bfloat16, float16 or float32"
    )
