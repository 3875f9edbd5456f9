"""Triton: draw a token a row and take its logprob, in one pass over the logits.

Owns the unfiltered sampler, in kernels of `kernels.early`. Programs share a row's vocabulary; each keeps the maximum
and the sum that a log-softmax needs and its best noisy logit; a second small kernel joins them, and looks for the token
in the one chunk that won. The noise is `reference.gumbel_noise`, bit for bit up to the rounding of its logarithms.

At hundreds of rows the pass is bound by arithmetic, not by memory: hence the cheap logarithms, all to base 2, and no
token ids in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.constants import INTERPRETED, LOG2_E
from rollout.engine.kernels.early import launch_next, wait


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log2(x):
    """The hardware's logarithm, good to 22 bits. tl.log2 is good to the last, in ten times as many instructions."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _exponential2(first, second, ids):
    """Exponential variates of vocabulary ids over log(2), for a row's two words."""
    x = (ids.to(tl.uint32, bitcast=True) ^ first) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ second) * 0x846CA68B
    x = (x ^ (x >> 15)) * 0x9E3779B1
    u = x.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    # -log2(1 - u): a series where 1 - u would round u away, and it is small u that make the largest noise
    series = u * (1.4426950408889634 + u * (0.7213475204444817 + u * 0.4808983469629878))
    return tl.where(u < 0.015625, series, tl.abs(_log2(1.0 - u)))


@triton.jit
def _noisy(x, base, scale, heat, row, key0, key1, position, ids):
    """Logits over temperature plus Gumbel noise, over log(2) and relative to the base. Greedy: the logits."""
    noisy = x
    if heat > 0.0:
        counter = tl.load(position + row).to(tl.uint32, bitcast=True) + 0x9E3779B9
        first = _mix32(tl.load(key0 + row).to(tl.uint32, bitcast=True) ^ _mix32(counter))
        second = _mix32(tl.load(key1 + row).to(tl.uint32, bitcast=True) + first)
        noisy = (x - base) * scale - _log2(_exponential2(first, second, ids))
    return noisy


@triton.jit
def _sample_kernel(
    logits,  # [rows, vocab]
    key0,
    key1,
    position,
    temperature,
    maxima,  # float32 [rows, chunks], of the logits
    sums,  # float32 [rows, chunks], of exp((x - maximum) / temperature)
    bests,  # float32 [rows, chunks], noisy and relative to the maximum, or the maximum itself where greedy
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        launch_next()
        wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    scale = LOG2_E / tl.where(heat > 0.0, heat, 1.0)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    # A NaN makes the sum NaN, and so does +inf; a chunk that is -inf throughout must not.
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp2((x - base) * scale), 0)
    best = tl.max(_noisy(x, base, scale, heat, row, key0, key1, position, ids), 0)
    place = row * tl.num_programs(0) + chunk
    tl.store(maxima + place, maximum)
    tl.store(sums + place, total)
    tl.store(bests + place, best)


@triton.jit
def _join_kernel(
    logits,
    key0,
    key1,
    position,
    temperature,
    maxima,
    sums,
    bests,
    token,  # int32 [rows]
    logprob,  # float32 [rows]
    row_stride,
    vocab,
    chunks,
    BLOCK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        wait()
    row = tl.program_id(0)
    lane = tl.arange(0, PADDED_CHUNKS)
    place = row * chunks + lane
    mask = lane < chunks
    maximum_of = tl.load(maxima + place, mask=mask, other=float("-inf"))
    sum_of = tl.load(sums + place, mask=mask, other=0.0)
    best_of = tl.load(bests + place, mask=mask, other=float("-inf"))
    heat = tl.load(temperature + row)
    divisor = tl.where(heat > 0.0, heat, 1.0)
    scale = LOG2_E / divisor
    maximum = tl.max(maximum_of, 0)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    above = (maximum_of - base) * scale
    total = tl.sum(sum_of * tl.exp2(above), 0)
    best_of = tl.where(heat > 0.0, best_of + above, best_of)
    # NOTE: an all-NaN row has no best chunk, and no best id; neither may be followed out of the row.
    chunk = tl.min(tl.where(best_of == tl.max(best_of, 0), lane, 2147483647), 0)
    ids = tl.minimum(chunk, chunks - 1) * BLOCK + tl.arange(0, BLOCK)
    start = logits + row.to(tl.int64) * row_stride
    x = tl.load(start + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    noisy = _noisy(x, base, scale, heat, row, key0, key1, position, ids)
    chosen = tl.minimum(tl.min(tl.where(noisy == tl.max(noisy, 0), ids, 2147483647), 0), vocab - 1)
    result = (tl.load(start + chosen).to(tl.float32) - base) / divisor - tl.log(total)
    tl.store(logprob + row, result)
    tl.store(token + row, tl.where(result == result, chosen, 0))


def sample(
    logits: Tensor,
    key0: Tensor,
    key1: Tensor,
    position: Tensor,
    temperature: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    block: int | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token a row, with its logprob under the full distribution. See `reference.sample`.

    `out` is where to write them: int32 and float32 [rows], contiguous. `block` (vocabulary ids a program takes) and
    `warps` stand in for the choices of `tuning`, for measurements.
    """
    rows, vocab = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty_like(position), torch.empty(rows, dtype=torch.float32, device=device)
    token, logprob = out
    if rows == 0:
        return out
    assert logits.stride(1) == token.stride(0) == logprob.stride(0) == 1
    block = block or tuning.sample_block(rows, vocab, tuning.sm_count(device))
    warps = warps or max(1, block // 1024)
    chunks = triton.cdiv(vocab, block)
    maxima, sums, bests = torch.empty((3, rows, chunks), dtype=torch.float32, device=device)
    # NOTE: also behind a prefill, outside of graphs. On an H200, decode graphs of one row of 8K or more take 1.3%
    # longer behind one until some early kernel has been launched outside of them. Why isn't known.
    early = tuning.may_start_early(device)
    _sample_kernel[(chunks, rows)](
        logits,
        key0,
        key1,
        position,
        temperature,
        maxima,
        sums,
        bests,
        logits.stride(0),
        vocab,
        BLOCK=block,
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )
    _join_kernel[(rows,)](
        logits,
        key0,
        key1,
        position,
        temperature,
        maxima,
        sums,
        bests,
        token,
        logprob,
        logits.stride(0),
        vocab,
        chunks,
        BLOCK=block,
        PADDED_CHUNKS=triton.next_power_of_2(chunks),
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out
