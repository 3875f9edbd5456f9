"""Rates come from sums, percentiles from lengths, and the log has the promised names."""

import dataclasses
import math

import pytest

from rollout.observe.metrics import PhaseMetrics, RunTotals, format_summary

LOG_NAMES = {
    "rollout/generated_tok_s",
    "rollout/prefill_tok_s",
    "rollout/generate_s",
    "rollout/gpu_idle_frac",
    "rollout/row_occupancy",
    "rollout/kv_util",
    "rollout/graph_captures_total",
    "rollout/preemptions_total",
    "rollout/dropped_tokens",
    "rollout/policy_version",
    "rollout/generated_tokens",
    "rollout/prefill_tokens",
    "rollout/completion_length_p50",
    "rollout/completion_length_p90",
    "rollout/completion_length_p99",
    "perf/weight_sync_s",
    "perf/decode_read_tb_s",
    "perf/decode_mbu",
    "perf/decode_mfu",
}


def phase(**changes: object) -> PhaseMetrics:
    base = PhaseMetrics(
        generate_s=4.0,
        generated_tokens=200,
        prefill_tokens=60,
        completion_lengths=(20, 80, 100),
        decode_steps=50,
        prefill_steps=2,
        decode_s=3.0,
        prefill_s=0.5,
        busy_s=3.5,
        span_s=3.8,
        row_steps=150,
        row_capacity=400,
        block_steps=520,
        block_capacity=5200,
        dropped_tokens=3,
        graph_captures_total=4,
        preemptions_total=1,
        policy_version=7,
        weight_sync_s=0.25,
        decode_bytes=6 * 10**12,
        decode_flops=15 * 10**13,
        peak_bytes_s=4e12,
        peak_flops_s=1e15,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_log_has_every_promised_name_with_its_value():
    log = phase().to_log()
    assert set(log) == LOG_NAMES
    assert all(type(value) is float for value in log.values())
    assert log["rollout/generated_tok_s"] == 50.0
    assert log["rollout/prefill_tok_s"] == 120.0
    assert log["rollout/generate_s"] == 4.0
    assert log["rollout/gpu_idle_frac"] == pytest.approx(0.3 / 3.8)
    assert log["rollout/row_occupancy"] == 0.375
    assert log["rollout/kv_util"] == 0.1
    assert log["rollout/dropped_tokens"] == 3
    assert log["rollout/policy_version"] == 7
    assert log["rollout/completion_length_p50"] == 80
    assert log["perf/weight_sync_s"] == 0.25
    assert log["perf/decode_read_tb_s"] == 2.0
    assert log["perf/decode_mbu"] == 0.5
    assert log["perf/decode_mfu"] == pytest.approx(0.05)


def test_what_a_phase_cannot_tell_is_nan_and_not_logged():
    empty = PhaseMetrics()
    assert math.isnan(empty.generated_tok_s)
    assert math.isnan(empty.gpu_idle_frac)
    assert math.isnan(empty.length_percentile(50))
    log = empty.to_log()
    assert not any(math.isnan(value) for value in log.values())
    assert "rollout/gpu_idle_frac" not in log
    assert "rollout/completion_length_p50" not in log
    assert log["rollout/generated_tokens"] == 0


@pytest.mark.parametrize(
    ("lengths", "percent", "expected"),
    [
        ((5,), 50, 5),
        (range(1, 101), 50, 50),
        (range(1, 101), 90, 90),
        (range(100, 0, -1), 99, 99),
        ((1, 1, 1, 16384), 50, 1),
        ((1, 1, 1, 16384), 90, 16384),
    ],
)
def test_percentile_is_a_length_that_occurred(lengths, percent, expected):
    assert phase(completion_lengths=tuple(lengths)).length_percentile(percent) == expected


def test_idle_share_stays_in_range_when_clocks_round():
    assert phase(busy_s=3.8000001, span_s=3.8).gpu_idle_frac == 0.0


def test_merging_phases_adds_seconds_and_keeps_the_last_counter():
    short = phase(generate_s=1.0, generated_tokens=10, completion_lengths=(10,), busy_s=0.1, span_s=1.0)
    later = phase(graph_captures_total=6, preemptions_total=2, policy_version=8)
    merged = PhaseMetrics.merge([short, later])
    assert merged.generate_s == 5.0
    assert merged.generated_tok_s == 210 / 5.0  # not the mean of 10 and 50
    assert merged.completion_lengths == (10, 20, 80, 100)
    assert merged.gpu_idle_frac == pytest.approx(1 - 3.6 / 4.8)
    assert merged.weight_sync_s == 0.5
    assert (merged.graph_captures_total, merged.preemptions_total, merged.policy_version) == (6, 2, 8)


def test_merging_ranks_takes_the_slowest_and_adds_the_counters():
    merged = PhaseMetrics.merge([phase(), phase(generate_s=8.0, weight_sync_s=0.5, row_steps=400)], concurrent=True)
    assert merged.generate_s == 8.0
    assert merged.generated_tok_s == 50.0
    assert merged.weight_sync_s == 0.5
    assert merged.row_occupancy == 550 / 800
    assert (merged.graph_captures_total, merged.preemptions_total, merged.policy_version) == (8, 2, 7)


def test_merging_one_changes_nothing_and_none_is_an_error():
    assert PhaseMetrics.merge([phase()]) == phase()
    assert PhaseMetrics.merge([phase()], concurrent=True) == phase()
    with pytest.raises(ValueError, match="at least one"):
        PhaseMetrics.merge([])


def test_merge_covers_every_field():
    twice = PhaseMetrics.merge([phase(), phase()])
    for field in dataclasses.fields(PhaseMetrics):
        assert getattr(twice, field.name) != field.default, f"merge loses {field.name}"


def test_totals_add_phases_and_exchanges():
    totals = RunTotals()
    totals.add_exchange(0.25, policy_version=1)
    totals.add(phase(policy_version=1))
    totals.add_exchange(0.5, policy_version=2)
    totals.add(phase(policy_version=1, graph_captures_total=4, busy_s=1.9, span_s=3.8))
    assert (totals.phases, totals.exchanges, totals.completions) == (2, 2, 6)
    assert totals.generated_tokens == 400
    assert totals.generated_tok_s == 50.0
    assert totals.weight_sync_s == 0.75
    assert totals.policy_version == 2
    assert totals.graph_captures == 4  # counted since the engine was made, so not added
    assert totals.gpu_idle_frac == pytest.approx(1 - 5.4 / 7.6)
    assert totals.mean_length == 400 / 6


def test_summary_lines_up_and_says_the_figures():
    totals = RunTotals()
    totals.add(phase(generated_tokens=1_234_567))
    lines = format_summary(totals).splitlines()
    table = {line[:24].strip(): line[24:].split() for line in lines}
    assert table["tokens generated"] == ["1,234,567"]
    assert table["throughput"] == ["308,641.8", "tokens/s"]
    assert table["device idle"] == ["7.89", "%"]
    assert {line.index(line[24:].split()[0]) + len(line[24:].split()[0]) for line in lines} == {24 + 9}


def test_summary_of_nothing_shows_dashes():
    table = {line[:24].strip(): line[24:].split() for line in format_summary(RunTotals()).splitlines()}
    assert table["phases"] == ["0"]
    assert table["throughput"][0] == "-"
    assert table["device idle"][0] == "-"
