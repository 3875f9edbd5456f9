"""`Undo`: the old values of weights that are about to be overwritten piece by piece, so that all can be put back.

Weights that are merged, gathered or received can't be checked before the first byte is written: reading any of them may
fail, and there is no room for a whole second model to collect them in. So the old values are put aside first, in one
copy on the device, and put back if the exchange breaks off: the old version goes on serving. Where they go, the first
that will do:

1. Nowhere, where they are lost already: asleep, the engine's own weights are given up.
2. Into the KV cache, where running sequences compute their keys and values again in any case. It takes no memory.
3. Into memory of the device, if that takes no more than half of what is free: the rest is for what reading makes. It is
   mapped for the time of the exchange only, past PyTorch's allocator, which would keep it.
4. Into the host's memory, which is slow but always there.

Refuses to know how weights are read and when: that is `rollout.weights.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from rollout.engine.memory import ALIGNMENT, device_free_bytes
from rollout.engine.models.learner import copy_pairs
from rollout.engine.streams import wait_for_current
from rollout.engine.virtual_memory import MemoryRange, make_range, round_up


class Undo:
    """For one exchange. What was saved is held until `close`.

    Args:
        lost: whether a weight's old value is lost already, so that there is nothing to be saved.
        borrow: given a size in bytes, memory on the weights' device (uint8, at least as long) whose contents nobody
            needs until `close`, or None.
    """

    def __init__(
        self,
        lost: Callable[[Tensor], bool] = lambda weight: False,
        borrow: Callable[[int], Tensor | None] = lambda size: None,
    ) -> None:
        self._lost = lost
        self._borrow = borrow
        self._range: MemoryRange | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []  # (weight, its old value)
        self.begun = False
        """Whether weights were saved, so that they may have been overwritten since."""

    @torch.no_grad()
    def save(self, weights: Iterable[Tensor]) -> None:
        """Puts the values of `weights` aside, on the current stream. Called once, before the first is overwritten.

        Raises:
            RuntimeError, MemoryError: not even the host has room. Nothing may be written then.
        """
        assert not self.begun, "an exchange saves once"
        kept = [weight for weight in weights if not self._lost(weight)]
        ends = list(accumulate(round_up(weight.nbytes, ALIGNMENT) for weight in kept))
        if kept:
            room = self._room(ends[-1], kept[0].device)
            for weight, start in zip(kept, [0, *ends], strict=False):
                old = room[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
                self._copies.append((weight, old))
            copy_pairs([(old, weight) for weight, old in self._copies])
        self.begun = True

    @torch.no_grad()
    def restore(self) -> None:
        """Puts every saved value back, and waits until it is there."""
        copy_pairs(self._copies)
        if self._copies:
            wait_for_current(self._copies[0][0].device)

    def close(self) -> None:
        """Gives the memory back. Copies from it have ended."""
        self._copies.clear()
        if self._range is not None:
            self._range.close()
            self._range = None

    def _room(self, size: int, device: torch.device) -> Tensor:
        lent = self._borrow(size)
        if lent is not None:
            return lent
        if device.type == "cuda" and 2 * size > device_free_bytes(device):
            return torch.empty(size, dtype=torch.uint8)
        self._range = make_range(device, size)
        self._range.map(size)
        return self._range.tensor
