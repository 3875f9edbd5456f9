"""The decode benchmark: its arithmetic against known shapes, and a run on a CPU whose figures must agree."""

import json
import shlex
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes import bench_decode
from rollout.observe import Timeline


@pytest.mark.parametrize(
    ("shape", "gigabytes", "kv_bytes"),
    [
        # 8.03B parameters less the input embedding; two bytes each
        ("8b", 2 * (8.0303e9 - 128256 * 4096) / 1e9, 2 * 32 * 8 * 128 * 2),
        # 1.72B with the tied embedding read as the head
        ("1.7b", 2 * 1.7206e9 / 1e9, 2 * 28 * 8 * 128 * 2),
    ],
)
def test_the_bytes_of_a_step(shape, gigabytes, kv_bytes):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(bench_decode.SHAPES[shape](), dtype=torch.bfloat16)
    model.tie_weights()
    assert bench_decode.weight_bytes(model) / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    assert bench_decode.kv_bytes_per_token(model) == kv_bytes


def test_a_tiny_run_adds_up(capsys, tmp_path):
    calls = tmp_path / "calls"
    peer = tmp_path / "peer.py"
    peer.write_text(
        "import json, sys\n"
        f"open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "print('a line of log')\n"
        "figures = {'ms_per_step': 50.0, 'median_step_ms': 40.0, 'decode_ms_per_step': 45.0}\n"
        "print(json.dumps({'mode': 'async', **figures}))\n"
    )
    trace = tmp_path / "run.trace.json"
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(peer))} {{model}} {{bs}} {{prompt}} {{new}}"
    flags = f"--model tiny --device cpu --bs 3 --prompt 5 --new 8 --overlap both --repeats 2 --trace {trace}"
    whole = f'{shlex.quote(sys.executable)} -c "print(\'{{{{\\"ms_per_step\\": 20}}}}\')"'
    peers = ["--peer", "other", "--peer-command", command, "--peer", "third", "--peer-command", whole]
    report = bench_decode.main([*flags.split(), *peers])

    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == report
    assert report["gpu"] == "cpu"
    assert set(report["results"]) == {"overlap", "no overlap", "other async", "third"}
    for mode in ("overlap", "no overlap"):
        figures = report["results"][mode]
        assert figures["tokens"] == 3 * 8
        assert figures["tok_s"] * figures["total_s"] == pytest.approx(24, rel=1e-3)
        assert figures["ms_per_step"] * 8 == pytest.approx(figures["total_s"] * 1e3, rel=1e-3)
        assert figures["decode_steps"] == 7  # the prefill step gives each row's first token
        assert figures["row_occupancy"] == 1.0
        assert figures["prefill_steps"] == 1
        assert figures["captures_while_timed"] == 0
        assert figures["counted_steps"] == 5
        assert figures["mean_kv"] == 9.0  # prompts of 5, and 2 to 6 decoded tokens
        assert 0.0 <= figures["idle_share"] <= 1.0
        assert 0.0 <= figures["idle_share_phase"] <= 1.0
        assert 0.0 < figures["device_ms"] <= figures["step_ms"] * 1.5
        assert figures["x_floor"] == pytest.approx(figures["step_ms"] / report["floor_ms"], rel=1e-3)
        assert 0.0 < figures["host_us"] < figures["total_s"] * 1e6
    assert report["mbu"] == report["results"]["overlap"]["mbu"]
    assert report["floor_ms"] == pytest.approx(
        (report["weight_bytes"] + report["kv_bytes"]) / report["copy_tb_s"] / 1e12 * 1e3, rel=1e-3
    )
    assert report["kv_bytes"] == 3 * (5 + 4) * 2 * 2 * 2 * 16 * 4

    assert calls.read_text().splitlines() == ["tiny 3 5 8"] * 2
    other = report["results"]["other async"]
    assert (other["step_ms"], other["mean_step_ms"], other["ms_per_step"], other["tok_s"]) == (40.0, 45.0, 50.0, 60.0)
    assert other["x_floor"] == pytest.approx(40.0 / report["floor_ms"], rel=1e-3)
    assert report["results"]["third"] == {"ms_per_step": 20.0, "tok_s": 150.0}
    ours = report["results"]["overlap"]
    assert report["ours_over"]["other async"] == pytest.approx(
        {
            "step_ms": ours["step_ms"] / 40,
            "mean_step_ms": ours["mean_step_ms"] / 45,
            "ms_per_step": ours["ms_per_step"] / 50,
        },
        rel=1e-3,
    )
    assert report["ours_over"]["third"] == pytest.approx({"ms_per_step": ours["ms_per_step"] / 20}, rel=1e-3)

    events = json.loads(trace.read_text())["traceEvents"]
    steps = {e["args"]["step"] for e in events if e["ph"] == "X" and e["name"].startswith("decode")}
    assert len(steps) == 7


def test_only_steps_with_all_rows_are_counted():
    timeline = Timeline(64)
    # two of four rows decode three tokens, the others join, seven steps with all rows, another prefill, three more
    names = ["prefill 2", *["decode 2"] * 3, "prefill 2", *["decode 4"] * 7, "prefill 1", *["decode 4"] * 3, "decode 2"]
    seconds = [5.0, *[1.0] * 3, 5.0, *[2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], 9.0, *[4.0, 3.0, 7.0], 1.0]
    at = 0.0
    for name, length in zip(names, seconds, strict=True):
        timeline.device("compute", name, 0, at, at + length - 0.5)
        at += length
    counted = bench_decode.steady(timeline, 4)
    assert len(counted.spans_s) == 8  # ten, less one at either end
    assert counted.periods_s.tolist() == [3.0] * 5 + [4.0]  # the prefill between two steps is in no period
    # a row has decoded 1.5 tokens when all are there; counted are the 2nd to the 9th step after that
    assert counted.mean_tokens == 1.5 + 5.5


def test_the_hosts_parts_are_means_within_the_window():
    now = iter([0.0, 9.0, 10.0, 12.0, 12.0, 20.0, 20.0, 24.0, 30.0, 99.0])
    timeline = Timeline(64, clock=lambda: next(now))
    for name in ("fill", "fill", "wait", "fill", "fill"):
        with timeline.host(name):
            pass
    assert bench_decode.host_us(timeline, 10.0, 30.0) == {"fill": 3e6}


def test_the_run_in_the_middle_is_reported():
    runs = [{"ms_per_step": ms, "step_ms": 10 - ms} for ms in (3.0, 1.0, 2.0)]
    assert bench_decode.middle(runs) == {"ms_per_step": 2.0, "step_ms": 8.0}
    assert bench_decode.middle(runs[:2]) == {"ms_per_step": 1.0, "step_ms": 9.0}


def test_a_peer_that_fails_ends_the_run(capsys):
    flags = "--model tiny --device cpu --bs 1 --prompt 4 --new 4"
    command = f"{shlex.quote(sys.executable)} -c 'raise SystemExit(3)'"
    with pytest.raises(SystemExit, match="the peer ended with 3"):
        bench_decode.main([*flags.split(), "--peer", "other", "--peer-command", command])


@pytest.mark.parametrize(
    "flags", ["--peer a", "--peer-command a", "--peer a --peer-command b --peer a --peer-command c"]
)
def test_each_peer_has_a_name_and_a_command(flags, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(flags.split())
    assert "a name of its own" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--bs 0", "--new 2", "--repeats 0"])
def test_senseless_sizes_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(flags.split())
    assert "at least" in capsys.readouterr().err
