"""Triton: the fused decoder's products for one or two tokens, in many small programs that load before they wait.

A step of so few tokens is a chain of kernels that each read some weights and wait for the one before. What costs time
is the waiting: a kernel's launch, its first loads, its last stores, with the memory idle meanwhile. Here a program
loads all its weights at once, and *before* it waits: every kernel of the chain is launched while its predecessor still
runs (programmatic dependent launch), so that the next weights are on their way when their input arrives. SiLU and
multiply, elsewhere a kernel of their own, are done by the product. Arithmetic is on the CUDA cores, in float32, which
is enough for `tuning.FEW_TOKENS`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.engine.kernels import tuning


@triton.jit
def _few_kernel(
    x,  # [TOKENS, INPUTS]
    weight,  # [OUTPUTS, INPUTS]; with GATED [2 * OUTPUTS, INPUTS], gate and up
    out,  # [parts, TOKENS, OUTPUTS]
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs that a program takes: a power of two
    EARLY: tl.constexpr,  # whether it is launched before its predecessor has ended
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    mask = (row < OUTPUTS)[:, None] & (k < INPUTS)[None, :]
    cells = row[:, None] * INPUTS + k[None, :]
    w = tl.load(weight + cells, mask=mask, other=0.0, eviction_policy="evict_first")
    v = w
    if GATED:
        v = tl.load(weight + OUTPUTS * INPUTS + cells, mask=mask, other=0.0, eviction_policy="evict_first")
    if EARLY:
        # NOTE: each program of each kernel in the chain waits, so that what any kernel before has read may be written.
        tl.extra.cuda.gdc_wait()
    dtype = x.dtype.element_ty
    for token in tl.static_range(0, TOKENS):
        h = tl.load(x + token * INPUTS + k, mask=k < INPUTS, other=0.0).to(tl.float32)
        y = tl.sum(w.to(tl.float32) * h[None, :], 1)
        if GATED:
            up = tl.sum(v.to(tl.float32) * h[None, :], 1).to(dtype).to(tl.float32)
            gate = y.to(dtype).to(tl.float32)
            y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        place = (tl.program_id(1) * TOKENS + token) * OUTPUTS + row
        tl.store(out + place, y.to(out.dtype.element_ty), mask=row < OUTPUTS)


def _launch(x: Tensor, weight: Tensor, out: Tensor, *, depth: int, gated: bool = False) -> None:
    tokens, inputs = x.shape
    outputs = out.shape[-1]
    assert x.is_contiguous() and weight.is_contiguous()
    rows, warps = tuning.few_tiles(depth, gated)
    _few_kernel[(triton.cdiv(outputs, rows), triton.cdiv(inputs, depth))](
        x,
        weight,
        out,
        TOKENS=tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GATED=gated,
        ROWS=rows,
        DEPTH=depth,
        EARLY=x.is_cuda,
        num_warps=warps,
        launch_pdl=x.is_cuda,
    )


def linear(x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T, [tokens, outputs].

    `gated`: the weight is gate and up behind one another; the result is silu(gate) * up, of half of the outputs.
    """
    tokens, inputs = x.shape
    out = torch.empty((tokens, weight.shape[0] // (2 if gated else 1)), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, depth=triton.next_power_of_2(inputs), gated=gated)
    return out


def partial_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, inputs] @ weight [outputs, inputs].T as float32 partial sums, [splits, tokens, outputs]."""
    tokens, inputs = x.shape
    depth = min(tuning.FEW_DEPTH, triton.next_power_of_2(inputs))
    splits = triton.cdiv(inputs, depth)
    out = torch.empty((splits, tokens, weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, depth=depth)
    return out
