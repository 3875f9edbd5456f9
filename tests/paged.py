"""Paged KV caches with adversarial surroundings, and dense attention to hold paged attention against.

Every cache slot that no row has written is NaN, blocks are shuffled, table entries past a row's end lead to a NaN
block, the layer's cache is a strided view, and the last table row is the scratch row at block 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Paged:
    """A cache that holds `lengths[r]` positions of row r."""

    lengths: list[int]
    kv: Tensor  # [blocks, layers, 2, kv_heads, block_size, head_dim]
    block_table: Tensor  # int32 [rows + 1, blocks_per_row]
    dense: list[Tensor]  # of each row, [2, length, kv_heads, head_dim]

    @property
    def k_cache(self) -> Tensor:
        return self.kv[:, 1, 0]

    @property
    def v_cache(self) -> Tensor:
        return self.kv[:, 1, 1]

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.lengths), dtype=torch.int32, device=self.kv.device)

    @property
    def last(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=self.kv.device) - 1

    def double(self) -> "Paged":
        return Paged(self.lengths, self.kv.double(), self.block_table, [pair.double() for pair in self.dense])


def make(
    lengths: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> Paged:
    """A filled cache, written without the functions under test."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    free = (2 + torch.randperm(sum(needed), generator=generator)).tolist()  # 0: scratch, 1: never written
    kv = torch.full((2 + sum(needed), 2, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    kv[0, :, :, :, 0] = 0.5
    block_table = torch.ones(len(lengths) + 1, max(needed) + 2, dtype=torch.int32)
    block_table[-1] = 0
    dense = []
    for row, length in enumerate(lengths):
        pair = torch.randn(2, length, kv_heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        dense.append(pair.to(device))
        for nth in range(needed[row]):
            block_table[row, nth] = block = free.pop()
            part = pair[:, nth * block_size : (nth + 1) * block_size].transpose(1, 2)
            kv[block, 1, :, :, : part.shape[2]] = part
    return Paged(lengths, kv.to(device), block_table.to(device), dense)


def queries(tokens: int, heads: int, head_dim: int, like: Tensor, *, transposed: bool = False, seed: int = 1) -> Tensor:
    """[tokens, heads, head_dim] of the cache's dtype and device; `transposed`: heads lie outside tokens in memory."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(tokens, heads, head_dim, generator=generator, dtype=torch.float64).to(like.dtype).to(like.device)
    return made.transpose(0, 1).contiguous().transpose(0, 1) if transposed else made


def attend(query: Tensor, pair: Tensor, *, scaling: float, window: int, softcap: float) -> Tensor:
    """One query [heads, head_dim] over all of a row's keys and values [2, length, kv_heads, head_dim], in float64."""
    key, value = pair.double().repeat_interleave(query.shape[0] // pair.shape[2], dim=2)
    if window:
        key, value = key[-window:], value[-window:]
    scores = torch.einsum("hd,lhd->hl", query.double(), key) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), value)
