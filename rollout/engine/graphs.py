"""`GraphPool`: steps captured once and replayed at their addresses, all from one memory pool; and which there are.

One compute stream means that no two graphs run at once, which is what sharing a pool needs: together they take about
the memory of the largest. A key holds every Python number that a step bakes in; KV lengths are none of these, since
kernels read them on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from rollout.config import EngineConfig
from rollout.engine.batch import Batch, PrefillSize

PREFILL_TOKENS = (256, 512, 1024, 2048)
"""Tokens that a prefill graph may have."""
PREFILL_WORK = 1e12
"""Tokens times parameters beyond which the GPU's work on a prefill step takes longer than launching its kernels. On an
H200, phases of 256 short prompts and four tokens each take 27% less time with these graphs on a model of 135M. On one
of 1.7B, graphs of up to 4,096 tokens gain nothing."""
PREFILL_POSITIONS = 4096
"""Longest sequence, in tokens, whose prefill comes from a graph: a graph writes whole tables of blocks."""


class GraphKey(NamedTuple):
    """What a captured step depends on, beyond the contents of its slot."""

    slot: int
    rows: int
    """That give a sample, padding included."""
    filtered: bool
    prefill: PrefillSize | None = None
    """None: a decode step."""


def row_buckets(max_rows: int) -> list[int]:
    """Sizes that decode batches are padded to: powers of two, then coarse steps.

    Matrix products go by tiles of 64 or 128 rows, and each size takes start-up time.
    """
    steps = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, *range(256, max_rows, 128)]
    return [*(s for s in steps if s < max_rows), max_rows]


def prefill_sizes(config: EngineConfig, parameters: int, max_blocks: int) -> list[PrefillSize]:
    """Sizes that prefill batches are padded to, smallest first, as far as launching kernels one by one would be slower.

    A size has a row for eight tokens, the padding's included: a step of more rows takes a larger one, or none.

    Args:
        config: the engine's.
        parameters: of the model.
        max_blocks: blocks that a row can hold.
    """
    blocks = min(max_blocks, -(-PREFILL_POSITIONS // config.block_size))
    return [
        PrefillSize(tokens, min(config.max_rows, tokens // 8 - 1), blocks)
        for tokens in PREFILL_TOKENS
        if tokens <= config.max_prefill_tokens and tokens * parameters <= PREFILL_WORK
    ]


def smallest(sizes: list[PrefillSize], batch: Batch) -> PrefillSize | None:
    """The first of `sizes` that a prefill batch fits into, None if it fits into none."""
    assert batch.prefill is not None
    wanted = (batch.token_ids.size, batch.rows.size, batch.prefill.tables.shape[1])
    return next((size for size in sizes if all(w <= s for w, s in zip(wanted, size, strict=True))), None)


class GraphPool:
    """Captured steps by key. Without CUDA a "captured" step is kept, and called where it would be replayed."""

    def __init__(self, *, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.captures = 0
        """Steps captured in the engine's life."""
        self._replay: dict[GraphKey, Callable[[], None]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._warm: set[GraphKey] = set()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._replay

    @property
    def keys(self) -> list[GraphKey]:
        """What has been captured."""
        return list(self._replay)

    def capture(self, key: GraphKey, step: Callable[[], None]) -> None:
        """Captures `step` for `key`, on the current stream, with nothing else in flight."""
        assert key not in self._replay, f"{key} is captured already"
        self.captures += 1
        if not self.on_cuda:
            self._replay[key] = step
            return
        # kernels are compiled and libraries make their handles outside of a capture, for all slots alike
        if (warm := key._replace(slot=0)) not in self._warm:
            step()
            self._warm.add(warm)
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
