"""`Steps`: what a batch makes the device do, as one call on the compute stream: eagerly, or the replay of a graph.

Owns the sizes that have graphs, their capture, and the choice among them. Refuses to know what is in flight: the engine
calls it when a slot may be written and when a capture may run through the slots' buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from rollout.config import EngineConfig
from rollout.engine.batch import Batch
from rollout.engine.graphs import GraphKey, GraphPool, prefill_sizes, row_buckets, smallest
from rollout.engine.memory import used_bytes
from rollout.engine.runner import ModelRunner
from rollout.engine.slots import PrefillInputs, Slot
from rollout.engine.streams import Streams


class Steps:
    """An engine's steps, on its slots.

    Args:
        runner: runs them.
        slots: whose inputs they read and whose outputs they write.
        streams: their `compute` is current when a step is called.
        config: the engine's.
        device: of the engine.
        use_graphs: whether there are graphs.
        parameters: of the model.
        max_blocks: blocks that a row can hold.
    """

    def __init__(
        self,
        runner: ModelRunner,
        slots: list[Slot],
        streams: Streams,
        *,
        config: EngineConfig,
        device: torch.device,
        use_graphs: bool,
        parameters: int,
        max_blocks: int,
    ) -> None:
        self._runner = runner
        self._slots = slots
        self._streams = streams
        self._device = device
        self.use_graphs = use_graphs
        self.graphs = GraphPool(on_cuda=device.type == "cuda")
        self.buckets = row_buckets(config.max_rows) if use_graphs else []
        self.prefill_sizes = prefill_sizes(config, parameters, max_blocks) if use_graphs else []
        self.graphs_bytes = 0
        """Device memory that captures have taken."""

    def fill(self, slot: Slot, batch: Batch) -> Callable[[], None]:
        """Writes `batch` to the slot's host buffers. Returns its device work."""
        if batch.prefill is not None:
            size = smallest(self.prefill_sizes, batch)
            inputs = slot.fill_prefill(batch, size)
            if size is None:
                return self._prefill(slot, inputs, batch.filtered)
            return partial(self.graphs.replay, GraphKey(slot.index, size.rows, batch.filtered, size))
        rows = batch.rows.size
        if not self.use_graphs:
            slot.fill_decode(batch, rows)
            return self._decode(GraphKey(slot.index, rows, batch.filtered))
        padded = self.buckets[bisect_left(self.buckets, rows)]
        slot.fill_decode(batch, padded)
        return partial(self.graphs.replay, GraphKey(slot.index, padded, batch.filtered))

    def capture(self, *, filtered: bool, on_capture: Callable[[int, int], None] | None = None) -> None:
        """Captures the graphs of every slot and size, once; largest first, so that the pool is sized once.

        Args:
            filtered: whether of steps with top-k, top-p or min-p.
            on_capture: called with (done, all) after each.
        """
        keys = [GraphKey(0, size.rows, filtered, size) for size in reversed(self.prefill_sizes)]
        keys += [GraphKey(0, rows, filtered) for rows in reversed(self.buckets)]
        keys = [key._replace(slot=slot.index) for key in keys for slot in self._slots]
        keys = [key for key in keys if key not in self.graphs]
        if not keys:
            return
        self._streams.synchronize()
        used_before = used_bytes(self._device)
        for done, key in enumerate(keys):
            with self._streams.compute.use():
                self.graphs.capture(key, self._padded(key))
            if on_capture is not None:
                on_capture(done + 1, len(keys))
        self._streams.synchronize()
        self.graphs_bytes += max(0, used_bytes(self._device) - used_before)

    def _padded(self, key: GraphKey) -> Callable[[], None]:
        """The step of `key`, with nothing but padding in its slot."""
        slot = self._slots[key.slot]
        if key.prefill is not None:
            return self._prefill(slot, slot.pad_device_prefill(key.prefill), key.filtered)
        slot.pad_device_inputs(key.rows)
        return self._decode(key)

    def _prefill(self, slot: Slot, inputs: PrefillInputs, filtered: bool) -> Callable[[], None]:
        started = partial(self._streams.compute.record, slot.compute_start)
        return partial(self._runner.prefill, inputs, slot.device_out, filtered=filtered, started=started)

    def _decode(self, key: GraphKey) -> Callable[[], None]:
        slot, before = self._slots[key.slot], self._slots[key.slot - 1]
        inputs = slot.decode_inputs(key.rows)
        started = partial(self._streams.mark, slot.compute_start)

        def run() -> None:
            self._runner.decode(inputs, before.out_tokens, slot.device_out, filtered=key.filtered, started=started)
            self._streams.join_marks()

        return run
