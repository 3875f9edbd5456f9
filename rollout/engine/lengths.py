"""`LengthEstimate`: how long a sequence is expected to become, so that admission keeps room for what runs already.

Too high an estimate leaves rows empty, too low a one makes the scheduler preempt. Until a completion has ended, each
sequence is taken for as long as its request allows; after that, lengths so far tell.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MEMORY = 256
"""Completions that the running mean looks back on, about."""
OUTLIVED = 0.25
"""A completion that has outlived the mean is expected to go on for this share of what it has."""

Counts = npt.NDArray[np.int32]


class LengthEstimate:
    """A running mean of completions' lengths, in tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.mean: float | None = None
        self._observed = 0

    def observe(self, length: int) -> None:
        """A completion has ended with `length` tokens."""
        self._observed = min(self._observed + 1, MEMORY)
        mean = self.mean or 0.0
        self.mean = mean + (length - mean) / self._observed

    def blocks(self, known: Counts | int, generated: Counts | int, limit: Counts | int) -> Counts:
        """Blocks that sequences will hold when they end; all arguments and the result of one shape.

        Args:
            known: tokens of each, prompt and completion.
            generated: of these, the completion's.
            limit: tokens that its request allows, prompt and completion.
        """
        known, generated, limit = np.asarray(known), np.asarray(generated), np.asarray(limit)
        if self.mean is None:
            total = limit
        else:
            more = np.maximum(self.mean - generated, generated * OUTLIVED).astype(np.int32)
            total = np.minimum(known + np.maximum(more, self.block_size), limit)
        blocks: Counts = -(-total // self.block_size)
        return blocks
