"""Triton: what a decode step does before its model: carry over tokens, and enter new blocks in the block table.

Owns that one launch, which stands for a dozen of PyTorch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _start_decode_kernel(
    token_ids,
    carry,
    previous_tokens,
    token_row,
    position,
    new_block,
    block_table,
    out,
    rows,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < rows
    source = tl.load(carry + lane, mask=mask, other=-1)
    carried = tl.load(previous_tokens + source, mask=mask & (source >= 0), other=0)
    tl.store(out + lane, tl.load(token_ids + lane, mask=mask, other=0) + carried, mask=mask)
    block = tl.load(new_block + lane, mask=mask, other=-1)
    row = tl.load(token_row + lane, mask=mask, other=0).to(tl.int64)
    at = tl.load(position + lane, mask=mask, other=0)
    tl.store(block_table + row * table_stride + at // BLOCK_SIZE, block, mask=mask & (block >= 0))


def start_decode(
    token_ids: Tensor,
    carry: Tensor,
    previous_tokens: Tensor,
    token_row: Tensor,
    position: Tensor,
    new_block: Tensor,
    block_table: Tensor,
    block_size: int,
) -> Tensor:
    """Input ids, int32 [rows]; `block_table` gets its new blocks. See `reference.start_decode`."""
    rows = token_ids.shape[0]
    out = torch.empty_like(token_ids)
    block = 128
    _start_decode_kernel[(triton.cdiv(rows, block),)](
        token_ids,
        carry,
        previous_tokens,
        token_row,
        position,
        new_block,
        block_table,
        out,
        rows,
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )
    return out
