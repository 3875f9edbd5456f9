"""Triton: the fused decoder's products for up to 64 tokens, which stream weights through shared memory.

They are kernels of `kernels.early`. What a library's product of so few tokens loses isn't so much the memory's speed as
the time of a launch, of the way to the first tile and of the last sums. The programs of these are in place when their
input is ready, but ask for nothing sooner: fetching weights to the L2 cache before the wait helped some products a
little, and others not. SiLU and multiply, elsewhere a kernel of their own, are done by the product.

Where outputs are few, the inner dimension is cut into parts, and the kernel after the product adds their sums up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning
from rollout.engine.kernels.early import launch_next, wait
from rollout.engine.kernels.pointwise import silu_times


@triton.jit(do_not_specialize=["tokens"])
def _streamed_kernel(
    x,  # [tokens, INPUTS]
    weight,  # [OUTPUTS, INPUTS]; with GATED [2 * OUTPUTS, INPUTS], gate and up
    out,  # [parts, tokens, OUTPUTS]
    tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,  # padded
    WHOLE: tl.constexpr,  # whether nothing is padding
    ROWS: tl.constexpr,  # of the weight, a program; with GATED, half of them of gate and half of up
    DEPTH: tl.constexpr,  # inner positions a program
    STEP: tl.constexpr,  # inner positions a tile; divides DEPTH
    STAGES: tl.constexpr,  # tiles in flight
):
    launch_next()
    HALF: tl.constexpr = ROWS // 2
    line = tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    k = tl.program_id(1) * DEPTH + tl.arange(0, STEP)
    if GATED:  # a line beyond the last is the last once more
        row = tl.minimum(tl.program_id(0) * HALF + line % HALF, OUTPUTS - 1) + line // HALF * OUTPUTS
    else:
        row = tl.minimum(tl.program_id(0) * ROWS + line, OUTPUTS - 1)
    weights = weight + row[:, None] * INPUTS + k[None, :]
    inputs = x + token[:, None] * INPUTS + k[None, :]
    wait()
    y = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        w = tl.load(weights + start, eviction_policy="evict_first")
        if WHOLE:
            h = tl.load(inputs + start)
        else:
            h = tl.load(inputs + start, mask=(token < tokens)[:, None], other=0.0)
        y = tl.dot(w, tl.trans(h), y, input_precision="ieee")
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, HALF, TOKENS]), [1, 2, 0]))
        y = silu_times(gate, up, x.dtype.element_ty)
        output = tl.program_id(0) * HALF + tl.arange(0, HALF)
    else:
        output = tl.program_id(0) * ROWS + line
    place = (tl.program_id(1) * tokens + token)[:, None] * OUTPUTS + output[None, :]
    mask = (token < tokens)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out + place, tl.trans(y.to(out.dtype.element_ty)), mask=mask)


def linear(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T, [tokens, outputs].

    `gated`: the weight is gate and up behind one another; the result is silu(gate) * up, of half of the outputs.
    """
    out = torch.empty((1, x.shape[0], weight.shape[0] // (2 if gated else 1)), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, gated=gated)
    return out[0]


def partial_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T as partial sums, [splits, tokens, outputs]."""
    tokens, inputs = x.shape
    shape = (tuning.streamed_splits(inputs), tokens, weight.shape[0])
    out = torch.empty(shape, dtype=tuning.part_dtype(x.dtype), device=x.device)
    _launch(x, weight, out)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, *, gated: bool = False) -> None:
    tokens, inputs = x.shape
    splits, _, outputs = out.shape
    assert x.is_contiguous() and weight.is_contiguous() and weight.numel() < 2**31
    padded, depth = max(16, triton.next_power_of_2(tokens)), inputs // splits
    rows = tuning.streamed_rows(gated=gated)
    programs = triton.cdiv(outputs, rows // 2 if gated else rows)
    alone = not gated and programs * splits <= tuning.sm_count(x.device)
    step, stages = tuning.streamed_tiles(
        (rows + padded) * x.element_size(), depth, alone=alone, shared=tuning.shared_bytes(x.device)
    )
    _streamed_kernel[(programs, splits)](
        x,
        weight,
        out,
        tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GATED=gated,
        TOKENS=padded,
        WHOLE=tokens == padded,
        ROWS=rows,
        DEPTH=depth,
        STEP=step,
        STAGES=stages,
        num_warps=4,
        launch_pdl=x.is_cuda,
    )
