"""Wall time on a scripted clock goes to the part that it was scripted for, and adds up; a step's cost, by hand."""

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.counters import EngineCounters
from rollout.observe.breakdown import Breakdown, WallClock, format_breakdown
from rollout.observe.cost import ModelCost, bandwidth_share, decode_positions, flop_share, peak, phase_positions
from rollout.observe.metrics import PhaseMetrics
from tests.tiny_models import ragged_prompts, tiny


class Script:
    """A clock that is moved by hand."""

    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def steps(*script: tuple[str, int, float, float], max_rows: int = 8) -> EngineCounters:
    """Counters after steps of (kind, rows, start, end)."""
    counters = EngineCounters()
    for kind, rows, start_s, end_s in script:
        batch = SimpleNamespace(rows=np.arange(rows), prefill=None if kind == "decode" else object())
        counters.launched(batch, max_rows, 0, 1)
        counters.ran(batch, start_s, end_s)
    return counters


# The wall clock


def test_every_second_has_one_part():
    clock = Script()
    wall = WallClock(clock)
    clock.advance(1.0)  # the learner's
    with wall.part("exchange"):
        clock.advance(2.0)
    with wall.part("generate"):
        clock.advance(4.0)
        with wall.part("exchange"):  # within a phase
            clock.advance(8.0)
        clock.advance(16.0)
    first = wall.lap()
    assert first == {"generate": 20.0, "exchange": 10.0, "sleep": 0.0, "wake": 0.0, "learner": 1.0}
    with wall.part("sleep"):
        clock.advance(32.0)
    clock.advance(64.0)
    assert wall.lap() == {"generate": 0.0, "exchange": 0.0, "sleep": 32.0, "wake": 0.0, "learner": 64.0}
    assert sum(first.values()) + 96.0 == clock.now_s - 50.0


def test_parts_that_are_left_in_another_order():
    clock = Script()
    wall = WallClock(clock)
    one, two = wall.part("generate"), wall.part("generate")
    one.__enter__()
    clock.advance(1.0)
    two.__enter__()
    clock.advance(1.0)
    one.__exit__(None, None, None)
    clock.advance(1.0)
    with pytest.raises(RuntimeError), wall.part("wake"):
        clock.advance(1.0)
        raise RuntimeError
    clock.advance(1.0)
    two.__exit__(None, None, None)
    clock.advance(1.0)
    assert wall.lap() == {"generate": 4.0, "exchange": 0.0, "sleep": 0.0, "wake": 1.0, "learner": 1.0}


# What the device's seconds were spent on


def test_gaps_go_to_what_they_lie_beside():
    counters = steps(
        ("prefill", 8, 0.0, 1.0),
        ("decode", 8, 1.5, 2.5),  # after a prefill: admission
        ("decode", 8, 2.75, 3.75),  # bubble
        ("prefill", 2, 4.75, 5.0),  # before one
        ("decode", 4, 5.0, 6.0),  # half of the rows is not yet below half
        ("decode", 3, 6.125, 7.125),  # the tail: its gap and its step
        ("decode", 1, 7.25, 8.25),
    )
    wall = {"generate": 10.0, "exchange": 0.5, "sleep": 0.25, "wake": 0.125, "learner": 3.0}
    breakdown = Breakdown.of(wall, counters)
    assert breakdown == Breakdown(
        decode_s=3.0,
        prefill_s=1.25,
        bubble_s=0.25,
        admission_s=1.5,
        tail_busy_s=2.0,
        tail_idle_s=0.25,
        edges_s=10.0 - 8.25,
        exchange_s=0.5,
        sleep_s=0.25,
        wake_s=0.125,
        learner_s=3.0,
    )
    assert breakdown.wall_s == sum(wall.values()) == 13.875
    assert (breakdown.generate_s, breakdown.busy_s, breakdown.idle_s, breakdown.tail_s) == (10.0, 6.25, 2.0, 2.25)
    assert breakdown.idle_s == counters.idle_s
    assert breakdown.busy_s == counters.busy_s


def test_the_tail_begins_after_the_last_admission():
    before = [("prefill", 8, 0.0, 1.0), ("decode", 2, 1.0, 2.0), ("decode", 2, 2.5, 3.0)]
    assert steps(*before).tail_busy_s == 1.5
    assert steps(*before).tail_idle_s == 0.5
    more = steps(*before, ("prefill", 1, 3.0, 4.0), ("decode", 3, 4.25, 5.0))
    assert more.tail_busy_s == 0.75  # what was low before an admission was no tail
    assert more.tail_idle_s == 0.0  # and the gap after it is the admission's
    assert more.admission_s == 0.25


def test_the_tail_of_a_phase_that_ended_stays():
    counters = steps(("prefill", 8, 0.0, 1.0), ("decode", 2, 1.0, 2.0))
    counters.settle()
    counters.forget_last_step()
    for kind, start_s, end_s in (("prefill", 10.0, 11.0), ("decode", 11.0, 13.0)):
        batch = SimpleNamespace(rows=np.arange(1), prefill=None if kind == "decode" else object())
        counters.ran(batch, start_s, end_s)
    assert counters.tail_busy_s == 3.0
    assert counters.idle_s == counters.admission_s == 0.0  # between phases is nobody's gap


def test_breakdowns_add_up_and_are_logged_by_part():
    one = Breakdown(decode_s=1.0, tail_busy_s=2.0, tail_idle_s=0.5, learner_s=4.0)
    total = one + one
    assert total.wall_s == 15.0
    log = total.to_log()
    assert log["time/decode_s"] == 2.0
    assert log["time/tail_busy_s"] + log["time/tail_idle_s"] == 5.0
    assert math.fsum(log.values()) == 15.0, "a stack of them is as high as the wall time"
    lines = format_breakdown(total).splitlines()
    assert [line.split()[0] for line in lines] == ["learner", "tail,", "decode", "tail,", "wall"]
    assert lines[0].split()[-2:] == ["s", "53.3%"]


def test_a_workers_phases_add_up_to_its_wall_time():
    worker = RolloutWorker(
        model := tiny("llama"), EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20)
    )
    clock = Script()
    with worker:
        worker._wall = WallClock(clock)
        whole = Breakdown()
        for _ in range(2):
            clock.advance(100.0)
            worker.generate(ragged_prompts((5, 9, 7)), SamplingParams(max_tokens=6, ignore_eos=True))
            assert worker.breakdown.learner_s == 100.0
            assert worker.breakdown.prefill_s > 0.0
            assert worker.breakdown.busy_s == pytest.approx(worker.metrics.busy_s)
            assert worker.breakdown.busy_s + worker.breakdown.idle_s == pytest.approx(worker.metrics.span_s)
            whole += worker.breakdown
        assert worker.total_breakdown == whole
        assert whole.tail_busy_s == 0.0  # three of four rows

        worker._wall = WallClock()
        worker.sleep()
        worker.wake()
        worker.exchange(model)
        worker.generate(ragged_prompts((5,)), SamplingParams(max_tokens=6, ignore_eos=True))
        part = worker.breakdown
        assert min(part.sleep_s, part.wake_s, part.exchange_s, part.tail_busy_s) > 0.0
        assert part.decode_s == 0.0  # one row of four
        assert part.generate_s == pytest.approx(worker.metrics.generate_s, rel=0.2)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_phases_parts_add_up_to_its_wall_time(monkeypatch, overlap):
    """On one clock that goes on a second whenever somebody looks: what is lost or counted twice is seen."""
    reads = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(reads)))
    config = EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20, overlap=overlap)
    with RolloutWorker(model := tiny("llama"), config) as worker:
        worker._wall = WallClock(time.perf_counter)
        ended_s = worker._wall._since_s
        for lengths in [(5, 9, 7, 11, 3, 12), (5, 9), (6, 6, 6)]:
            worker.sleep()
            worker.wake()
            worker.exchange(model)
            worker.generate(ragged_prompts(lengths), SamplingParams(max_tokens=6, ignore_eos=True))
            before_s, ended_s = ended_s, worker._wall._since_s
            parts = worker.breakdown.parts()
            assert math.fsum(parts.values()) == ended_s - before_s
            assert min(parts[name] for name in ("sleep", "wake", "exchange", "learner", "prefill", "edges")) > 0.0
            assert parts["decode"] + parts["tail_busy"] > 0.0


# What a step costs

LLAMA_8B = ModelCost(num_layers=32, heads=32, kv_heads=8, head_dim=128, matmul_params=7_504_924_672)


def test_the_bytes_and_operations_of_a_step_by_hand():
    assert LLAMA_8B.kv_bytes_per_position == 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert LLAMA_8B.weight_bytes == 15_009_849_344
    assert LLAMA_8B.decode_bytes(1, 32 * 1024) == 15_009_849_344 + 4_294_967_296
    # one token at position 1000: 15.0 G for the weights, 4 x 32 x 32 x 128 x 1000 for attention
    assert LLAMA_8B.flops(1, 1000) == 15_009_849_344 + 524_288_000
    small = ModelCost(num_layers=1, heads=2, kv_heads=1, head_dim=4, matmul_params=10, dtype_bytes=4, kv_dtype_bytes=1)
    assert (small.decode_bytes(3, 5), small.flops(3, 5)) == (3 * 40 + 5 * 8, 3 * 20 + 5 * 32)


def test_the_floor_of_the_8b_shape_is_a_full_share():
    # 32 rows at 1K: 19.3 GB at 4.3 TB/s are 4.49 ms
    read = LLAMA_8B.decode_bytes(1, 32 * 1024)
    assert bandwidth_share(read, 4.489e-3, 4.3e12) == pytest.approx(1.0, abs=1e-3)
    assert bandwidth_share(read, 8.978e-3, 4.3e12) == pytest.approx(0.5, abs=1e-3)
    # 32 tokens in 4.49 ms are 0.5 TFLOP of 989: decode is bound by memory
    assert flop_share(LLAMA_8B.flops(32, 32 * 1024), 4.489e-3, 989e12) == pytest.approx(0.112, abs=1e-3)
    assert math.isnan(bandwidth_share(1.0, 0.0, 1.0))


def test_a_gpus_peak_is_that_of_the_longest_name_that_fits():
    assert peak("NVIDIA H200") == (4.8e12, 989e12)
    assert peak("NVIDIA GH200 480GB")[0] == 4.0e12, "which has an H100's memory, 96 GB of it"
    assert peak("NVIDIA H100 80GB HBM3")[0] == 3.35e12
    assert peak("NVIDIA H100 PCIe")[0] == 2.0e12
    assert peak("NVIDIA A100-SXM4-80GB")[0] == 2.039e12
    assert peak("cpu") == (0.0, 0.0)


def test_a_phase_knows_what_its_steps_had_to_read_and_compute(monkeypatch):
    monkeypatch.setattr("rollout.calls.peak", lambda name: (1e9, 1e10))
    config = EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20)
    with RolloutWorker(model := tiny("llama"), config) as worker:
        worker.generate(ragged_prompts((5, 9)), SamplingParams(max_tokens=6, ignore_eos=True))
        metrics = worker.metrics
    weights = sum(p.numel() for p in model.parameters()) - 128 * 64  # all but the input embedding
    positions = sum(prompt + i for prompt in (5, 9) for i in range(1, 6))
    assert metrics.decode_steps == 5
    assert metrics.decode_bytes == 4 * (
        5 * weights + positions * 2 * 2 * 2 * 16
    )  # float32: layers, K and V, heads, size
    assert metrics.decode_flops == 2 * weights * 2 * 5 + 4 * 2 * 4 * 16 * positions
    log = metrics.to_log()
    assert log["perf/decode_mbu"] == pytest.approx(metrics.decode_bytes / metrics.decode_s / 1e9)
    assert log["perf/decode_mfu"] == pytest.approx(metrics.decode_flops / metrics.decode_s / 1e10)
    assert log["perf/decode_read_tb_s"] == pytest.approx(metrics.decode_bytes / metrics.decode_s / 1e12)
    assert PhaseMetrics.merge([metrics, metrics], concurrent=True).decode_mbu == pytest.approx(metrics.decode_mbu)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen3_moe"])
def test_where_a_steps_cost_depends_on_more_nothing_is_claimed(name):
    config = EngineConfig(max_rows=4, max_model_len=64, block_size=8, kv_cache_bytes=1 << 20)
    with RolloutWorker(tiny(name), config) as worker:
        worker.generate(ragged_prompts((5,)), SamplingParams(max_tokens=3))
        assert not any(key.startswith("perf/decode") for key in worker.metrics.to_log())


@pytest.mark.parametrize(("prompt", "new"), [(5, 0), (5, 1), (5, 2), (7, 30)])
def test_positions_are_those_that_each_step_attends_to(prompt, new):
    assert decode_positions(prompt, new) == sum(prompt + i for i in range(1, new))


def test_positions_of_a_phase():
    assert phase_positions([(5, 2), (7, 3)]) == 6 + 8 + 9
