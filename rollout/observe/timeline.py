"""The timeline: when the host and the device did what, on one clock, in a ring buffer that never grows.

Owns spans, the idle share computed from them, and the Chrome trace. Refuses to touch the device: whoever records device
spans has already turned its events into seconds of the host's clock. One thread writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

HOST = "host"
LANES = (HOST, "h2d", "compute", "d2h")
"""Lanes in the order a trace shows them. Others may follow."""

Seconds = npt.NDArray[np.float64]


class _HostSpan:
    __slots__ = ("_kind", "_start_s", "_step", "_timeline")

    def __init__(self, timeline: Timeline, kind: int, step: int) -> None:
        self._timeline = timeline
        self._kind = kind
        self._step = step

    def __enter__(self) -> None:
        self._start_s = self._timeline.clock()

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        timeline = self._timeline
        timeline._write(self._kind, self._step, self._start_s, timeline.clock())


class Timeline:
    """Spans of host and device work, the latest `capacity` of them.

    Args:
        capacity: spans kept; older ones are overwritten, and counted in `overwritten`. A step makes about eight.
        clock: seconds, monotonic. Device spans must be in its time.

    Raises:
        ValueError: capacity below 1.
    """

    enabled: bool = True
    """Whether spans are kept, so that a caller can leave out the work of making them."""

    def __init__(self, capacity: int = 1 << 16, clock: Callable[[], float] = time.perf_counter) -> None:
        if capacity < 1:
            raise ValueError(f"a timeline needs a capacity of at least 1 span, not {capacity}")
        self.capacity = capacity
        self.clock = clock
        self._start_s: Seconds = np.zeros(capacity, np.float64)
        self._end_s: Seconds = np.zeros(capacity, np.float64)
        self._step = np.zeros(capacity, np.int64)
        self._kind = np.zeros(capacity, np.int32)
        self._kinds: list[tuple[str, str]] = []  # (lane, name) by kind
        self._kind_of: dict[tuple[str, str], int] = {}
        self._host_kind_of: dict[str, int] = {}
        self._written = 0

    def host(self, name: str, step: int = -1) -> AbstractContextManager[None]:
        """A span of host work: `with timeline.host("fill", step): ...`. Spans may nest."""
        kind = self._host_kind_of.get(name)
        if kind is None:
            kind = self._host_kind_of[name] = self._register(HOST, name)
        return _HostSpan(self, kind, step)

    def device(self, lane: str, name: str, step: int, start_s: float, end_s: float) -> None:
        """A span of device work that has ended, in seconds of `clock`.

        Args:
            lane: the stream: "h2d", "compute" or "d2h".
            name: what ran, say "decode 32".
            step: the engine's step.
        """
        kind = self._kind_of.get((lane, name))
        if kind is None:
            kind = self._register(lane, name)
        self._write(kind, step, start_s, end_s)

    # NOTE: no __len__. It would make an empty timeline false, and `timeline or default` take the default.
    @property
    def kept(self) -> int:
        """Spans in the ring buffer."""
        return min(self._written, self.capacity)

    @property
    def overwritten(self) -> int:
        """Spans lost to the ring buffer's end."""
        return self._written - self.kept

    def clear(self) -> None:
        """Forget all spans."""
        self._written = 0

    def spans_s(self, lane: str, prefix: str = "") -> Seconds:
        """Starts and ends of the lane's spans named `prefix`..., by start: float64 [spans, 2], seconds."""
        order = self._order_in(lane, prefix)
        return np.stack([self._start_s[order], self._end_s[order]], axis=1)

    def names(self, lane: str, prefix: str = "") -> list[str]:
        """The names of the spans that `spans_s` gives, in its order."""
        return [self._kinds[kind][1] for kind in self._kind[self._order_in(lane, prefix)].tolist()]

    def idle_share(self, lane: str = "compute", since_s: float = -math.inf, until_s: float = math.inf) -> float:
        """1 - busy / wall, where busy is the union of the lane's spans and wall goes from first start to last end.

        Overlapping spans count once. `since_s` and `until_s` cut the spans to a window, say that of steady
        decoding. NaN if no span lies in it.
        """
        spans = self.spans_s(lane).clip(since_s, until_s)
        spans = spans[spans[:, 1] > spans[:, 0]]
        if not len(spans):
            return math.nan
        start_s, end_s = spans.T
        reached_s = np.maximum.accumulate(end_s)  # the lane is covered up to here
        busy_s = end_s[0] - start_s[0] + np.maximum(0.0, end_s[1:] - np.maximum(start_s[1:], reached_s[:-1])).sum()
        return float(1.0 - busy_s / (reached_s[-1] - start_s[0]))

    def summary(self) -> dict[str, float]:
        """Seconds of each host span name, added up, longest first. A nested span counts under both names."""
        order = self._order()
        seconds = np.bincount(
            self._kind[order], weights=self._end_s[order] - self._start_s[order], minlength=len(self._kinds)
        )
        names = ((name, float(seconds[kind])) for name, kind in self._host_kind_of.items())
        return dict(sorted(names, key=lambda item: -item[1]))

    def write_trace(self, path: str | Path) -> Path:
        """Write the spans as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

        Lanes are threads; times are microseconds from the earliest span's start; each event carries its step.

        Returns:
            The path written.
        """
        order = self._order()
        present = {self._kinds[kind][0] for kind in np.unique(self._kind[order])}
        lanes = [lane for lane in LANES if lane in present] + sorted(present - set(LANES))
        thread = {lane: i for i, lane in enumerate(lanes)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rollout"}},
        ]
        for lane, tid in thread.items():
            events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}})
            events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        origin_s = float(self._start_s[order].min()) if len(order) else 0.0
        for i in order[np.argsort(self._start_s[order], kind="stable")].tolist():
            lane, name = self._kinds[self._kind[i]]
            start_s, end_s = float(self._start_s[i]), float(self._end_s[i])
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": thread[lane],
                    "cat": lane,
                    "name": name,
                    "ts": round((start_s - origin_s) * 1e6, 3),
                    "dur": round((end_s - start_s) * 1e6, 3),
                    "args": {"step": int(self._step[i])},
                }
            )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        return path

    def _register(self, lane: str, name: str) -> int:
        kind = self._kind_of.get((lane, name))
        if kind is None:
            kind = self._kind_of[lane, name] = len(self._kinds)
            self._kinds.append((lane, name))
        return kind

    def _write(self, kind: int, step: int, start_s: float, end_s: float) -> None:
        i = self._written % self.capacity
        self._start_s[i] = start_s
        self._end_s[i] = end_s
        self._step[i] = step
        self._kind[i] = kind
        self._written += 1

    def _order_in(self, lane: str, prefix: str) -> npt.NDArray[np.int64]:
        """Indices of the lane's spans named `prefix`..., by start."""
        order = self._order()
        wanted = [kind for kind, (of, called) in enumerate(self._kinds) if of == lane and called.startswith(prefix)]
        order = order[np.isin(self._kind[order], wanted)]
        return order[np.argsort(self._start_s[order], kind="stable")]

    def _order(self) -> npt.NDArray[np.int64]:
        """Indices of the spans kept, oldest written first."""
        return np.arange(self._written - self.kept, self._written) % self.capacity


class NullTimeline(Timeline):
    """Keeps nothing: the default, at no cost."""

    enabled = False

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self._nothing: AbstractContextManager[None] = nullcontext()

    def host(self, name: str, step: int = -1) -> AbstractContextManager[None]:
        """Nothing is kept."""
        return self._nothing

    def device(self, lane: str, name: str, step: int, start_s: float, end_s: float) -> None:
        """Nothing is kept."""

    def write_trace(self, path: str | Path) -> Path:
        """Nothing was kept.

        Raises:
            ValueError: always.
        """
        raise ValueError("there is no timeline to write: hand the worker a Timeline() before it generates")
