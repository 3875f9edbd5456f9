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
    admission_s: float = 0.0
    """Of these, seconds beside a prefill step: before or after one."""
    tail_busy_s: float = 0.0
    """Of `decode_s`, seconds of steps of fewer rows than half of `max_rows`, since the phase's last prefill step."""
    tail_idle_s: float = 0.0
    """Of `idle_s`, seconds before such a step, and not beside a prefill step."""
    row_steps: int = 0
    """Rows that decoded, summed over decode steps."""
    row_capacity: int = 0
    block_steps: int = 0
    """Blocks in use, summed over steps."""
    block_capacity: int = 0
    _last_end_s: float = math.inf
    _last_prefilled: bool = False
    _half_rows: float = 0.0
    _settled_tail_s: tuple[float, float] = (0.0, 0.0)

    def launched(self, batch: Batch, max_rows: int, blocks_used: int, blocks: int) -> None:
        """Counts a step's rows and blocks."""
        self._half_rows = max_rows / 2
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
        idle_s, busy_s = max(0.0, start_s - self._last_end_s), end_s - start_s
        prefills = batch.prefill is not None
        self.idle_s += idle_s
        self.busy_s += busy_s
        if prefills or self._last_prefilled:
            self.admission_s += idle_s
            idle_s = 0.0
        self._last_end_s, self._last_prefilled = end_s, prefills
        if prefills:
            self.prefill_s += busy_s
            self.tail_busy_s, self.tail_idle_s = self._settled_tail_s  # it wasn't the last admission
            return
        self.decode_s += busy_s
        if batch.rows.size < self._half_rows:
            self.tail_busy_s += busy_s
            self.tail_idle_s += idle_s

    def settle(self) -> None:
        """A phase has ended: what counts as tail so far stays tail, whatever is admitted later."""
        self._settled_tail_s = (self.tail_busy_s, self.tail_idle_s)

    def forget_last_step(self) -> None:
        """What lies before a phase's first step isn't idle time of the engine's."""
        self._last_end_s, self._last_prefilled = math.inf, False

    def since(self, before: EngineCounters) -> EngineCounters:
        """What was added since `before`, a copy made then."""
        names = [f.name for f in fields(self) if not f.name.startswith("_")]
        return EngineCounters(**{name: getattr(self, name) - getattr(before, name) for name in names})
