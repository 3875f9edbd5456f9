"""Records keep a phase's numbers, and the page shows them: shares, scales and totals against hand-made phases."""

import json
import math
import re
import subprocess
import sys

import pytest

from rollout.observe import report
from rollout.observe.breakdown import Breakdown
from rollout.observe.charts import columns, histogram, lines, short, ticks
from rollout.observe.metrics import PhaseMetrics
from rollout.observe.records import PhaseWriter, phase_record, read_phases

SECONDS = Breakdown(decode_s=4.0, tail_busy_s=2.0, bubble_s=1.0, tail_idle_s=1.0, exchange_s=0.5, learner_s=11.5)


def record(step: int = 1, **changes: object) -> dict:
    metrics = PhaseMetrics(
        generate_s=8.0,
        generated_tokens=400,
        completion_lengths=(100, 100, 200),
        decode_steps=200,
        row_steps=300,
        row_capacity=400,
        policy_version=step,
    )
    values = {
        "step": step,
        "reward": 0.25 * step,
        "finish_reasons": {"length": 1, "eos": 2},
        "versions": {step: 300, step - 1: 100},
        "memory_bytes": {"kv_bytes": 2 << 30, "free_bytes": 1 << 30},
    }
    return phase_record(metrics, SECONDS, **{**values, **changes})


# Records


def test_a_record_holds_the_phases_numbers(tmp_path):
    PhaseWriter(tmp_path / "new" / "run").write(record(3, ranks=2))
    (line,) = (tmp_path / "new" / "run" / "rollout.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["step"], found["mode"], found["reward"], found["ranks"]) == (3, "train", 0.75, 2)
    assert found["generated_tok_s"] == 50.0
    assert found["row_occupancy"] == 0.75
    assert found["kv_util"] is None  # NaN: no block was counted
    lengths = found["lengths"]
    assert (lengths["mean"], lengths["p50"], lengths["max"]) == (pytest.approx(400 / 3, rel=1e-4), 100, 200)
    assert sum(lengths["counts"]) == 3
    assert len(lengths["edges"]) == len(lengths["counts"]) + 1
    assert found["finish_reasons"] == {"eos": 2, "length": 1}
    assert found["versions"] == {"2": 100, "3": 300}
    assert math.fsum(found["seconds"].values()) == 20.0


def test_a_run_that_was_killed_in_a_line_goes_on(tmp_path):
    PhaseWriter(tmp_path).write(record(1))
    with (tmp_path / "rollout.jsonl").open("a") as file:
        file.write('{"step": 2, "mo')
    PhaseWriter(tmp_path).write(record(3))
    assert [phase["step"] for phase in read_phases(tmp_path)] == [1, 3]


def test_equal_lengths_have_one_bin_and_none_have_no_summary():
    one = phase_record(PhaseMetrics(completion_lengths=(7, 7)), Breakdown(), step=0)["lengths"]
    assert one["counts"] == [2]
    assert phase_record(PhaseMetrics(), Breakdown(), step=0)["lengths"] == {}


def test_no_file_and_no_phase_say_so(tmp_path):
    with pytest.raises(ValueError, match="--rollout_log"):
        read_phases(tmp_path)
    (tmp_path / "rollout.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no phase yet"):
        read_phases(tmp_path)


# Charts


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 21000, [0, 10000, 20000, 30000]), (0.3, 0.7, [0.3, 0.4, 0.5, 0.6, 0.7])],
)
def test_ticks_are_round_and_hold_what_is_between(low, high, marks):
    assert ticks(low, high) == pytest.approx(marks)


def test_ticks_of_a_constant():
    for value in (0.0, 5.0, -5.0):
        marks = ticks(value, value)
        assert marks[0] <= value <= marks[-1]
        assert len(marks) > 1


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (999, "999"), (5000, "5,000"), (21_000, "21k"), (1_230_000, "1.23M")]
)
def test_numbers_are_short(value, text):
    assert short(value) == text


def test_a_line_goes_from_the_first_value_to_the_last_and_breaks_where_there_is_none():
    svg = lines([1, 2, 3, 4, 5], {"reward": [0.0, 1.0, None, 1.0, 0.0]})
    paths = re.findall(r'<path d="M([^"]*)" fill="none"', svg)
    assert paths == ["46.0 166.0L137.0 8.0", "319.0 8.0L410.0 166.0"]
    assert "<title>reward, 2: 1</title>" in svg


def test_columns_stack():
    svg = columns([1, 2], {"a": [1, 3], "b": [3, 1], "never": [0, 0]})
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    assert heights == pytest.approx([158 / 4, 158 * 3 / 4, 158 * 3 / 4, 158 / 4], abs=0.1)
    tops = [float(y) for y in re.findall(r'<rect [^>]* y="([\d.]+)"', svg)]
    assert tops == pytest.approx([166 - 158 / 4, 166 - 158 * 3 / 4, 8, 8], abs=0.2)  # a, a, then b on top
    assert "never" not in svg


def test_nothing_to_draw_is_said():
    assert "nothing recorded" in lines([1.0], {"a": [None]})
    assert "nothing recorded" in columns([1.0], {"a": [0.0]})
    assert "nothing recorded" in histogram([], [])
    assert "<svg" in lines([1.0], {"a": [0.0]})  # a single zero is something


# The page


def test_the_page_shows_the_totals():
    html = report.page([record(i) for i in (1, 2, 3, 4)], title="run <1>")
    assert "run &lt;1&gt;" in html
    tiles = dict(re.findall(r'<div class="card"><b>([^<]*)</b><span>([^<]*)</span></div>', html))
    assert {name: value for value, name in tiles.items()} == {
        "reward, first to last tenth": "0.25 → 1",
        "tokens a second": "50",
        "tokens": "1,600",
        "completions": "12",
        "GPU idle in phases": "25%",  # 2 of 8 seconds
        "of the time, generating": "40%",  # 8 of 20
        "wall time": "80 s",
    }
    rows = re.findall(r"</i>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>", html)
    assert rows == [
        ("learner and rest", "46 s", "57.5%"),
        ("decode", "16 s", "20.0%"),
        ("tail, GPU busy", "8 s", "10.0%"),
        ("scheduling bubble", "4 s", "5.0%"),
        ("tail, GPU idle", "4 s", "5.0%"),
        ("weight exchange", "2 s", "2.5%"),
    ]
    assert "<title>tail, 2: 37.5%</title>" in html  # 3 of the 8 seconds that were no exchange and no learner
    assert "<title>one ago, 1: 100</title>" in html
    assert "<title>KV cache, 1: 2</title>" in html
    assert "<title>eos, 4: 2</title>" in html


def test_the_page_needs_nothing_from_elsewhere():
    html = report.page([record()], title="one")
    assert not re.search(r"https?:|<script|<link|url\(|@import|src=", html)
    assert 'name="viewport"' in html


def test_phases_without_a_reward_and_of_evaluation():
    html = report.page([record(1, reward=None), record(2, reward=None, mode="eval")], title="one")
    assert "1 phases of training, and 1 of evaluation" in html
    assert "40 s of wall time" in html  # both
    assert "nothing recorded" in html  # instead of rewards


def test_a_long_run_is_drawn_as_means_of_neighbours():
    phases = [record(i, reward=float(i % 2)) for i in range(1, 1001)]
    x, groups = report._grouped(phases)
    assert len(x) <= report.POINTS
    assert x[-1] == 1000
    assert sum(map(len, groups)) == 1000
    assert "<title>reward, 10: 0.5" not in report.page(phases, title="")  # groups of nine
    assert "<title>reward, 18: " in report.page(phases, title="")


def test_the_command_writes_the_page(tmp_path):
    PhaseWriter(tmp_path).write(record())
    command = [sys.executable, "-m", "rollout.observe.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "report.html")
    assert "Where time went" in (tmp_path / "report.html").read_text()
    assert report.main([str(tmp_path / "none")]) == 1
