"""Owns how tensors lie in the buckets of a broadcast: which rows of which tensor, at which byte. It moves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rollout.weights.manifest import Spec

_ALIGNMENT = 16  # where a piece may begin, so that its bytes can be seen as any dtype
HEADER_BYTES = _ALIGNMENT
"""A bucket's first bytes, of which the first says whether the sender's reading broke off."""


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor, and where they lie in a bucket."""

    name: str
    first_row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # byte in the bucket
    whole: bool

    @property
    def end(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def within(self, bucket: Tensor) -> Tensor:
        return bucket[self.start : self.end].view(self.dtype).view(self.shape)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.whole else tensor[self.first_row : self.first_row + self.shape[0]]


@dataclass(frozen=True)
class Plan:
    """How the tensors lie in buckets. Every rank makes the same one."""

    buckets: list[list[Piece]]
    device: torch.device

    @property
    def bytes(self) -> int:
        return sum(piece.end - piece.start for pieces in self.buckets for piece in pieces)

    @property
    def bucket_bytes(self) -> int:
        return max(pieces[-1].end for pieces in self.buckets)


def pack(wire: Mapping[str, Spec], bucket_bytes: int) -> list[list[Piece]]:
    """Lays tensors out in buckets, cutting them between rows where they don't fit."""
    buckets: list[list[Piece]] = []
    end = HEADER_BYTES + bucket_bytes  # as if of a full bucket, so that the first piece opens one
    for name, (shape, dtype) in wire.items():
        rows = shape[0] if shape else 1
        row_shape = tuple(shape[1:])
        row_bytes = prod(row_shape) * dtype.itemsize
        done = 0
        while done < rows and row_bytes:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            fit = (HEADER_BYTES + bucket_bytes - start) // row_bytes
            if fit < 1:
                buckets.append([])
                start = HEADER_BYTES
                fit = max(1, bucket_bytes // row_bytes)
            count = min(fit, rows - done)
            piece_shape = (count, *row_shape) if shape else ()
            piece = Piece(name, done, piece_shape, dtype, start, whole=count == rows)
            buckets[-1].append(piece)
            done, end = done + count, piece.end
    return buckets
