"""How near each kernel comes to the memory's (or the tensor cores') speed.

Decode attention reads every key and value once and does almost nothing with them, so its time has a floor: bytes over
bandwidth. The bandwidth is that of a large copy, measured in the same run, and "share" is floor / time. The sampler and
KV writes are held against the same bandwidth; prefill is arithmetic, so it is given in TFLOP/s.

Every figure is a CUDA graph of several launches, each on data of its own (another layer of the cache, another logits
tensor) and together larger than the L2 cache, which would otherwise answer from the last launch.

    python recipes/bench_kernels.py            # every kernel
    python recipes/bench_kernels.py --tune     # other choices than those of kernels/tuning.py beside them

Needs a CUDA device. Starts nothing new after --seconds. Prints a table, then one JSON line.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rollout.engine import kernels
from rollout.engine.kernels import tuning

HEAD_DIM, KV_HEADS, BLOCK_SIZE, LAYERS = 128, 8, 64, 32
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # keys and values of one position of one layer
DECODE_SHAPES = list(product((1, 8, 32, 64, 128, 256), (512, 1024, 4096, 16384)))
TABLE_BLOCKS = 16384 // BLOCK_SIZE
L2_BYTES = 60 * 2**20

Launch = Callable[[], object]


def measure(launches: list[Launch], replays: int = 7) -> float:
    """Median microseconds a launch, of a CUDA graph of all of them."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def copy_bandwidth(pool: Tensor) -> float:
    """Bytes a second, read and written, of a copy of 2 GiB: the median of 20."""
    # NOTE: not in a graph, where a copy reaches two thirds of the bandwidth of an eager one.
    half = min(pool.numel() // 2, 2**30)
    source, target = pool[:half], pool[half : 2 * half]
    times = []
    for _ in range(22):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * half * pool.element_size() / statistics.median(times[2:])


class Cache:
    """One layer after another of a paged cache, over a pool of memory that is filled once."""

    def __init__(self, pool: Tensor, rows: int, length: int, *, block_major: bool = True) -> None:
        self.blocks_per_row = -(-length // BLOCK_SIZE)
        blocks = rows * self.blocks_per_row
        cell = (KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        numel = blocks * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM
        self.layers = min(LAYERS, pool.numel() // numel)
        used = pool[: self.layers * numel]
        if block_major:
            self.kv = used.view(blocks, self.layers, 2, *cell).permute(1, 2, 0, 3, 4, 5)
        else:
            self.kv = used.view(self.layers, 2, blocks, *cell)
        device = pool.device
        # As wide as an engine's for long completions: kernels choose by what a row could hold.
        self.block_table = torch.zeros(rows, max(TABLE_BLOCKS, self.blocks_per_row), dtype=torch.int32, device=device)
        self.block_table[:, : self.blocks_per_row] = torch.randperm(blocks, device=device).view(rows, -1)
        self.rows = torch.arange(rows, dtype=torch.int32, device=device)

    def launches(self, at_least_bytes: int, layer_bytes: int, one: Callable[[Tensor, Tensor], object]) -> list[Launch]:
        """`one(k_cache, v_cache)` on enough layers to read `at_least_bytes`, eight at most of large ones."""
        count = min(self.layers, max(min(8, self.layers), -(-at_least_bytes // layer_bytes)))
        return [partial(one, *self.kv[layer]) for layer in range(count)]


def decode_us(
    pool: Tensor,
    rows: int,
    length: int,
    heads: int,
    *,
    block_major: bool = True,
    lengths: Tensor | None = None,
    **choices: Any,
) -> float | None:
    """Microseconds of decode attention, None if the pool cannot hold the shape; `choices` are `decode_cuts`'s."""
    from rollout.engine.kernels.decode import paged_decode  # Triton, which the command line does without
    from rollout.engine.kernels.shares import decode_cuts

    if rows * length * TOKEN_BYTES > pool.numel() * pool.element_size():
        return None
    cache = Cache(pool, rows, length, block_major=block_major)
    query = torch.randn(rows, heads, HEAD_DIM, dtype=pool.dtype, device=pool.device)
    full = torch.full((rows,), length, dtype=torch.int32, device=pool.device)
    position = (full if lengths is None else lengths) - 1
    # once a step for all layers, so not part of a layer's time
    cuts = decode_cuts(cache.rows, position, cache.kv[0][0], **choices)
    how = {"scaling": HEAD_DIM**-0.5, "cuts": cuts, "tiles": choices.get("tiles")}

    def one(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return paged_decode(query, k_cache, v_cache, cache.block_table, cache.rows, position, **how)

    return measure(cache.launches(4 * L2_BYTES, rows * length * TOKEN_BYTES, one))


def row(
    kind: str, shape: str, us: float, *, bytes_moved: float = 0, flop: float = 0, peak: float = 0
) -> dict[str, Any]:
    """Print one line of the table; the same as a record."""
    record: dict[str, Any] = {"kernel": kind, "shape": shape, "us": round(us, 2)}
    if bytes_moved:
        record |= {"gb_s": round(bytes_moved / us / 1e3, 1), "share": round(bytes_moved / us * 1e6 / peak, 3)}
    if flop:
        record["tflop_s"] = round(flop / us / 1e6, 1)
    rate = f"{record['gb_s']:9.0f} GB/s  {record['share']:6.1%}" if bytes_moved else f"{record['tflop_s']:9.0f} TFLOP/s"
    print(f"{kind:<8} {shape:<56} {us:10.1f} us {rate}", flush=True)
    return record


def bench_decode(pool: Tensor, peak: float, late: Callable[[], bool]) -> list[dict[str, Any]]:
    records = []
    for heads, (rows, length) in product((32, 16), DECODE_SHAPES):
        if late():
            break
        us = decode_us(pool, rows, length, heads)
        if us is not None:
            moved = rows * length * TOKEN_BYTES + 4 * rows * heads * HEAD_DIM
            records.append(row("decode", f"rows {rows} kv {length} heads {heads}", us, bytes_moved=moved, peak=peak))
    # Rows of other lengths than their neighbours: the time of the bytes, and not of the longest row.
    generator = torch.Generator(pool.device).manual_seed(0)
    one_long = torch.full((128,), 512, dtype=torch.int32, device=pool.device)
    one_long[77] = 16384
    ragged = {"127 of 512, one of 16384": one_long}
    for rows, longest in ((32, 8192), (64, 8192), (128, 4096)):
        draw = torch.randint(64, longest, (rows,), generator=generator, device=pool.device, dtype=torch.int32)
        ragged[f"{rows} of 64 to {longest}"] = draw
    for name, lengths in ragged.items():
        us = decode_us(pool, len(lengths), int(lengths.max()), 32, lengths=lengths)
        if us is not None:
            records.append(row("ragged", name, us, bytes_moved=int(lengths.sum()) * TOKEN_BYTES, peak=peak))
    for rows, length in ((32, 1024), (32, 4096), (256, 512)):
        for block_major in (True, False):
            us = decode_us(pool, rows, length, 32, block_major=block_major)
            name = "block-major" if block_major else "contiguous"
            if us is not None:
                moved = rows * length * TOKEN_BYTES
                records.append(row("layout", f"{name} rows {rows} kv {length}", us, bytes_moved=moved, peak=peak))
    return records


def bench_prefill(pool: Tensor, late: Callable[[], bool]) -> list[dict[str, Any]]:
    records = []
    for heads, (seqs, length) in product((32,), ((1, 8192), (4, 2048), (16, 512), (64, 128))):
        if late():
            break
        cache = Cache(pool, seqs, length)
        query = torch.randn(seqs * length, heads, HEAD_DIM, dtype=pool.dtype, device=pool.device)
        query_start = torch.arange(seqs + 1, dtype=torch.int32, device=pool.device) * length
        position = torch.arange(length, dtype=torch.int32, device=pool.device).repeat(seqs)

        def one(k_cache: Tensor, v_cache: Tensor) -> Tensor:
            return kernels.paged_prefill(
                query, k_cache, v_cache, cache.block_table, cache.rows, query_start, position,  # noqa: B023
                scaling=HEAD_DIM**-0.5, max_query_len=length,  # noqa: B023
            )  # fmt: skip

        us = measure(cache.launches(0, 1, one), replays=3)
        flop = 2 * heads * HEAD_DIM * seqs * length * (length + 1)
        records.append(row("prefill", f"{seqs} x {length} heads {heads}", us, flop=flop))
    return records


def bench_write(pool: Tensor, peak: float) -> list[dict[str, Any]]:
    records = []
    for tokens in (32, 256, 1024, 8192):
        cache = Cache(pool, tokens, BLOCK_SIZE)
        key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, dtype=pool.dtype, device=pool.device)
        position = torch.randint(0, BLOCK_SIZE, (tokens,), dtype=torch.int32, device=pool.device)

        def one(k_cache: Tensor, v_cache: Tensor) -> None:
            kernels.write_kv(key, value, k_cache, v_cache, cache.block_table, cache.rows, position)  # noqa: B023

        us = measure(cache.launches(4 * L2_BYTES, tokens * TOKEN_BYTES, one))
        records.append(row("write_kv", f"tokens {tokens}", us, bytes_moved=2 * tokens * TOKEN_BYTES, peak=peak))
    return records


def bench_sample(pool: Tensor, peak: float, late: Callable[[], bool], *, tune: bool = False) -> list[dict[str, Any]]:
    from rollout.engine.kernels.sampling import sample

    records = []
    choices: list[dict[str, Any]] = [{}]
    if tune:
        sizes = ((1024, 2), (2048, 2), (4096, 4), (4096, 8), (8192, 8))
        choices += [{"block": block, "warps": warps} for block, warps in sizes]
    vocabs = (151_936,) if tune else (128_256, 151_936)
    for rows, vocab, choice in product((1, 32, 256) if tune else (1, 32, 256, 1024), vocabs, choices):
        if late():
            break
        size = rows * vocab
        count = max(2, min(32, -(-4 * L2_BYTES // (2 * size))))
        key0, key1, position = torch.randint(0, 2**31 - 1, (3, rows), dtype=torch.int32, device=pool.device)
        heat = torch.ones(rows, device=pool.device)
        launches: list[Launch] = []
        for nth in range(count):
            logits = pool[nth * size : (nth + 1) * size].view(rows, vocab)
            launches.append(partial(sample, logits, key0, key1, position, heat, **choice))
        us = measure(launches)
        name = " ".join(f"{key} {value}" for key, value in choice.items())
        records.append(row("sample", f"rows {rows} vocab {vocab} {name}".rstrip(), us, bytes_moved=2 * size, peak=peak))
    return records


def tune_decode(pool: Tensor, peak: float, late: Callable[[], bool]) -> list[dict[str, Any]]:
    """Each shape under the chosen tiles and shares, and beside them under others."""
    device = pool.device
    sms = tuning.sm_count(device)
    # the engine's own first: 8B at 32 rows, 1.7B at 256
    shapes = [(32, 1024, 32), (256, 640, 16), (1, 1024, 32), (1, 16384, 32), (8, 1024, 32), (64, 1024, 32)]
    shapes += [(32, 512, 32), (32, 4096, 32), (8, 4096, 32), (1, 512, 16), (64, 640, 16), (256, 1024, 32)]
    shares: list[dict[str, Any]] = [{}]
    shares += [{"programs": at_once * sms} for at_once in (1, 2, 3, 4)]
    shares += [{"least_tokens": tokens} for tokens in (32, 128, 256)]
    tiles = [tuning.Tiles(16, 64, 2, 3, 3), tuning.Tiles(16, 64, 4, 3, 2), tuning.Tiles(16, 32, 2, 4, 3)]
    tries = [(shape, shares) for shape in shapes] + [(shape, [{"tiles": one}]) for one in tiles for shape in shapes[:8]]
    records = []
    for (rows, length, heads), choices in tries:
        for choice in choices:
            us = None if late() else decode_us(pool, rows, length, heads, **choice)
            if us is not None:
                name = " ".join(f"{key} {value if key != 'tiles' else tuple(value)}" for key, value in choice.items())
                shape = f"rows {rows} kv {length} heads {heads} {name or 'default'}"
                records.append(row("tune", shape, us, bytes_moved=rows * length * TOKEN_BYTES, peak=peak))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the engine's kernels on a CUDA device.")
    parser.add_argument(
        "--tune", action="store_true", help="instead, the tiles, pieces and blocks of decode and sampler"
    )
    parser.add_argument("--pool-gb", type=float, default=36.0, help="memory for the caches, in GB (default: 36)")
    parser.add_argument("--seconds", type=float, help="start nothing new after this (default: 100; --tune: 45)")
    args = parser.parse_args()
    seconds = args.seconds or (45.0 if args.tune else 100.0)
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels.py needs a CUDA device")
    began = time.monotonic()

    def late() -> bool:
        return time.monotonic() - began > seconds

    torch.manual_seed(0)
    free = torch.cuda.mem_get_info()[0]
    pool = torch.empty(int(min(args.pool_gb * 1e9, 0.8 * free)) // 2, dtype=torch.bfloat16, device="cuda").normal_()
    peak = copy_bandwidth(pool)
    print(f"{torch.cuda.get_device_name()}: copy {peak / 1e9:.0f} GB/s", flush=True)
    if args.tune:
        records = bench_sample(pool, peak, late, tune=True) + tune_decode(pool, peak, late)
    else:
        records = bench_sample(pool, peak, late) + bench_write(pool, peak) + bench_prefill(pool, late)
        records += bench_decode(pool, peak, late)
    summary = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_s": round(peak / 1e9, 1),
        "seconds": round(time.monotonic() - began, 1),
        "cut_short": late(),
        "results": records,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
