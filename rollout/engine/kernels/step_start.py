"""Triton: what a decode step does before its model: carry over tokens, enter new blocks, look up the rows' state.

Owns that one launch, which stands for a dozen of PyTorch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "table_stride", "state_stride"])
def _start_decode_kernel(
    token_ids,
    carry,
    previous_tokens,
    token_row,
    position,
    new_block,
    block_table,
    row_state,  # [FIELDS, max rows + 1]
    out,
    state,  # [FIELDS, rows]
    next_position,
    rows,
    table_stride,
    state_stride,
    FIELDS: tl.constexpr,
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
    tl.store(next_position + lane, at + 1, mask=mask)
    for field in tl.static_range(FIELDS):
        tl.store(state + field * rows + lane, tl.load(row_state + field * state_stride + row, mask=mask), mask=mask)


def start_decode(
    token_ids: Tensor,
    carry: Tensor,
    previous_tokens: Tensor,
    token_row: Tensor,
    position: Tensor,
    new_block: Tensor,
    block_table: Tensor,
    row_state: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, the rows' state and sampled tokens' positions; enters new blocks. See `reference.start_decode`."""
    rows, fields = token_ids.shape[0], row_state.shape[0]
    out, next_position = torch.empty_like(token_ids), torch.empty_like(position)
    state = torch.empty((fields, rows), dtype=torch.int32, device=token_ids.device)
    block = 128
    _start_decode_kernel[(triton.cdiv(rows, block),)](
        token_ids,
        carry,
        previous_tokens,
        token_row,
        position,
        new_block,
        block_table,
        row_state,
        out,
        state,
        next_position,
        rows,
        block_table.stride(0),
        row_state.stride(0),
        FIELDS=fields,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=4,
    )
    return out, state, next_position
