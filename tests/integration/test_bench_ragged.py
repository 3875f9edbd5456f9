"""The benchmark of ragged lengths: what it draws, and a run on a CPU whose figures must agree."""

import json
import statistics

import pytest

from recipes import bench_ragged


def test_lengths_are_ragged_and_always_the_same():
    drawn = bench_ragged.lengths(4096, 3000)
    assert drawn == bench_ragged.lengths(4096, 3000)
    assert min(drawn) >= 1
    assert max(drawn) == 3000, "a long tail is cut"
    assert statistics.mean(drawn) == pytest.approx(1000, rel=0.1)
    assert statistics.median(drawn) < 0.8 * statistics.mean(drawn)


def test_a_tiny_run_adds_up(capsys):
    flags = "--model tiny --device cpu --bs 32 --prompt 5 --new 24 --times 3"
    report = bench_ragged.main(flags.split())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["requests"] == 96
    assert report["admission_rows"] == {"in batches": 2, "at once": 1}
    batches, once = report["results"]["in batches"], report["results"]["at once"]
    assert batches["prefill_steps"] < once["prefill_steps"]
    assert batches["row_occupancy"] <= once["row_occupancy"] <= 1.0
    for figures in (batches, once):
        assert figures["tok_s"] * figures["seconds"] == pytest.approx(96 * report["mean_length"], rel=1e-3)
        # the prefill step gives each completion's first token
        decoded = figures["row_occupancy"] * figures["decode_steps"] * 32
        assert decoded == pytest.approx(96 * report["mean_length"] - 96, rel=1e-3)
    assert report["gain"] == pytest.approx(batches["tok_s"] / once["tok_s"], rel=1e-3)


def test_senseless_sizes_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_ragged.main(["--times", "0"])
    assert "at least 1" in capsys.readouterr().err
