"""Triton: the fused decoder's products for few tokens, in programs that load all their weights before they wait.

They are kernels of `kernels.early`: a kernel's weights are on their way, and mostly there, when its input is. SiLU and
multiply, elsewhere a kernel of their own, are done by the product.

Weights go from memory straight into the registers that the tensor cores want them in. The order of a sum doesn't
matter, so inner positions are taken in the order in which 16 bytes a thread, as they are loaded, are that thread's part
of the operand, and the tokens' inputs are put in the same order: nothing moves between threads but the result.

Of an operand a thread holds parts of two rows, r and r + 8. With ALONE, which is for very few tokens, 16 bytes are
both: one weight row at two sets of inner positions. Then nothing moves between registers either. Each token is two
columns, of the inputs of either set, and of what rows and columns give, only that of the same set counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.early import launch_next, pause, wait
from rollout.engine.kernels.pointwise import silu_times


@triton.jit
def _inner(PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """Inner positions of this program, [1, PARTS, STEPS, 32]: each part is a warp's to sum over, in steps of 32."""
    part = tl.arange(0, PARTS)[None, :, None, None] * (DEPTH // PARTS)
    step = tl.arange(0, DEPTH // PARTS // 32)[None, None, :, None] * 32
    return tl.program_id(1) * DEPTH + part + step + tl.arange(0, 32)[None, None, None, :]


@triton.jit
def _left(weights, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """[8, PARTS, STEPS, 2, 32] as a product's left operand, [PARTS, 16, DEPTH / PARTS]."""
    split = tl.reshape(weights, [8, PARTS, DEPTH // PARTS // 32, 2, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, [1, 3, 0, 2, 5, 6, 4, 7]), [PARTS, 16, DEPTH // PARTS])


@triton.jit
def _right(inputs, TOKENS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """[TOKENS, PARTS, STEPS, 32] as a product's right operand, [PARTS, DEPTH / PARTS, TOKENS], in `_left`'s order."""
    split = tl.reshape(inputs, [TOKENS, PARTS, DEPTH // PARTS // 32, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, [1, 2, 4, 5, 3, 6, 0]), [PARTS, DEPTH // PARTS, TOKENS])


@triton.jit
def _left_alone(weights, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """`_left` with ALONE, [PARTS, 32, DEPTH / PARTS / 2]."""
    split = tl.reshape(weights, [8, PARTS, DEPTH // PARTS // 32, 2, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, [1, 3, 6, 0, 2, 5, 4, 7]), [PARTS, 32, DEPTH // PARTS // 2])


@triton.jit
def _right_alone(inputs, TOKENS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """`_right` with ALONE, [PARTS, DEPTH / PARTS / 2, 2 * TOKENS]."""
    split = tl.reshape(inputs, [TOKENS, PARTS, DEPTH // PARTS // 32, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, [1, 2, 4, 3, 6, 0, 5]), [PARTS, DEPTH // PARTS // 2, 2 * TOKENS])


@triton.jit
def products_alone(w, h, TOKENS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """A product by each warp, with ALONE: [PARTS, 2, 8, TOKENS]."""
    y = tl.dot(_left_alone(w, PARTS, DEPTH), _right_alone(h, TOKENS, PARTS, DEPTH), input_precision="ieee")
    y = tl.reshape(y, [PARTS, 2, 2, 8, TOKENS, 2])  # part, half, the row's set, row, token, the column's set
    own_set = tl.arange(0, 2)[None, None, :, None, None, None] == tl.arange(0, 2)[None, None, None, None, None, :]
    return tl.sum(tl.sum(tl.where(own_set, y, 0.0), 5), 2)


@triton.jit
def _product(w, h, ALONE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr):
    """A tile's outputs, [16, TOKENS]."""
    if ALONE:
        return tl.reshape(tl.sum(products_alone(w, h, TOKENS, PARTS, DEPTH), 0), [16, TOKENS])
    else:
        y = tl.dot(_left(w, PARTS, DEPTH), _right(h, TOKENS, PARTS, DEPTH), input_precision="ieee")
        return tl.sum(y, 0)


@triton.jit
def load_tiles(weight, tile, k, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr):
    """A tile's sixteen rows of a weight, as twice eight: with GATED, eight of gate and the same eight of up.

    `k`: inner positions, [1, PARTS, STEPS, 32]. `tile`: a number, or one for each part, [1, PARTS, 1, 1, 1].
    """
    row = tile * (8 if GATED else 16) + tl.arange(0, 8)[:, None, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None] * (OUTPUTS if GATED else 8)
    k = k[:, :, :, None, :]
    real = (row < (OUTPUTS if GATED else OUTPUTS - half)) & (k < INPUTS)
    return tl.load(weight + (row + half) * INPUTS + k, mask=real, other=0.0, eviction_policy="evict_first")


@triton.jit
def _store(y, out, tile, tokens, dtype: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr):
    """Writes a tile's outputs, [16, TOKENS]."""
    token = tl.arange(0, TOKENS)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, 8, TOKENS]), [1, 2, 0]))
        y = silu_times(gate, up, dtype)
        output = tile * 8 + tl.arange(0, 8)
    else:
        output = tile * 16 + tl.arange(0, 16)
    place = (tl.program_id(1) * tokens + token)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & (token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens", "turn_ns"])
def _few_kernel(
    x,  # [tokens, INPUTS]
    weight,  # [OUTPUTS, INPUTS]; with GATED [2 * OUTPUTS, INPUTS], gate and up
    out,  # [parts, tokens, OUTPUTS]
    tokens,
    turn_ns,  # how much later than the one before it each program of a multiprocessor begins
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    ALONE: tl.constexpr,
    TOKENS: tl.constexpr,  # padded
    PARTS: tl.constexpr,  # warps
    DEPTH: tl.constexpr,  # inputs that a program takes: a power of two
    ROUNDS: tl.constexpr,  # tiles that a program takes, one after the other
    TURN: tl.constexpr,  # multiprocessors if programs begin in turns, or 0
):
    k = _inner(PARTS, DEPTH)
    token = tl.arange(0, TOKENS)
    seen = (token < tokens)[:, None, None, None] & (k < INPUTS)
    tile = tl.program_id(0)
    if TURN > 0:
        pause((tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)) // TURN * turn_ns)
    w = load_tiles(weight, tile, k, INPUTS, OUTPUTS, GATED)
    launch_next()  # behind the loads, which are not to queue behind the next kernel's
    wait()
    for nth in tl.static_range(ROUNDS):
        h = tl.load(x + token[:, None, None, None] * INPUTS + k, mask=seen, other=0.0)
        y = _product(w, h, ALONE, TOKENS, PARTS, DEPTH)
        if nth < ROUNDS - 1:  # the next weights are on their way before these have been made use of
            w = load_tiles(weight, tile + tl.num_programs(0), k, INPUTS, OUTPUTS, GATED)
        _store(y, out, tile, tokens, x.dtype.element_ty, OUTPUTS, GATED, TOKENS)
        tile += tl.num_programs(0)


def linear(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T, [tokens, outputs].

    `gated`: the weight is gate and up behind one another; the result is silu(gate) * up, of half of the outputs.
    """
    tokens, inputs = x.shape
    out = torch.empty((tokens, weight.shape[0] // (2 if gated else 1)), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, depth=_depth(inputs), gated=gated)
    return out


def partial_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T as float32 partial sums, [splits, tokens, outputs]."""
    tokens, inputs = x.shape
    depth = min(tuning.FEW_DEPTH, _depth(inputs))
    splits = triton.cdiv(inputs, depth)
    out = torch.empty((splits, tokens, weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, depth=depth)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, *, depth: int, gated: bool = False) -> None:
    tokens, inputs = x.shape
    outputs = out.shape[-1]
    assert x.is_contiguous() and weight.is_contiguous()
    alone, sm_count = tokens <= tuning.ALONE_TOKENS, tuning.sm_count(x.device)
    tiles, splits = triton.cdiv(outputs, 8 if gated else 16), triton.cdiv(inputs, depth)
    warps = tuning.few_warps(tokens, tiles * splits, depth, sm_count)
    rounds = tuning.few_rounds(tiles * splits, sm_count)
    grid = (triton.cdiv(tiles, rounds), splits)
    tile_bytes = 16 * min(depth, inputs) * weight.element_size()
    turn_ns = tuning.few_turn_ns(tokens, grid[0] * grid[1], rounds, tile_bytes, x.device, gated=gated)
    _few_kernel[grid](
        x,
        weight,
        out,
        tokens,
        turn_ns,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GATED=gated,
        ALONE=alone,
        TOKENS=triton.next_power_of_2(tokens) if alone else max(8, triton.next_power_of_2(tokens)),
        PARTS=warps,
        DEPTH=depth,
        ROUNDS=rounds,
        TURN=sm_count if turn_ns > 0 else 0,
        num_warps=warps,
        maxnreg=tuning.FEW_REGISTERS,
        launch_pdl=x.is_cuda,
    )


def _depth(inputs: int) -> int:
    """All inner positions, as a program takes them: each warp at least 32 of them."""
    return max(128, triton.next_power_of_2(inputs))
