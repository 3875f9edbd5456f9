"""`EngineCounters`: what the engine's steps add up to over its life. A phase is the difference of two copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rollout.engine.batch import Batch


@dataclass(slots=True)
class EngineCounters:
    """Counts and device seconds of steps."""

    decode_steps: int = 0
    prefill_steps: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    busy_s: float = 0.0
    """Seconds in which a step ran on the compute stream."""
    idle_s: float = 0.0
    """Seconds between two steps of a phase in which none ran there."""
    row_steps: int = 0
    """Rows that decoded, summed over decode steps."""
    row_capacity: int = 0
    block_steps: int = 0
    """Blocks in use, summed over steps."""
    block_capacity: int = 0
    _last_end_s: float = math.inf

    def launched(self, batch: Batch, max_rows: int, blocks_used: int, blocks: int) -> None:
        """Counts a step's rows and blocks."""
        self.block_steps += blocks_used
        self.block_capacity += blocks
        if batch.prefill is None:
            self.decode_steps += 1
            self.row_steps += int(batch.rows.size)
            self.row_capacity += max_rows
        else:
            self.prefill_steps += 1

    def ran(self, batch: Batch, start_s: float, end_s: float) -> None:
        """Counts a step's seconds on the compute stream, where steps run one after the other."""
        self.idle_s += max(0.0, start_s - self._last_end_s)
        self.busy_s += end_s - start_s
        self._last_end_s = end_s
        if batch.prefill is None:
            self.decode_s += end_s - start_s
        else:
            self.prefill_s += end_s - start_s

    def forget_last_step(self) -> None:
        """What lies before a phase's first step isn't idle time of the engine's."""
        self._last_end_s = math.inf

    def since(self, before: EngineCounters) -> EngineCounters:
        """What was added since `before`, a copy made then."""
        names = [f.name for f in fields(self) if not f.name.startswith("_")]
        return EngineCounters(**{name: getattr(self, name) - getattr(before, name) for name in names})
