"""Triton: draw a token a row and take its logprob, in one pass over the logits.

Owns the unfiltered sampler. Programs share a row's vocabulary; each keeps the maximum and the sum that a log-softmax
needs and its best noisy logit; a second small kernel joins them. The noise is `reference.gumbel_noise`, bit for bit up
to the rounding of its logarithms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(key0, key1, position, ids):
    """Gumbel noise of vocabulary ids, for keys and a position that are scalars."""
    first = _mix32(key0.to(tl.uint32, bitcast=True) ^ _mix32(position.to(tl.uint32, bitcast=True) + 0x9E3779B9))
    second = _mix32(key1.to(tl.uint32, bitcast=True) + first)
    bits = _mix32(_mix32(ids.to(tl.uint32, bitcast=True) ^ first) + second)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # -log1p(-u): a series where 1 - u would round u away, and it is small u that make the largest noise
    series = u * (1.0 + u * (0.5 + u * (0.3333333333 + u * 0.25)))
    return -tl.log(tl.where(u < 0.03125, series, -tl.log(1.0 - u)))


@triton.jit
def _sample_kernel(
    logits,  # [rows, vocab]
    key0,
    key1,
    position,
    temperature,
    maxima,  # float32 [rows, chunks]
    sums,  # float32 [rows, chunks], of exp(x - maximum)
    bests,  # float32 [rows, chunks], noisy
    best_ids,  # int32 [rows, chunks]
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    scale = 1.0 / tl.where(heat > 0.0, heat, 1.0)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < vocab, other=float("-inf"))
    x = x.to(tl.float32) * scale
    maximum = tl.max(x, 0)
    # A NaN makes the sum NaN, and so does +inf; a chunk that is -inf throughout must not.
    total = tl.sum(tl.exp(x - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
    if heat > 0.0:
        x = x + _gumbel(tl.load(key0 + row), tl.load(key1 + row), tl.load(position + row), ids)
    best = tl.max(x, 0)
    best_id = tl.min(tl.where(x == best, ids, 2147483647), 0)
    place = row * tl.num_programs(0) + chunk
    tl.store(maxima + place, maximum)
    tl.store(sums + place, total)
    tl.store(bests + place, best)
    tl.store(best_ids + place, best_id)


@triton.jit
def _join_kernel(
    logits,
    temperature,
    maxima,
    sums,
    bests,
    best_ids,
    token,  # int32 [rows]
    logprob,  # float32 [rows]
    row_stride,
    vocab,
    chunks,
    PADDED_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, PADDED_CHUNKS)
    place = row * chunks + lane
    mask = lane < chunks
    maximum_of = tl.load(maxima + place, mask=mask, other=float("-inf"))
    sum_of = tl.load(sums + place, mask=mask, other=0.0)
    best_of = tl.load(bests + place, mask=mask, other=float("-inf"))
    id_of = tl.load(best_ids + place, mask=mask, other=2147483647)
    maximum = tl.max(maximum_of, 0)
    total = tl.sum(sum_of * tl.exp(maximum_of - tl.where(maximum == float("-inf"), 0.0, maximum)), 0)
    chosen = tl.min(tl.where(best_of == tl.max(best_of, 0), id_of, 2147483647), 0)
    chosen = tl.minimum(chosen, vocab - 1)  # an all-NaN row has no best id; it must not be followed out of the row
    heat = tl.load(temperature + row)
    scale = 1.0 / tl.where(heat > 0.0, heat, 1.0)
    x = tl.load(logits + row.to(tl.int64) * row_stride + chosen).to(tl.float32) * scale
    result = x - maximum - tl.log(total)
    tl.store(logprob + row, result)
    tl.store(token + row, tl.where(result == result, chosen, 0))


def sample(logits: Tensor, key0: Tensor, key1: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token a row, with its logprob under the full distribution. See `reference.sample`."""
    rows, vocab = logits.shape
    device = logits.device
    token = torch.empty(rows, dtype=torch.int32, device=device)
    logprob = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return token, logprob
    assert logits.stride(1) == 1
    block = tuning.sample_block(rows, vocab, tuning.sm_count(device))
    chunks = triton.cdiv(vocab, block)
    maxima, sums, bests = torch.empty((3, rows, chunks), dtype=torch.float32, device=device)
    best_ids = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    _sample_kernel[(chunks, rows)](
        logits,
        key0,
        key1,
        position,
        temperature,
        maxima,
        sums,
        bests,
        best_ids,
        logits.stride(0),
        vocab,
        BLOCK=block,
        num_warps=max(1, block // 512),
    )
    _join_kernel[(rows,)](
        logits,
        temperature,
        maxima,
        sums,
        bests,
        best_ids,
        token,
        logprob,
        logits.stride(0),
        vocab,
        chunks,
        PADDED_CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1,
    )
    return token, logprob
