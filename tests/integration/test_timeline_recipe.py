"""The timeline recipe on a CPU, and its check on a profile whose idle share is known."""

import json

import pytest

from recipes import timeline


def test_a_tiny_run_draws_both_engines(tmp_path, capsys):
    flags = f"--model tiny --device cpu --bs 2 --prompt 4 --new 8 --out {tmp_path / 'run'}"
    report = timeline.main(flags.split())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    svg = (tmp_path / "run.svg").read_text()
    for mode in ("synchronous", "overlapped"):
        figures = report["results"][mode]
        digits = 1 if figures["idle_share"] >= 0.01 else 2
        assert f"GPU idle {figures['idle_share']:.{digits}%}" in svg
        assert figures["tok_s"] * figures["generate_s"] == pytest.approx(16, rel=1e-3)
        assert 0.0 < figures["mbu"] < 1.0
        seconds = figures["seconds"]
        generated = sum(seconds.values()) - seconds["learner"]
        assert generated == pytest.approx(figures["generate_s"], rel=0.05)
        events = json.loads((tmp_path / f"run.{mode}.trace.json").read_text())["traceEvents"]
        assert sum(e["name"].startswith("decode") for e in events) == 7


def test_the_cost_of_a_timeline_is_measured_in_turns(tmp_path, capsys):
    flags = f"--model tiny --device cpu --bs 2 --prompt 4 --new 40 --cost --out {tmp_path / 'run'}"
    results = timeline.main(flags.split())["results"]
    assert "cost" not in results["synchronous"]  # there a step waits for its own end
    cost = results["overlapped"]["cost"]
    assert min(cost["off_us"], cost["on_us"]) > 0.0
    assert cost["cost_us"] == pytest.approx(cost["on_us"] - cost["off_us"], abs=0.1)
    assert "without a timeline" in capsys.readouterr().out


def event(category: str, name: str, start: float, dur: float, call: int) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": dur, "args": {"correlation": call}}


def profile(gap_us: float, steps: int = 6) -> list[dict]:
    """Steps of 10 us every 10 + gap us, each two kernels with 1 us between: a prefill step's are two calls, a decode
    step's are one graph launch. The outputs' copies take long, so that they end while the next step runs."""
    events = []
    for i in range(steps):
        start, call = i * (10 + gap_us), 10 * i
        events.append(event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start - 15, 1.0, call))
        events.append(event("kernel", "embed", start, 4.0, call + 2))
        events.append(event("kernel", "sample", start + 5, 5.0, call + 3 if i == 0 else call + 2))
        events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 10, 7.0, call + 4))
    return events[::-1]  # a trace has no order


def test_idle_shares_of_a_profile():
    found = timeline.profiled_idle(profile(2.5), 6)
    wall = 6 * 10 + 5 * 2.5
    assert found["profiler"] == pytest.approx(5 * 2.5 / wall)
    assert found["profiler_kernels"] == pytest.approx((5 * 2.5 + 6 * 1.0) / wall)


def test_a_profile_of_something_else_is_refused():
    with pytest.raises(ValueError, match="6 copies to the host for 7 steps"):
        timeline.profiled_idle(profile(2.5), 7)
    events = profile(2.5)
    swapped = [{**e, "ts": 40.0} if e["args"]["correlation"] == 22 else e for e in events]  # step 2's, after step 3's
    with pytest.raises(ValueError, match="another order"):
        timeline.profiled_idle(swapped, 6)
    without = [e for e in events if e["args"]["correlation"] != 22]
    with pytest.raises(ValueError, match="steps without a kernel"):
        timeline.profiled_idle(without, 6)


@pytest.mark.parametrize("flags", ["--bs 0", "--new 4", "--check-new 4", "--check --device cpu"])
def test_senseless_flags_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        timeline.parse(flags.split())
    assert "error" in capsys.readouterr().err
