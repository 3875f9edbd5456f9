"""The picture of a timeline: when host and GPU work together, when one waits for the other.

Green: both work. Light: the GPU works and the host waits. Red: the GPU does nothing. Each engine gets a strip of its
whole run, all on one time axis, and a few steps of its middle enlarged, host over GPU. Owns the layout and the times it
shows; `rollout.observe.scene` writes it. Refuses to measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollout.observe.scene import GREY, INK, Scene
from rollout.observe.timeline import HOST, Seconds, Timeline

BOTH, WAITS, IDLE = "#1a8a4f", "#a9dfbf", "#e5484d"
NOTHING, RULE = "#eef0f2", "#c9ced4"
WAIT = "wait"
"""The host span in which it does no work."""

LEFT, RIGHT, WIDTH = 58.0, 16.0, 900.0
STRIP, LANE, PANEL = 58.0, 32.0, 216.0
HEAD, FOOT = 80.0, 42.0
TITLE, NAME, TEXT = 22.0, 19.0, 16.0
"""Sizes of letters: a page of 900 pixels shows them as they are, a phone a good third."""
COLUMN = 2.0
"""Pixels of a strip that share out one mean."""


def union(spans: Seconds) -> Seconds:
    """Spans [n, 2] as disjoint ones in order; what touches becomes one, what is empty goes."""
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    start_s, end_s = spans[np.argsort(spans[:, 0], kind="stable")].T
    reached_s = np.maximum.accumulate(end_s)
    first = np.r_[True, start_s[1:] > reached_s[:-1]]
    return np.stack([start_s[first], reached_s[np.r_[first[1:], True]]], axis=1)


def intersection(one: Seconds, other: Seconds) -> Seconds:
    """Where both of two disjoint, ordered sets of spans are."""
    edges = np.unique(np.r_[one.ravel(), other.ravel()])
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    middle = pieces.mean(axis=1)
    return union(pieces[_inside(one, middle) & _inside(other, middle)])


def covered_s(spans: Seconds, edges: Seconds) -> Seconds:
    """Seconds of disjoint, ordered spans in each bin between edges: [edges - 1]."""
    if not len(spans):
        return np.zeros(len(edges) - 1)
    before_s = np.r_[0.0, np.cumsum(spans[:, 1] - spans[:, 0])]
    return np.diff(np.interp(edges, spans.ravel(), np.repeat(before_s, 2)[1:-1]))


def _inside(spans: Seconds, at: Seconds) -> npt.NDArray[np.bool_]:
    if not len(spans):
        return np.zeros(len(at), np.bool_)
    i = np.searchsorted(spans[:, 0], at, "right") - 1
    return np.asarray((i >= 0) & (at < spans[i, 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Seconds of a run by who works, from the first step's start to the last one's end."""

    both_s: float
    host_waits_s: float
    gpu_idle_s: float

    @property
    def wall_s(self) -> float:
        """All of them."""
        return self.both_s + self.host_waits_s + self.gpu_idle_s

    @property
    def idle_share(self) -> float:
        """Share in which the GPU does nothing; `Timeline.idle_share` of the compute lane."""
        return self.gpu_idle_s / self.wall_s if self.wall_s else math.nan


class _Run:
    """A timeline's spans, as the picture needs them."""

    def __init__(self, timeline: Timeline, since_s: float = -math.inf) -> None:
        def spans_s(lane: str, name: str = "") -> Seconds:
            spans = timeline.spans_s(lane, name)
            return spans[spans[:, 0] >= since_s]

        steps = spans_s("compute")
        if not len(steps):
            raise ValueError("the timeline has no device spans: hand it to the worker before it generates")
        self.gpu = union(steps)
        self.start_s, self.end_s = float(self.gpu[0, 0]), float(self.gpu[-1, 1])
        names = [name for name in timeline.summary() if name != WAIT]
        self.host_spans = {name: spans_s(HOST, name) for name in [*names, WAIT]}
        self.gpu_spans = {kind: spans for kind in ("decode", "prefill") if len(spans := spans_s("compute", kind))}
        worked = [self.host_spans[name] for name in names]
        self.host = union(np.concatenate(worked) if worked else np.zeros((0, 2)))
        self.both = intersection(self.host, self.gpu)

    @property
    def shares(self) -> Shares:
        whole = np.array([self.start_s, self.end_s])
        both_s, gpu_s = float(covered_s(self.both, whole)[0]), float(covered_s(self.gpu, whole)[0])
        return Shares(
            both_s=both_s, host_waits_s=gpu_s - both_s, gpu_idle_s=max(0.0, self.end_s - self.start_s - gpu_s)
        )

    def middle(self, steps: int) -> tuple[float, float]:
        """Start of a step in the middle, and how long `steps` take from there."""
        starts = self.gpu_spans.get("decode", next(iter(self.gpu_spans.values())))[:, 0]
        first = max(0, (len(starts) - steps) // 2)
        last = min(first + steps, len(starts) - 1)
        end_s = float(starts[last]) if last > first else self.end_s
        return float(starts[first]), end_s - float(starts[first])


def shares(timeline: Timeline) -> Shares:
    """Who worked, in seconds.

    Raises:
        ValueError: the timeline is empty.
    """
    return _Run(timeline).shares


def picture(panels: Sequence[tuple[str, Timeline]], *, title: str, steps: int = 4, since_s: float = -math.inf) -> Scene:
    """A panel for each (name, timeline), one above the other; `.write(path)` it.

    Args:
        panels: an engine's name, and its run.
        title: what ran: model, rows, lengths, GPU.
        steps: how many are enlarged, of the engine whose steps take longest; the others get the same time.
        since_s: leaves out what began before, in seconds of the timelines' clock.

    Raises:
        ValueError: a timeline is empty.
    """
    runs = [_Run(timeline, since_s) for _, timeline in panels]
    scene = Scene(WIDTH, HEAD + PANEL * len(runs) + FOOT)
    scene.text(LEFT, 34, title, size=TITLE, bold=True)
    _legend(scene)
    longest_s = max(run.end_s - run.start_s for run in runs)
    scale = (WIDTH - LEFT - RIGHT) / longest_s  # pixels a second
    zoom_s = max(run.middle(steps)[1] for run in runs)
    for i, ((name, _), run) in enumerate(zip(panels, runs, strict=True)):
        top = HEAD + PANEL * i
        whole = run.shares
        figures = f"{_time(whole.wall_s)}, GPU idle {_percent(whole.idle_share)}"
        scene.text(LEFT, top + 20, name, size=NAME, bold=True)
        scene.text(WIDTH - RIGHT, top + 20, figures, size=NAME, bold=True, anchor="end")
        start_s = run.middle(steps)[0]
        _strip(scene, run, top + 30, scale)
        less = f"{_time(longest_s - whole.wall_s)} less"
        if (longest_s - whole.wall_s) * scale > _width(less) + 12:
            scene.text(WIDTH - RIGHT, top + 30 + STRIP / 2 + 6, less, size=TEXT, fill=GREY, anchor="end")
        _enlarged(scene, run, top + 30 + STRIP, scale, start_s, start_s + zoom_s)
    _axis(scene, HEAD + PANEL * len(runs), scale)
    return scene


def _legend(scene: Scene) -> None:
    x = LEFT
    for fill, text in ((BOTH, "host and GPU work"), (WAITS, "GPU works, host waits"), (IDLE, "GPU does nothing")):
        scene.rect(x, 49, 15, 15, fill)
        scene.text(x + 22, 62, text, size=TEXT, fill=GREY)
        x += 46 + _width(text)


def _strip(scene: Scene, run: _Run, top: float, scale: float) -> None:
    """The whole run. Each column's height is shared out as its time was."""
    width = (run.end_s - run.start_s) * scale
    edges = np.linspace(run.start_s, run.end_s, max(2, round(width / COLUMN)) + 1)
    column_s = np.diff(edges)
    both, gpu = covered_s(run.both, edges) / column_s, covered_s(run.gpu, edges) / column_s
    scene.rect(LEFT, top, width, STRIP, WAITS)
    x = np.repeat(LEFT + (edges - run.start_s) * scale, 2)[1:-1]
    for ground, y, fill in ((top, top + STRIP * (1.0 - gpu), IDLE), (top + STRIP, top + STRIP * (1.0 - both), BOTH)):
        outline = np.stack([x, np.repeat(y, 2)], axis=1)
        scene.polygon([(LEFT, ground), *map(tuple, outline.tolist()), (LEFT + width, ground)], fill)


def _enlarged(scene: Scene, run: _Run, top: float, scale: float, start_s: float, end_s: float) -> None:
    """From `start_s` to `end_s`, the host's lane over the GPU's, tied to their place in the strip."""
    zoom = (WIDTH - LEFT - RIGHT) / (end_s - start_s)
    host_y, gpu_y = top + 30, top + 30 + LANE + 4
    at = (LEFT + (start_s - run.start_s) * scale, LEFT + (end_s - run.start_s) * scale)
    for from_x, to_x in zip(at, (LEFT, WIDTH - RIGHT), strict=True):
        scene.line(((from_x, top), (from_x, top + 4), (to_x, host_y - 4), (to_x, host_y)), RULE)
    scene.text(LEFT - 8, host_y + LANE / 2 + 6, "host", size=TEXT, anchor="end")
    scene.text(LEFT - 8, gpu_y + LANE / 2 + 6, "GPU", size=TEXT, anchor="end")
    scene.text(
        (LEFT + WIDTH - RIGHT) / 2, top + 23, f"{_time(end_s - start_s)} of it", size=TEXT, fill=GREY, anchor="middle"
    )

    def lane(y: float, spans: Seconds, fill: str) -> None:
        for one_s, other_s in spans.clip(start_s, end_s).tolist():
            scene.rect(LEFT + (one_s - start_s) * zoom, y, (other_s - one_s) * zoom, LANE, fill)

    until_s = min(end_s, run.end_s)
    window = np.array([[start_s, until_s]])
    for y, ground in ((host_y, NOTHING), (gpu_y, IDLE)):
        lane(y, window, ground)
    lane(host_y, run.host, IDLE)  # at work while the GPU does nothing, unless painted over
    lane(host_y, run.both, BOTH)
    lane(host_y, intersection(union(run.host_spans[WAIT]), run.gpu), WAITS)
    lane(gpu_y, run.gpu, WAITS)
    lane(gpu_y, run.both, BOTH)
    for y, spans_of in ((host_y, run.host_spans), (gpu_y, run.gpu_spans)):
        for name, spans in spans_of.items():
            seen = spans[(spans[:, 1] > start_s) & (spans[:, 0] < end_s)].clip(start_s, end_s)
            for one_s, other_s in seen.tolist():
                x, width = LEFT + (one_s - start_s) * zoom, (other_s - one_s) * zoom
                if one_s > start_s and width > 3:
                    scene.rect(x - 0.5, y, 1, LANE, "#fff")
                around_s = (one_s + other_s) / 2 + np.array([-0.5, 0.5]) * _width(name) / zoom
                dark = _inside(run.both if y == gpu_y else run.host, around_s)
                if width > _width(name) + 8 and dark[0] == dark[1]:
                    fill = "#fff" if dark[0] else INK
                    scene.text(x + width / 2, y + LANE / 2 + 5, name, size=TEXT, fill=fill, anchor="middle")


def _axis(scene: Scene, top: float, scale: float) -> None:
    """Seconds of the whole runs, round numbers about 120 pixels apart."""
    rough_s = 120 / scale
    unit_s = 10.0 ** math.floor(math.log10(rough_s))
    tick_s = next(unit_s * factor for factor in (1, 2, 5, 10) if unit_s * factor >= rough_s)
    scene.line(((LEFT, top), (WIDTH - RIGHT, top)), RULE)
    for i in range(int((WIDTH - LEFT - RIGHT) / scale / tick_s + 1e-9) + 1):
        x = LEFT + i * tick_s * scale
        scene.line(((x, top), (x, top + 5)), RULE)
        scene.text(x, top + 23, _time(i * tick_s, exact=False) if i else "0", size=TEXT, fill=GREY, anchor="middle")


def _time(seconds: float, *, exact: bool = True) -> str:
    if seconds >= 1.0:
        return f"{seconds:.1f} s" if exact else f"{seconds:g} s"
    return f"{seconds * 1e3:.{1 if exact else 0}f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _width(text: str) -> float:
    """About what it takes, in pixels, at size `TEXT`."""
    return 0.56 * TEXT * len(text)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
