"""How long the engine takes to give its memory back and to take it again: `SwitchTimes`.

Sleeping and waking lie between phases, so these seconds are no part of a phase's metrics.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SwitchTimes:
    """Seconds of the last sleep and the last wake, and the run's sums."""

    sleeps: int = 0
    wakes: int = 0
    sleep_s: float = 0.0
    """The last sleep, to the end of the last unmapping."""
    wake_s: float = 0.0
    """The last wake, to the end of the last mapping."""
    total_sleep_s: float = 0.0
    total_wake_s: float = 0.0

    def slept(self, seconds: float) -> None:
        """Counts a sleep in."""
        self.sleeps += 1
        self.sleep_s = seconds
        self.total_sleep_s += seconds

    def woke(self, seconds: float) -> None:
        """Counts a wake in."""
        self.wakes += 1
        self.wake_s = seconds
        self.total_wake_s += seconds

    def to_log(self) -> dict[str, float]:
        """Names and values for a trainer's log: seconds of the last of each."""
        return {"perf/sleep_s": self.sleep_s, "perf/wake_s": self.wake_s}
