"""The loop: who waits for whom, what is made once, and what happens when it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine import engine as engine_module, kernels
from rollout.engine.batch import PrefillSize
from rollout.engine.engine import Engine
from rollout.engine.graphs import PREFILL_TOKENS, GraphKey, row_buckets
from rollout.engine.models import build_module
from rollout.engine.scheduler import Ended
from rollout.types import Request, SamplingParams
from tests.fakes import FakeEvent, FakeStreams
from tests.tiny_models import tiny


def make(**config: Any) -> Engine:
    sizes = {"block_size": 8, "max_rows": 4, "max_model_len": 64}
    module = build_module(tiny("llama"), device="cpu", dtype=torch.float32)
    return Engine(module, EngineConfig(**{**sizes, **config}))


def request(length: int, max_tokens: int = 4, group: int = 0, **params: Any) -> Request:
    ids = tuple(range(10, 10 + length))
    return Request(ids, SamplingParams(max_tokens=max_tokens, **params), key=(group, 1), group=group)


def finish(engine: Engine) -> list[Ended]:
    ended = []
    while engine.has_work:
        ended += engine.step()
    return ended


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    streams = FakeStreams()
    monkeypatch.setattr(engine_module, "make_streams", lambda device: streams)
    return streams


def name_events(engine: Engine) -> None:
    for slot, letter in zip(engine.slots, "AB", strict=False):
        for name in ("h2d_start", "h2d_done", "compute_start", "compute_done", "d2h_done"):
            event = getattr(slot, name)
            assert isinstance(event, FakeEvent)
            event.name = f"{name}[{letter}]"


def launch(letter: str, *, prefill: bool = False) -> list[str]:
    """One recorder an event, and its named waiters."""
    beside = [f"beside compute: compute_start[{letter}]", "compute waits for what is beside"]
    return [
        "h2d:",
        f"h2d records h2d_start[{letter}]",
        f"h2d records h2d_done[{letter}]",
        f"compute waits h2d_done[{letter}]",
        "compute:",
        *([f"compute records compute_start[{letter}]"] if prefill else beside),
        f"compute records compute_done[{letter}]",
        f"d2h waits compute_done[{letter}]",
        "d2h:",
        f"d2h records d2h_done[{letter}]",
    ]


def test_overlapped_steps_launch_before_they_wait(fakes: FakeStreams) -> None:
    engine = make()
    name_events(engine)
    engine.add([request(5)])
    assert fakes.log[-1] == "all wait current", "a phase begins after the learner's last write"
    fakes.log.clear()
    ended = [engine.step() for _ in range(4)]
    assert fakes.log == [
        *launch("A", prefill=True),
        *launch("B"),
        "host waits d2h_done[A]",
        *launch("A"),
        "host waits d2h_done[B]",
        *launch("B"),
        "host waits d2h_done[A]",
    ]
    fakes.log.clear()
    assert not any(ended)
    (last,) = engine.step()
    assert fakes.log == ["host waits d2h_done[B]"]
    assert len(last.completion.token_ids) == 4


def test_in_turns_each_step_is_waited_for(fakes: FakeStreams) -> None:
    engine = make(overlap=False)
    assert len(engine.slots) == 1
    name_events(engine)
    engine.add([request(5)])
    fakes.log.clear()
    engine.step()
    engine.step()
    wait = "host waits d2h_done[A]"
    assert fakes.log == [*launch("A", prefill=True), wait, *launch("A"), wait]


def test_a_step_starts_inside_of_its_graph(fakes: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching a graph takes the host a while, in which an idle device stays idle: that is no part of the step."""
    engine = make(use_graphs=True)
    start_decode, forward = kernels.start_decode, engine.runner.forward

    def logged_start(*args: Any) -> Tensor:
        fakes.log.append("first kernel")
        return start_decode(*args)

    def logged_forward(*args: Any) -> Tensor:
        fakes.log.append("model")
        return forward(*args)

    monkeypatch.setattr(kernels, "start_decode", logged_start)
    engine.runner.forward = logged_forward
    replay = engine.steps.graphs.replay

    def logged_replay(key: GraphKey) -> None:
        fakes.log.append(f"graph of slot {key.slot} begins")
        replay(key)
        fakes.log.append("graph ends")

    monkeypatch.setattr(engine.steps.graphs, "replay", logged_replay)
    name_events(engine)
    engine.add([request(5)])
    engine.step()
    fakes.log.clear()
    engine.step()
    engine.step()

    def computed(slot: int, letter: str) -> list[str]:
        return [
            f"compute waits h2d_done[{letter}]",
            "compute:",
            f"graph of slot {slot} begins",
            "first kernel",
            f"beside compute: compute_start[{letter}]",
            "model",
            "compute waits for what is beside",
            "graph ends",
            f"compute records compute_done[{letter}]",
        ]

    ours = [line for line in fakes.log if line.startswith(("beside", "compute", "first", "graph", "model"))]
    assert ours == [*computed(1, "B"), *computed(0, "A")]


def test_a_slot_is_filled_only_after_its_step_was_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.add([request(5, max_tokens=12)])
    busy: set[int] = set()
    fill, collect = engine._fill, engine._collect

    def watched_fill(slot: Any, batch: Any) -> Any:
        assert slot.index not in busy, "a slot in flight is written to"
        busy.add(slot.index)
        return fill(slot, batch)

    def watched_collect() -> Any:
        busy.discard(engine._in_flight[0][0].index)
        return collect()

    monkeypatch.setattr(engine, "_fill", watched_fill)
    monkeypatch.setattr(engine, "_collect", watched_collect)
    (ended,) = finish(engine)
    assert len(ended.completion.token_ids) == 12


def addresses(engine: Engine) -> list[int]:
    tensors = [engine.kv, engine.runner.block_table, engine.runner.row_state, *engine.module.parameters()]
    tensors += [t for s in engine.slots for t in (s.host_in, s.device_in, s.host_out, s.device_out)]
    return [t.data_ptr() for t in tensors]


def test_three_phases_capture_once_and_move_nothing() -> None:
    engine = make(use_graphs=True)
    before = addresses(engine), engine.streams, list(engine.slots), engine.steps.graphs.keys
    captures = (len(row_buckets(4)) + len(PREFILL_TOKENS)) * 2
    assert engine.steps.graphs.captures == captures
    for version in range(1, 4):
        engine.add([request(n, max_tokens=6, group=n) for n in (3, 9, 5)])
        assert len(finish(engine)) == 3
        engine.publish_weights(version)
        assert engine.steps.graphs.captures == captures
    assert (addresses(engine), engine.streams, list(engine.slots), engine.steps.graphs.keys) == before


def test_filtered_steps_are_captured_once_when_first_asked_for() -> None:
    engine = make(use_graphs=True)
    first = engine.steps.graphs.captures
    engine.add([request(5, max_tokens=9)])
    engine.step()
    engine.step()
    engine.add([request(7, top_k=3, group=1)])  # while a step is in flight
    assert engine.steps.graphs.captures == 2 * first
    assert sorted(e.request.group for e in finish(engine)) == [0, 1]
    engine.add([request(7, top_p=0.5, group=2)])
    finish(engine)
    assert engine.steps.graphs.captures == 2 * first


def test_graph_keys_and_sizes() -> None:
    assert row_buckets(4) == [1, 2, 4]
    assert row_buckets(5) == [1, 2, 4, 5]
    assert row_buckets(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert row_buckets(600) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 600]
    for most in (1, 64, 100, 256, 1000, 1024):
        sizes = row_buckets(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    keys = {GraphKey(slot, rows, False) for slot in (0, 1) for rows in (1, 2, 4)}
    keys |= {GraphKey(slot, 4, False, PrefillSize(tokens, 4, 8)) for slot in (0, 1) for tokens in PREFILL_TOKENS}
    assert set(make(use_graphs=True).steps.graphs.keys) == keys
    assert make(use_graphs=False).steps.graphs.keys == []


def test_one_graph_serves_every_length() -> None:
    """A key without the KV length is right only because no kernel bakes one in (transformers #45323)."""
    engine = make(use_graphs=True, max_rows=1)
    engine.add([request(5, max_tokens=50, ignore_eos=True, temperature=0.0)])
    (long,) = finish(engine)
    eager = make(use_graphs=False, max_rows=1)
    eager.add([request(5, max_tokens=50, ignore_eos=True, temperature=0.0)])
    (expected,) = finish(eager)
    assert long.completion.token_ids == expected.completion.token_ids
    assert len({key.rows for key in engine.steps.graphs.keys}) == 1


def test_a_broken_loop_breaks_for_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.add([request(5)])

    def broken(*_: object, **__: object) -> None:
        raise OSError("the device went away")

    monkeypatch.setattr(engine.runner, "decode", broken)
    engine.step()
    with pytest.raises(OSError, match="went away"):
        engine.step()
    for again in (engine.step, lambda: engine.add([request(5)]), lambda: engine.check([request(5)]), engine.drain):
        with pytest.raises(RuntimeError, match="make a new worker") as caught:
            again()
        assert isinstance(caught.value.__cause__, OSError)


def test_weights_change_only_when_nothing_flies() -> None:
    engine = make()
    engine.add([request(5)])
    engine.step()
    with pytest.raises(AssertionError, match="drain"):
        engine.publish_weights(1)
    engine.drain()
    engine.publish_weights(1)
    (ended,) = finish(engine)
    assert [tuple(run) for run in ended.completion.versions] == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_cache_bytes": 100}, "two blocks of 8 positions take"),
        ({"max_model_len": 1 << 20}, "the model has 256 positions"),
    ],
)
def test_what_does_not_fit_is_said(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**config)


def test_a_model_that_keeps_arguments_to_itself_is_refused() -> None:
    module = build_module(tiny("llama"), device="cpu", dtype=torch.float32)
    inner = module.model.forward
    module.model.forward = lambda *args, paged=None, **kwargs: inner(*args, **kwargs)
    with pytest.raises(ValueError, match="pass keyword arguments"):
        Engine(module, EngineConfig(block_size=8, max_rows=2))


def test_a_layer_without_paged_attention_is_refused() -> None:
    module = build_module(tiny("llama"), device="cpu", dtype=torch.float32)
    skipped = module.model.layers[1].self_attn
    skipped.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"layers \[1\] of LlamaForCausalLM"):
        Engine(module, EngineConfig(block_size=8, max_rows=2))


def test_counters_are_sums_of_steps() -> None:
    engine = make()
    engine.add([request(n, max_tokens=5, group=n, ignore_eos=True) for n in (3, 9)])
    finish(engine)
    counters = engine.counters
    assert (counters.prefill_steps, counters.decode_steps) == (1, 4)
    assert (counters.row_steps, counters.row_capacity) == (8, 16)
    assert counters.block_capacity == 5 * engine.scheduler.blocks.capacity
    assert counters.busy_s > 0.0
    np.testing.assert_allclose(counters.busy_s, counters.decode_s + counters.prefill_s)
