"""`GraphPool`: decode steps captured once and replayed at their addresses, all from one memory pool.

One compute stream means that no two graphs run at once, which is what sharing a pool needs: together they take about
the memory of the largest. A key holds every Python number that a step bakes in; KV lengths are none of these, since
kernels read them on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from rollout.engine.streams import Streams


class GraphKey(NamedTuple):
    """What a captured decode step depends on, beyond the contents of its slot."""

    slot: int
    rows: int
    filtered: bool


def row_buckets(max_rows: int) -> list[int]:
    """Sizes that decode batches are padded to: fine where few rows make padding dear, coarse above."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    steps += list(range(96, 257, 32)) + list(range(320, 513, 64)) + list(range(640, max(max_rows, 640) + 128, 128))
    return [*(s for s in steps if s < max_rows), max_rows]


class GraphPool:
    """Captured steps by key. Without CUDA a "captured" step is kept, and called where it would be replayed."""

    def __init__(self, streams: Streams, *, on_cuda: bool) -> None:
        self.streams = streams
        self.on_cuda = on_cuda
        self.captures = 0
        """Steps captured in the engine's life."""
        self._replay: dict[GraphKey, Callable[[], None]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._warm: set[tuple[int, bool]] = set()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._replay

    @property
    def keys(self) -> list[GraphKey]:
        """What has been captured."""
        return list(self._replay)

    def capture(self, key: GraphKey, step: Callable[[], None]) -> None:
        """Captures `step` for `key`, on the compute stream, with nothing else in flight."""
        assert key not in self._replay, f"{key} is captured already"
        self.captures += 1
        if not self.on_cuda:
            self._replay[key] = step
            return
        with self.streams.compute.use():
            # kernels are compiled and libraries make their handles outside of a capture
            if (key.rows, key.filtered) not in self._warm:
                step()
                self._warm.add((key.rows, key.filtered))
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of a training run may use CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
        self._graphs.append(graph)
        self._replay[key] = graph.replay

    def replay(self, key: GraphKey) -> None:
        """Enqueues the step of `key` on the current stream."""
        self._replay[key]()

    def clear(self) -> None:
        """Gives the graphs' memory back."""
        self._replay.clear()
        self._graphs.clear()
