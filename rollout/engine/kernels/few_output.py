"""Triton: the output product of a decode step of one row, in programs that join the pieces of its attention.

Owns what `kernels.few_attention` leaves of one row for this product. To have the last program of attention join a row's
pieces takes a count and two more ways to memory before the product may begin. Here each program takes a few heads'
inputs of many outputs, so that it needs the pieces of these heads alone: it asks for all of them at once, joins them,
and multiplies. Its weights are in registers by then, as in `kernels.few_products`.

Nothing but the joined heads moves between warps. Each warp joins its own part of the inputs, of which a thread holds
four, and of every fourth piece; each needs all the weights of pieces, and so each works them out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.early import launch_next, wait
from rollout.engine.kernels.few_products import load_tiles, products_alone


class Pieces(NamedTuple):
    """What programs have of the only row, each of its own share."""

    values: Tensor  # float32 [shares, heads, head dim], each weighted by the softmax over its share
    lse: Tensor  # float32 [heads, at least shares], log2 of the sums of exp2 of scores
    cuts: Tensor  # that made the shares, see `shares.decode_cuts`


def empty_pieces(heads: int, head_dim: int, cuts: Tensor) -> Pieces:
    """Where pieces are left."""
    shares = cuts.shape[0]
    values = torch.empty((shares, heads, head_dim), device=cuts.device)
    # Padded so that a load is of 16 bytes: only then has a warp all scores of a head, and finds the highest alone.
    return Pieces(values, torch.empty((heads, triton.cdiv(shares, 16) * 16), device=cuts.device), cuts)


@triton.jit
def leave(
    result,  # float32 [some query heads, PADDED_DIM]
    lse,  # float32 [query heads]
    share,
    head,  # [query heads]
    head_mask,
    piece_values,  # as `Pieces` has them
    piece_lse,
    lse_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Leaves a share's piece."""
    dim = tl.arange(0, PADDED_DIM)
    place = (share * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(piece_values + place, result, mask=head_mask[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(piece_lse + head * lse_stride + share, lse, mask=head_mask)


@triton.jit
def _output_kernel(
    piece_values,  # as `Pieces` has them
    piece_lse,
    lse_stride,
    cuts,
    weight,  # [OUTPUTS, INPUTS]
    out,  # float32 [INPUTS / DEPTH, OUTPUTS]
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WARPS: tl.constexpr,  # each of which takes sixteen outputs
    DEPTH: tl.constexpr,  # inputs that a program takes, of whole heads
    PIECES: tl.constexpr,  # padded
):
    # A program's weights, [8, WARPS, STEPS, 2, 32], lie in its threads as those of `few_products` do.
    STEPS: tl.constexpr = DEPTH // 32
    begin = tl.program_id(1) * DEPTH
    inner = begin + tl.arange(0, STEPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tile = (tl.program_id(0) * WARPS + tl.arange(0, WARPS))[None, :, None, None, None]
    w = load_tiles(weight, tile, inner[None, None], INPUTS, OUTPUTS, False)
    pieces = tl.load(cuts + 6)
    launch_next()  # behind the loads, which are not to queue behind the next kernel's

    # A program's pieces, [LANES, WARPS, PIECES / LANES, WIDTH]: warps side by side, threads of a warp four inputs each.
    HEADS: tl.constexpr = DEPTH // HEAD_DIM
    WIDTH: tl.constexpr = DEPTH // WARPS
    LANES: tl.constexpr = 32 * 4 // WIDTH
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    seen = (head < INPUTS // HEAD_DIM)[:, None] & (tl.arange(0, PIECES) < pieces)[None, :]
    piece = tl.arange(0, LANES)[:, None, None, None] + tl.arange(0, PIECES // LANES)[:, None] * LANES
    place = begin + tl.arange(0, WARPS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)
    part_mask = (piece < pieces) & (place < INPUTS)[None]
    # NOTE: .cg goes past the L1 cache, which may hold lines from before the other programs wrote.
    wait()
    where = head[:, None] * lse_stride + tl.arange(0, PIECES)[None, :]
    lse = tl.load(piece_lse + where, mask=seen, other=float("-inf"), cache_modifier=".cg")
    part = tl.load(piece_values + piece * INPUTS + place[None], mask=part_mask, other=0.0, cache_modifier=".cg")

    weights = tl.where(seen, tl.exp2(lse - tl.max(lse, 1)[:, None]), 0.0)  # [HEADS, PIECES]
    total = tl.sum(weights, 1)
    weights = weights / tl.where(total > 0.0, total, 1.0)[:, None]  # 0 where there is no head
    weights = tl.permute(tl.reshape(weights, [HEADS, PIECES // LANES, LANES]), [2, 0, 1])[:, :, None, :]
    weights = tl.broadcast_to(weights, [LANES, HEADS, WARPS // HEADS, PIECES // LANES])
    weights = tl.reshape(weights, [LANES, WARPS, PIECES // LANES, 1])
    h = tl.sum(tl.sum(part * weights, 2), 0)  # [WARPS, WIDTH]

    h = tl.broadcast_to(tl.reshape(h.to(w.dtype), [1, 1, STEPS, 32]), [1, WARPS, STEPS, 32])
    y = tl.reshape(products_alone(w, h, 1, WARPS, WARPS * DEPTH), [WARPS * 16])
    at = tl.program_id(0) * WARPS * 16 + tl.arange(0, WARPS * 16)
    tl.store(out + tl.program_id(1) * OUTPUTS + at, y, mask=at < OUTPUTS)


def join_linear(pieces: Pieces, weight: Tensor) -> Tensor:
    """What a row attended to, joined, @ weight [outputs, inputs].T: float32 partial sums, [splits, 1, outputs]."""
    shares, heads, head_dim = pieces.values.shape
    outputs, inputs = weight.shape
    depth, warps = tuning.OUTPUT_DEPTH, tuning.OUTPUT_WARPS
    assert weight.is_contiguous() and inputs == heads * head_dim
    assert tuning.joins_in_product(1, shares, head_dim)
    splits = triton.cdiv(inputs, depth)
    out = torch.empty((splits, 1, outputs), dtype=torch.float32, device=weight.device)
    _output_kernel[(triton.cdiv(outputs, warps * 16), splits)](
        pieces.values,
        pieces.lse,
        pieces.lse.stride(0),
        pieces.cuts,
        weight,
        out,
        INPUTS=inputs,
        OUTPUTS=outputs,
        HEAD_DIM=head_dim,
        WARPS=warps,
        DEPTH=depth,
        PIECES=max(16, triton.next_power_of_2(shares)),
        num_warps=warps,
        maxnreg=tuning.FEW_REGISTERS,
        launch_pdl=weight.is_cuda,
    )
    return out
