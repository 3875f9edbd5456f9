"""Which block of the KV cache belongs to whom: `BlockAllocator`, and the prefix cache inside it.

Pure host code on NumPy arrays. It hands out block numbers; the tensor they index is made in `rollout.engine.memory`.
Block 0 is the scratch block: padding writes there, and it is never handed out.

A full block of a prompt is known by a digest of all tokens up to its end, so sequences with one prompt (a group) share
it: it is computed once and counted by reference. A block nobody uses keeps its contents until its place is needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

SCRATCH_BLOCK = 0


def prefix_digests(token_ids: IntArray, block_size: int, count: int) -> list[bytes]:
    """Digests of the first `count` full blocks of a sequence, each covering every token up to its block's end."""
    digests: list[bytes] = []
    parent = b""
    for i in range(count):
        block = token_ids[i * block_size : (i + 1) * block_size]
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        digests.append(parent)
    return digests


class BlockAllocator:
    """Free blocks, reference counts and cached prefixes of a cache of `num_blocks` blocks (scratch included)."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a cache needs the scratch block and one more"
        self.num_blocks = num_blocks
        self._free: IntArray = np.arange(num_blocks - 1, SCRATCH_BLOCK, -1, dtype=np.int32)  # a stack; its top is last
        self._num_free = num_blocks - 1
        self._references: IntArray = np.zeros(num_blocks, np.int32)
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._is_cached = np.zeros(num_blocks, bool)
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks nobody uses, the longest idle first

    @property
    def capacity(self) -> int:
        """Blocks that sequences can hold together."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones, and idle ones whose contents would be forgotten."""
        return self._num_free + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.capacity - self.available

    def allocate(self, count: int) -> IntArray:
        """Takes `count` blocks, each with one reference. The caller has looked at `available`.

        Returns:
            Block numbers, int32 [count].
        """
        assert count <= self.available, f"{count} blocks asked for, {self.available} available"
        while self._num_free < count:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._free[self._num_free] = block
            self._num_free += 1
        self._num_free -= count
        blocks: IntArray = self._free[self._num_free : self._num_free + count].copy()
        self._references[blocks] = 1
        return blocks

    def release(self, blocks: IntArray) -> None:
        """Gives up one reference to each of `blocks`."""
        self._references[blocks] -= 1
        assert (self._references[blocks] >= 0).all(), "a block was released more often than it was taken"
        dead = blocks[self._references[blocks] == 0]
        cached = self._is_cached[dead]
        for block in dead[cached].tolist():
            self._idle[block] = None
        forgotten = dead[~cached]
        self._free[self._num_free : self._num_free + forgotten.size] = forgotten
        self._num_free += int(forgotten.size)

    def match(self, digests: list[bytes]) -> IntArray:
        """The cached blocks of the longest known prefix. No reference is taken: see `share`."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.asarray(blocks, np.int32)

    def share(self, blocks: IntArray) -> None:
        """Takes one more reference to each of `blocks`, which `match` has just given."""
        for block in blocks.tolist():
            self._idle.pop(block, None)
        self._references[blocks] += 1

    def publish(self, digest: bytes, block: int) -> None:
        """Lets later sequences find `block` by `digest`, unless another block already holds those tokens.

        NOTE: called when the step that computes the block is scheduled. Whoever matches it runs in that step or a later
        one, and in one compute stream each layer's keys are written before that layer's attention reads.
        """
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._is_cached[block] = True

    def idle_among(self, blocks: IntArray) -> int:
        """How many of `blocks` nobody uses, so that sharing them lowers `available`."""
        return int((self._references[blocks] == 0).sum())

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: keys and values of old weights must never serve new ones."""
        for block in self._idle:
            self._free[self._num_free] = block
            self._num_free += 1
        self._idle.clear()
        self._block_of.clear()
        self._digest_of.clear()
        self._is_cached[:] = False

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
        self._is_cached[block] = False

    def check(self) -> None:
        """Asserts conservation: every block is free, idle or used, and none is two of these."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == free.size, "a block is free twice"
        assert (self._references[free] == 0).all() and not self._is_cached[free].any()
        assert all(self._references[b] == 0 and self._is_cached[b] for b in self._idle)
        used = int((self._references > 0).sum())
        assert free.size + len(self._idle) + used == self.capacity, "a block was lost"
