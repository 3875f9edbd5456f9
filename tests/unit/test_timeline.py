"""The timeline on a scripted clock: known spans give known shares, and the trace says what was recorded."""

import json
import math

import numpy as np
import pytest

from rollout.observe.timeline import NullTimeline, Timeline


class FakeClock:
    """Seconds that only move when told to."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


# spans, busy seconds, wall seconds
SCRIPTS = {
    "back to back": ([(0, 1), (1, 2), (2, 3)], 3, 3),
    "one gap": ([(0, 1), (2, 4)], 3, 4),
    "overlapping": ([(0, 2), (1, 3)], 3, 3),
    "nested": ([(0, 10), (2, 3), (4, 5), (11, 12)], 11, 12),
    "nested, then within the first": ([(0, 10), (1, 2), (9, 11)], 11, 11),
    "alone": ([(5, 7)], 2, 2),
    "far from zero": ([(1e6, 1e6 + 1), (1e6 + 3, 1e6 + 4)], 2, 4),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_idle_share_is_one_minus_union_over_wall(script):
    spans, busy_s, wall_s = SCRIPTS[script]
    timeline = Timeline(64)
    for step, (start_s, end_s) in enumerate(spans):
        timeline.device("compute", "decode", step, start_s, end_s)
    assert timeline.idle_share() == pytest.approx(1 - busy_s / wall_s)


def test_idle_share_takes_spans_in_any_order():
    timeline = Timeline(64)
    for start_s, end_s in [(6, 8), (0, 1), (0.5, 2)]:
        timeline.device("compute", "decode", 0, start_s, end_s)
    assert timeline.idle_share() == pytest.approx(1 - 4 / 8)


def test_names_go_with_spans():
    timeline = Timeline(64)
    for name, start_s in [("decode 3", 6.0), ("prefill 2", 0.0), ("decode 12", 2.0)]:
        timeline.device("compute", name, 0, start_s, start_s + 1.0)
    timeline.device("d2h", "out", 0, 1.0, 2.0)
    assert timeline.names("compute") == ["prefill 2", "decode 12", "decode 3"]
    assert timeline.names("compute", "decode") == ["decode 12", "decode 3"]
    assert timeline.spans_s("compute", "decode")[:, 0].tolist() == [2.0, 6.0]


def test_idle_share_keeps_lanes_apart_and_cuts_to_the_window():
    timeline = Timeline(64)
    timeline.device("compute", "prefill", 0, 0.0, 1.0)
    timeline.device("h2d", "in", 1, 1.0, 6.0)
    timeline.device("compute", "decode", 1, 6.0, 8.0)
    timeline.device("compute", "decode", 2, 9.0, 10.0)
    assert timeline.idle_share() == pytest.approx(0.6)
    assert timeline.idle_share("h2d") == 0.0
    assert timeline.idle_share(since_s=6.0) == pytest.approx(0.25)
    assert timeline.idle_share(since_s=7.0, until_s=9.5) == pytest.approx(1 - 1.5 / 2.5)
    assert math.isnan(timeline.idle_share(since_s=20.0))
    assert math.isnan(timeline.idle_share("d2h"))


def test_host_spans_nest_and_add_up_by_name():
    clock = FakeClock()
    timeline = Timeline(64, clock)
    for step in range(3):
        with timeline.host("step", step):
            clock.advance(0.25)
            with timeline.host("fill", step):
                clock.advance(0.5)
        clock.advance(10.0)
    assert timeline.summary() == pytest.approx({"step": 2.25, "fill": 1.5})
    assert list(timeline.summary()) == ["step", "fill"]
    np.testing.assert_allclose(timeline.spans_s("host", "fill")[0], [100.25, 100.75])


def test_a_host_span_is_kept_when_its_body_raises():
    clock = FakeClock()
    timeline = Timeline(8, clock)
    with pytest.raises(RuntimeError, match="boom"), timeline.host("fill"):
        clock.advance(1.0)
        raise RuntimeError("boom")
    assert timeline.summary() == {"fill": 1.0}


def test_the_ring_keeps_the_latest_spans():
    timeline = Timeline(4)
    for step in range(10):
        timeline.device("compute", f"step {step}", step, float(step), step + 0.5)
    assert (timeline.kept, timeline.overwritten) == (4, 6)
    np.testing.assert_array_equal(timeline.spans_s("compute")[:, 0], [6, 7, 8, 9])
    assert timeline.idle_share() == pytest.approx(1 - 2.0 / 3.5)
    timeline.clear()
    assert (timeline.kept, timeline.overwritten) == (0, 0)
    assert math.isnan(timeline.idle_share())


def test_the_trace_says_what_was_recorded(tmp_path):
    clock = FakeClock(1000.0)
    timeline = Timeline(64, clock)
    with timeline.host("fill", 7):
        clock.advance(0.001)
    timeline.device("h2d", "in", 7, 1000.001, 1000.0015)
    timeline.device("compute", "decode 32", 7, 1000.002, 1000.012)
    timeline.device("d2h", "out", 7, 1000.012, 1000.0125)
    path = timeline.write_trace(tmp_path / "made" / "on the way" / "steps.json")

    events = json.loads(path.read_text())["traceEvents"]
    lane = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [lane[tid] for tid in sorted(lane)] == ["host", "h2d", "compute", "d2h"]
    spans = [
        (lane[e["tid"]], e["name"], e["args"]["step"], pytest.approx(e["ts"]), pytest.approx(e["dur"]))
        for e in events
        if e["ph"] == "X"
    ]
    assert spans == [
        ("host", "fill", 7, 0.0, 1000.0),
        ("h2d", "in", 7, 1000.0, 500.0),
        ("compute", "decode 32", 7, 2000.0, 10000.0),
        ("d2h", "out", 7, 12000.0, 500.0),
    ]


def test_the_trace_of_a_wrapped_ring_starts_at_its_oldest_span(tmp_path):
    timeline = Timeline(2)
    for step in range(5):
        timeline.device("compute", "decode", step, float(step), step + 0.5)
    events = json.loads(timeline.write_trace(tmp_path / "steps.json").read_text())["traceEvents"]
    assert [(e["args"]["step"], e["ts"]) for e in events if e["ph"] == "X"] == [(3, 0.0), (4, 1e6)]


def test_the_null_timeline_keeps_nothing(tmp_path):
    timeline = NullTimeline()
    assert not timeline.enabled
    with timeline.host("fill", 0), timeline.host("inner", 0):
        timeline.device("compute", "decode", 0, 0.0, 1.0)
    assert timeline.kept == 0
    assert timeline.summary() == {}
    assert math.isnan(timeline.idle_share())
    with pytest.raises(ValueError, match="Timeline"):
        timeline.write_trace(tmp_path / "steps.json")


def test_spans_are_found_by_the_start_of_their_name():
    timeline = Timeline(8)
    timeline.device("compute", "decode 8", 2, 3.0, 4.0)
    timeline.device("compute", "decode 4", 1, 1.0, 2.0)
    timeline.device("compute", "prefill", 0, 0.0, 1.0)
    timeline.device("d2h", "decode", 0, 5.0, 6.0)
    np.testing.assert_array_equal(timeline.spans_s("compute", "decode"), [[1.0, 2.0], [3.0, 4.0]])
    assert timeline.spans_s("compute").shape == (3, 2)
    assert timeline.spans_s("h2d").shape == (0, 2)


def test_an_empty_timeline_is_not_false():
    assert Timeline(8)
    assert NullTimeline()


def test_a_timeline_needs_room():
    with pytest.raises(ValueError, match="capacity"):
        Timeline(0)
