"""Where wall time goes: `WallClock` says whose it is, `Breakdown` what it was spent on, in seconds that add up.

A run's wall time is cut at the end of each phase of generation, so a phase's cut begins where the phase before ended:
the learner, sleep, exchange and wake that led to it are in it. Refuses to measure the device: its seconds are given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

GENERATE, EXCHANGE, SLEEP, WAKE, LEARNER = "generate", "exchange", "sleep", "wake", "learner"
WALL_PARTS = (GENERATE, EXCHANGE, SLEEP, WAKE, LEARNER)
"""Who has the wall clock. What nobody has entered is the learner's: training, rewards, data, and all else."""


class WallClock:
    """Gives every second of wall time to one part: the one entered last that hasn't been left, else the learner.

    Parts may nest and need not be left in order, so that an exchange within a phase is the exchange's time.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._entered: list[str] = []
        self._seconds = dict.fromkeys(WALL_PARTS, 0.0)
        self._since_s = clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The body's time is `name`'s, one of `WALL_PARTS`."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def enter(self, name: str) -> None:
        """From now on, time is `name`'s."""
        self._count()
        self._entered.append(name)

    def leave(self, name: str) -> None:
        """`name`, entered before, has no more of it."""
        self._count()
        last = len(self._entered) - 1 - self._entered[::-1].index(name)
        del self._entered[last]

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last lap, or since this was made. They add up to the time between."""
        self._count()
        seconds, self._seconds = self._seconds, dict.fromkeys(WALL_PARTS, 0.0)
        return seconds

    def _count(self) -> None:
        now_s = self._clock()
        self._seconds[self._entered[-1] if self._entered else LEARNER] += now_s - self._since_s
        self._since_s = now_s


class StepSeconds(Protocol):
    """Device seconds of steps, as `rollout.engine.counters.EngineCounters` adds them up."""

    decode_s: float
    prefill_s: float
    idle_s: float
    admission_s: float
    tail_busy_s: float
    tail_idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds of wall time, each in one field.

    The *tail* is what comes after a phase's last prefill step while fewer rows decode than half of `max_rows`: steps,
    and the gaps between them. A phase of fewer completions than that is all tail once its prompts are computed.
    """

    decode_s: float = 0.0
    """Decode steps on the device, before the tail."""
    prefill_s: float = 0.0
    """Prefill steps on the device."""
    bubble_s: float = 0.0
    """Scheduling: the device idle between two decode steps, before the tail."""
    admission_s: float = 0.0
    """The device idle beside a prefill step."""
    tail_busy_s: float = 0.0
    """Decode steps of the tail."""
    tail_idle_s: float = 0.0
    """The device idle between steps of the tail."""
    edges_s: float = 0.0
    """Of a phase, before its first step and after its last, and while requests in flight were held."""
    exchange_s: float = 0.0
    """Taking over weights."""
    sleep_s: float = 0.0
    """Giving memory back."""
    wake_s: float = 0.0
    """Taking memory again."""
    learner_s: float = 0.0
    """Everything outside of the worker."""

    @staticmethod
    def of(wall: dict[str, float], steps: StepSeconds) -> Breakdown:
        """Joins a lap of the wall clock with the device's seconds in it."""
        busy_s = steps.decode_s + steps.prefill_s
        return Breakdown(
            decode_s=steps.decode_s - steps.tail_busy_s,
            prefill_s=steps.prefill_s,
            bubble_s=steps.idle_s - steps.admission_s - steps.tail_idle_s,
            admission_s=steps.admission_s,
            tail_busy_s=steps.tail_busy_s,
            tail_idle_s=steps.tail_idle_s,
            # Two clocks: the device's may put its steps a hair over the host's phase.
            edges_s=max(0.0, wall[GENERATE] - busy_s - steps.idle_s),
            exchange_s=wall[EXCHANGE],
            sleep_s=wall[SLEEP],
            wake_s=wall[WAKE],
            learner_s=wall[LEARNER],
        )

    @property
    def wall_s(self) -> float:
        """All of it."""
        return math.fsum(self.parts().values())

    @property
    def generate_s(self) -> float:
        """The phases' share."""
        return self.busy_s + self.idle_s + self.edges_s

    @property
    def busy_s(self) -> float:
        """A step ran on the device."""
        return self.decode_s + self.prefill_s + self.tail_busy_s

    @property
    def idle_s(self) -> float:
        """Between two steps of a phase, none did."""
        return self.bubble_s + self.admission_s + self.tail_idle_s

    @property
    def tail_s(self) -> float:
        """The tail, busy or idle."""
        return self.tail_busy_s + self.tail_idle_s

    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order of the fields: "decode", "prefill", "bubble", ..."""
        return {f.name.removesuffix("_s"): float(getattr(self, f.name)) for f in fields(self)}

    def to_log(self) -> dict[str, float]:
        """Names and values for a trainer's log: `time/decode_s` and so on, which add up to the wall time."""
        return {f"time/{name}_s": seconds for name, seconds in self.parts().items()}

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def format_breakdown(breakdown: Breakdown) -> str:
    """A table for a terminal, longest part first: seconds and share of the wall time. Without a newline at the end."""
    wall_s = breakdown.wall_s
    rows = sorted(breakdown.parts().items(), key=lambda item: -item[1])
    lines = [
        f"{name.replace('_', ', '):<12}{seconds:>11,.2f} s {seconds / wall_s:>6.1%}"
        for name, seconds in rows
        if seconds
    ]
    return "\n".join([*lines, f"{'wall':<12}{wall_s:>11,.2f} s"])
