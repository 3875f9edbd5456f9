"""The timeline recipe on a CPU, and its check on a profile whose idle share is known."""

import json

import pytest

from recipes import timeline


def test_a_tiny_run_draws_both_engines(tmp_path, capsys):
    flags = f"--model tiny --device cpu --bs 2 --prompt 4 --new 8 --out {tmp_path / 'run'}"
    report = timeline.main(flags.split())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["check"] is None
    svg = (tmp_path / "run.svg").read_text()
    for mode in ("synchronous", "overlapped"):
        figures = report["results"][mode]
        assert f"GPU idle {figures['idle_share']:.1%}" in svg
        assert figures["tok_s"] * figures["generate_s"] == pytest.approx(16, rel=1e-3)
        assert 0.0 < figures["mbu"] < 1.0
        seconds = figures["seconds"]
        generated = sum(seconds.values()) - seconds["learner"]
        assert generated == pytest.approx(figures["generate_s"], rel=0.05)
        events = json.loads((tmp_path / f"run.{mode}.trace.json").read_text())["traceEvents"]
        assert sum(e["name"].startswith("decode") for e in events) == 7


def profile(gap_us: float, steps: int = 6) -> list[dict]:
    """Graph launches of 10 us every 10 + gap us: two kernels each, with 1 us between; a kernel alone before them."""
    events = [{"ph": "X", "cat": "kernel", "ts": -50.0, "dur": 20.0, "args": {"correlation": 1}}]
    for i in range(steps):
        start = i * (10 + gap_us)
        for offset, dur in ((0.0, 4.0), (5.0, 5.0)):
            events.append(
                {"ph": "X", "cat": "kernel", "ts": start + offset, "dur": dur, "args": {"correlation": 100 - i}}
            )
        events.append({"ph": "X", "cat": "gpu_memcpy", "ts": start - 1, "dur": 20.0, "args": {"correlation": 200 + i}})
    return events


def test_idle_shares_of_a_profile():
    found = timeline.profiled_idle(profile(2.5), 6, 1)
    wall = 4 * 10 + 3 * 2.5  # the four steps in the middle
    assert found["profiler"] == pytest.approx(3 * 2.5 / wall)
    assert found["profiler_kernels"] == pytest.approx((3 * 2.5 + 4 * 1.0) / wall)
    with pytest.raises(ValueError, match="6 graph launches for 7 decode steps"):
        timeline.profiled_idle(profile(2.5), 7, 1)


@pytest.mark.parametrize("flags", ["--bs 0", "--new 4", "--check --device cpu"])
def test_senseless_flags_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        timeline.parse(flags.split())
    assert "error" in capsys.readouterr().err
