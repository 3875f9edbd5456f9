"""The handover benchmark on a CPU: its parts in order, figures that agree, and no memory lost over many phases."""

import json

import pytest

from recipes import bench_handover


@pytest.mark.parametrize("weights", ["shared", "copied"])
def test_a_tiny_run_adds_up(capsys, weights):
    report = bench_handover.main(f"--model tiny --device cpu --phases 3 --rows 2 --new 4 --{weights}".split())
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == report
    assert [line.rsplit(maxsplit=3)[0] for line in printed if line.count(".") == 3][-6:] == list(bench_handover.PARTS)
    assert report["weights"] == weights
    assert report["freed_bytes"] == 0, "PyTorch keeps no reserve on a CPU"
    assert (report["copy_x_floor"] is not None) == (weights == "copied")
    assert report["captured_again"] == 0
    assert set(report["median_ms"]) == set(report["free_bytes"]) == set(bench_handover.PARTS)
    parts = report["median_ms"]
    assert 0.0 < report["switch_ms"] <= 3 * (parts["sleep"] + parts["exchange"] + parts["wake"])


def test_growth_is_what_is_missing_at_the_end():
    steady = [100] * 40
    assert bench_handover.growth_bytes(steady) == 0
    assert bench_handover.growth_bytes([90, 80, *steady]) == 0, "warming up isn't growth"
    assert bench_handover.growth_bytes(list(range(1000, 0, -1))) == 800
    assert bench_handover.growth_bytes([1, 2]) == 0


def test_growth_over_many_phases_is_an_error(monkeypatch):
    monkeypatch.setattr(bench_handover, "JUDGED_PHASES", 2)
    monkeypatch.setattr(bench_handover, "growth_bytes", lambda free_after: (32 << 20) + 1)
    flags = "--model tiny --device cpu --rows 2 --prompt 4 --new 2 --phases 2"
    with pytest.raises(RuntimeError, match=r"33554433 bytes of memory less are free asleep after 2 phases"):
        bench_handover.main(flags.split())


def test_200_phases_leave_no_memory_behind():
    flags = "--model tiny --device cpu --phases 200 --rows 2 --prompt 4 --new 2"
    report = bench_handover.main(flags.split())
    assert report["weights"] == "shared"
    assert report["growth_bytes"] < 8 << 20
    assert report["captured_again"] == 0
