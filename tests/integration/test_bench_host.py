"""The host benchmark: a run on a CPU whose parts add up."""

import json

import pytest

from recipes import bench_host


def test_a_tiny_run_adds_up(capsys):
    report = bench_host.main(["--rows", "3", "8", "--new", "16", "--device", "cpu"])
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == report
    assert [line.split()[0] for line in printed[1:4]] == ["rows", "3", "8"]
    assert set(report["us"]) == {"3", "8"}
    for figures in report["us"].values():
        parts = [figures[name] for name in bench_host.PARTS]
        assert min(parts) > 0.0
        assert figures["host"] == pytest.approx(sum(parts), rel=1e-3)
        assert figures["launch"] > 0.5 * figures["on device"], "on a CPU the model runs within the launch"


@pytest.mark.parametrize("flags", ["--rows 0", "--rows 4 --new 4"])
def test_senseless_sizes_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        bench_host.main(flags.split())
    assert "at least" in capsys.readouterr().err
