"""Sleep, wake and pause through the worker: memory goes and comes, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout import EngineConfig, MemoryReport, RolloutWorker, SamplingParams, VersionRun
from rollout.engine import memory
from tests.tiny_models import ragged_prompts, tiny, tokens

PROMPTS = ragged_prompts((5, 12, 3))
SIZES: dict[str, Any] = {"block_size": 8, "max_rows": 4, "max_model_len": 64}
CONFIG = EngineConfig(**SIZES)
PARAMS = SamplingParams(n=2, max_tokens=20, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def worker(model: Any) -> Iterator[RolloutWorker]:
    with RolloutWorker(model, CONFIG) as worker:
        yield worker


@pytest.fixture
def free_blocks(monkeypatch: pytest.MonkeyPatch, worker: RolloutWorker) -> Callable[[int], None]:
    """Sets how many blocks' memory the device has free."""
    block_bytes = worker.engine.kv_memory.block_bytes

    def set_free(blocks: int) -> None:
        monkeypatch.setattr(memory, "device_free_bytes", lambda device: blocks * block_bytes)

    return set_free


def by_place(items: Any) -> dict[tuple[int, int], list[int]]:
    return {(g, s): c.token_ids for g, s, c in items}


def worker_mail(worker: RolloutWorker, stream: Any) -> list[Any]:
    """What has ended already, and can be had from the only stream whatever the engine does."""
    return [next(stream) for _ in range(sum(len(ended) for ended in worker._mail._ended.values()))]


def places(groups: Any) -> dict[tuple[int, int], list[int]]:
    return by_place((g, s, c) for g, group in enumerate(groups) for s, c in enumerate(group))


def change(model: Any, seed: int = 0, by: float = 0.1) -> None:
    """What an optimiser's step does: every parameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=by)


def addresses(worker: RolloutWorker) -> list[int]:
    engine = worker.engine
    tensors = [engine.kv, engine.runner.block_table, engine.runner.row_state, *engine.module.parameters()]
    tensors += [t for s in engine.slots for t in (s.host_in, s.device_in, s.host_out, s.device_out)]
    return [t.data_ptr() for t in tensors]


def test_tokens_after_a_sleep_are_those_without(model: Any, worker: RolloutWorker) -> None:
    expected = worker.generate(PROMPTS, PARAMS)
    awake = worker.memory_report()
    asleep = worker.sleep()
    assert worker.asleep and worker.engine.scheduler.blocks.used == 0
    elsewhere: dict[str, Any] = {"free_bytes": 0}  # which other processes change
    assert replace(worker.sleep(), **elsewhere) == replace(asleep, **elsewhere), "asleep, it does nothing"
    assert (asleep.kv_bytes, asleep.kv_blocks) == (0, 0)
    again = worker.wake()
    assert not worker.asleep
    assert worker.wake().kv_blocks == again.kv_blocks == awake.kv_blocks == 33
    assert tokens(worker.generate(PROMPTS, PARAMS)) == tokens(expected)
    assert worker.metrics.prefill_tokens == 2 * 5 + 12 + 4 + 2 * 3, "no prefix has outlived the sleep"
    assert (worker.switches.sleeps, worker.switches.wakes) == (1, 1)
    assert 0.0 < worker.switches.sleep_s == worker.switches.total_sleep_s < 1.0
    assert worker.switches.to_log() == {
        "perf/sleep_s": worker.switches.sleep_s,
        "perf/wake_s": worker.switches.wake_s,
    }


def test_twenty_phases_capture_nothing_and_move_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutWorker(model, EngineConfig(**SIZES, use_graphs=True)) as worker:
        engine = worker.engine
        before = engine.steps.graphs.captures, addresses(worker), id(engine.kv), id(engine.streams)
        assert before[0] > 0
        seen = set()
        for phase in range(20):
            worker.sleep()
            change(model, phase, by=0.02)
            worker.exchange(model)
            free = (9 + phase) * engine.kv_memory.block_bytes
            monkeypatch.setattr(memory, "device_free_bytes", lambda device, free=free: free)
            report = worker.wake()
            assert report.kv_blocks == 9 + phase == engine.scheduler.blocks.num_blocks
            got = worker.generate(PROMPTS, GREEDY)
            assert all(c.versions == (VersionRun(phase + 1, 20),) for (c,) in got)
            seen.add(str(tokens(got)))
            engine.scheduler.check_conservation()
        assert (engine.steps.graphs.captures, addresses(worker), id(engine.kv), id(engine.streams)) == before
        assert len(seen) > 10, "the weights have moved"
        monkeypatch.undo()
        with RolloutWorker(model, CONFIG) as fresh:
            assert tokens(fresh.generate(PROMPTS, GREEDY)) == tokens(got)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("blocks", [9, 33])
def test_requests_in_flight_go_on_after_a_wake(
    worker: RolloutWorker, free_blocks: Callable[[int], None], steps: int, blocks: int
) -> None:
    short = SamplingParams(max_tokens=2, seed=3, ignore_eos=True)
    prompts, params = [PROMPTS[2], *PROMPTS[:2]], [short, PARAMS, PARAMS]
    expected = places(worker.generate(prompts, params))
    stream = worker.stream(prompts, params)
    got = by_place([next(stream)])
    for _ in range(steps):
        worker._mail.deliver(worker.engine.step())
    worker.sleep()
    waiting = list(worker.engine.scheduler.waiting)
    assert len(waiting) == 4 and waiting[0].token_ids.size > steps
    free_blocks(blocks)
    assert worker.wake().kv_blocks == blocks
    got |= by_place(stream)
    assert got == expected
    worker.engine.scheduler.check_conservation()


def test_a_prompt_computed_in_part_begins_anew(model: Any) -> None:
    prompts = [PROMPTS[2], *ragged_prompts((40, 30))]
    params = [SamplingParams(max_tokens=1), GREEDY, GREEDY]
    with RolloutWorker(model, EngineConfig(**SIZES, max_prefill_tokens=16)) as worker:
        expected = places(worker.generate(prompts, params))
        stream = worker.stream(prompts, params)
        worker.sleep()
        worker.wake()
        got = by_place([next(stream)])
        assert worker.engine.scheduler._prefilling
        worker.sleep()
        assert not worker.engine.scheduler._prefilling
        worker.wake()
        assert got | by_place(stream) == expected


def test_asleep_it_says_so_and_loses_nothing(model: Any, worker: RolloutWorker) -> None:
    expected = places(worker.generate(PROMPTS, PARAMS))
    running, unbegun = worker.stream(PROMPTS, PARAMS), worker.stream(PROMPTS, PARAMS)
    got = [next(running)]
    worker.sleep()
    got += worker_mail(worker, running)
    for _ in range(2):
        for call in (
            lambda: worker.generate(PROMPTS, PARAMS),
            lambda: worker.stream(PROMPTS, PARAMS),
            lambda: next(running),
            lambda: next(unbegun),
        ):
            with pytest.raises(RuntimeError, match=r"asleep: wake\(\)"):
                call()
    worker.wake()
    assert by_place([*got, *running]) == by_place(unbegun) == expected
    worker.sleep()
    with pytest.raises(StopIteration):
        next(running)


def test_streams_left_while_asleep_take_their_requests_along(worker: RolloutWorker) -> None:
    stream = worker.stream(PROMPTS, PARAMS)
    next(stream)
    worker.sleep()
    assert worker.engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not worker.engine.has_work
    worker.wake()
    assert len(worker.generate(PROMPTS, PARAMS)) == 3


def test_no_room_to_wake(worker: RolloutWorker, free_blocks: Callable[[int], None]) -> None:
    expected = places(worker.generate(PROMPTS, PARAMS))
    stream = worker.stream(PROMPTS, PARAMS)
    got = [next(stream)]
    worker.sleep()
    got += worker_mail(worker, stream)
    where = addresses(worker)
    for blocks in (0, 8):
        free_blocks(blocks)
        with pytest.raises(torch.OutOfMemoryError, match=rf"{9 * 4096} are the least .* and {blocks * 4096} are free"):
            worker.wake()
        assert worker.asleep
        with pytest.raises(RuntimeError, match="asleep"):
            next(stream)
    assert worker.switches.wakes == 0
    free_blocks(9)
    assert worker.wake().kv_blocks == 9
    got += stream
    assert by_place(got) == expected
    assert addresses(worker) == where


def test_the_driver_breaking_off_leaves_it_asleep(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(worker.generate(PROMPTS, PARAMS))
    worker.sleep()

    def broken(size: int) -> None:
        raise torch.OutOfMemoryError("somebody else took it")

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine.kv_memory._range, "map", broken)
        with pytest.raises(torch.OutOfMemoryError, match="somebody else"):
            worker.wake()
    assert worker.asleep and worker.memory_report().kv_blocks == 0
    worker.wake()
    assert tokens(worker.generate(PROMPTS, PARAMS)) == expected


def test_what_waits_is_never_left_without_room(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutWorker(model, EngineConfig(**SIZES, kv_cache_min_bytes=3 * 4096)) as worker:
        params = [SamplingParams(max_tokens=2), GREEDY, GREEDY]
        stream = worker.stream(PROMPTS, params)  # the longest has 12 + 20 tokens: 4 blocks and the scratch block
        unbegun = worker.stream(PROMPTS[:1], SamplingParams(max_tokens=50))
        small = worker.stream(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
        next(stream)
        worker.sleep()
        monkeypatch.setattr(memory, "device_free_bytes", lambda device: 4 * 4096)
        with pytest.raises(torch.OutOfMemoryError, match=rf"{5 * 4096} are the least"):
            worker.wake()
        monkeypatch.setattr(memory, "device_free_bytes", lambda device: 5 * 4096)
        assert worker.wake().kv_blocks == 5
        with pytest.raises(ValueError, match="needs 7 KV blocks, the cache has 4"):
            next(unbegun)
        assert len(next(small)[2].token_ids) == 3
        assert len(list(stream)) == 2


def test_filtered_sampling_after_a_sleep(worker: RolloutWorker) -> None:
    params = SamplingParams(max_tokens=9, top_k=3, seed=1, ignore_eos=True)
    worker.sleep()
    worker.wake()
    first = tokens(worker.generate(PROMPTS, params))
    worker.sleep()
    worker.wake()
    assert tokens(worker.generate(PROMPTS, params)) == first


# Weights of the engine's own


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    learner = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(5))
    return learner


def weights(worker: RolloutWorker) -> list[torch.Tensor]:
    return [p.clone() for p in worker.engine.module.parameters()]


@pytest.mark.parametrize("kind", ["bfloat16", "lora"])
@pytest.mark.parametrize("exchange", ["asleep", "awake"])
def test_own_weights_go_too_and_come_with_an_exchange(model: Any, kind: str, exchange: str) -> None:
    learner = lora(model) if kind == "lora" else model
    config = EngineConfig(**SIZES, dtype=torch.bfloat16 if kind == "bfloat16" else None)
    with RolloutWorker(learner, config) as worker:
        worker.generate(PROMPTS, GREEDY)
        where, awake = addresses(worker), worker.memory_report()
        assert 0 < awake.weights_own_bytes < sum(p.nbytes for p in worker.engine.module.parameters()) + 40 * 512
        assert (awake.weights_shared_bytes > 0) == (kind == "lora")
        asleep = worker.sleep()
        assert asleep.weights_own_bytes == asleep.kv_bytes == 0 and worker.needs_exchange
        assert asleep.weights_shared_bytes == awake.weights_shared_bytes
        assert any(not p.any() for p in worker.engine.module.parameters()), "nothing is held of them"
        change(learner)
        if exchange == "asleep":
            assert worker.exchange(learner).copied > 0
            middle = worker.memory_report()
            assert (middle.weights_own_bytes, middle.kv_bytes) == (awake.weights_own_bytes, 0)
            worker.wake()
        else:
            worker.wake()
            with pytest.raises(RuntimeError, match=r"exchange\(\) before generating"):
                worker.generate(PROMPTS, GREEDY)
            worker.exchange(learner)
        assert not worker.needs_exchange
        assert worker.memory_report().held_bytes == awake.held_bytes
        got = worker.generate(PROMPTS, GREEDY)
        assert addresses(worker) == where
        with RolloutWorker(learner, config) as fresh:
            for ours, theirs in zip(weights(worker), weights(fresh), strict=True):
                assert torch.equal(ours, theirs)
            assert tokens(fresh.generate(PROMPTS, GREEDY)) == tokens(got)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_own_projections_lie_behind_one_another(architecture: str) -> None:
    """So that one product can compute q, k and v, with biases or without."""
    with RolloutWorker(tiny(architecture), EngineConfig(**SIZES, dtype=torch.bfloat16)) as worker:
        for layer in worker.engine.module.model.layers:  # type: ignore[union-attr]
            for parent, names in ((layer.self_attn, "q_proj k_proj v_proj"), (layer.mlp, "gate_proj up_proj")):
                weights = [getattr(parent, name).weight for name in names.split()]
                ends = [w.data_ptr() + w.nbytes for w in weights]
                assert [w.data_ptr() for w in weights[1:]] == ends[:-1]


def test_room_is_left_for_own_weights(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutWorker(model, EngineConfig(**SIZES, dtype=torch.bfloat16)) as worker:
        block, own = worker.engine.kv_memory.block_bytes, worker.memory_report().weights_own_bytes
        worker.sleep()
        monkeypatch.setattr(memory, "device_free_bytes", lambda device: 20 * block + own)
        assert worker.wake().kv_blocks in (19, 20)
        worker.exchange(model)
        worker.sleep()
        monkeypatch.setattr(memory, "device_free_bytes", lambda device: 10 * block)
        with pytest.raises(torch.OutOfMemoryError, match=f"they take {own} bytes, and {10 * block} are free"):
            worker.exchange(model)
        assert worker.policy_version == 1 and worker.memory_report().weights_own_bytes == 0
        assert own > 10 * block, "or the case isn't met"
        monkeypatch.undo()
        worker.exchange(model)
        worker.wake()
        assert worker.generate(PROMPTS, GREEDY)[0][0].versions == (VersionRun(2, 20),)


@pytest.mark.parametrize("fault", ["misshapen", "half-way"])
def test_a_failed_exchange_asleep_takes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with RolloutWorker(model, EngineConfig(**SIZES, dtype=torch.bfloat16)) as worker:
        expected = tokens(worker.generate(PROMPTS, GREEDY))
        worker.sleep()
        if fault == "misshapen":
            with pytest.raises(ValueError, match=r"model\.layers\.2"):
                worker.exchange(tiny("llama", num_hidden_layers=3))
        else:
            from rollout.weights import exchange

            def breaks(pairs: Any) -> int:
                pairs[0][0].fill_(1.0)
                raise OSError("the link went down")

            with monkeypatch.context() as patch:
                patch.setattr(exchange, "write", breaks)
                with pytest.raises(RuntimeError, match="half-way"):
                    worker.exchange(model)
        assert worker.asleep and worker.policy_version == 0 and worker.needs_exchange
        assert worker.memory_report().weights_own_bytes == 0
        worker.wake()
        with pytest.raises(RuntimeError, match="exchange"):
            worker.generate(PROMPTS, GREEDY)
        worker.exchange(model)
        assert tokens(worker.generate(PROMPTS, GREEDY)) == expected


def test_an_exchange_asleep_with_requests_in_flight(model: Any, worker: RolloutWorker) -> None:
    stream = worker.stream(PROMPTS[:2], [GREEDY, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)])
    assert next(stream)[0] == 1
    worker.sleep()
    change(model)
    worker.exchange(model, kv="keep")  # there are none to keep
    worker.wake()
    ((_, _, completion),) = stream
    check_switch(model, completion)


def check_switch(model: Any, completion: Any) -> None:
    """The tokens after the switch are those of a fresh engine given the same prefix and weights."""
    old, new = completion.versions
    assert (old.version, new.version, old.tokens + new.tokens) == (0, 1, 20) and 0 < old.tokens < 20
    prefix = PROMPTS[0] + completion.token_ids[: old.tokens]
    with RolloutWorker(model, CONFIG) as fresh:
        params = SamplingParams(max_tokens=new.tokens, temperature=0.0, ignore_eos=True)
        ((expected,),) = fresh.generate([prefix], params)
    assert completion.token_ids[old.tokens :] == expected.token_ids
    torch.testing.assert_close(torch.tensor(completion.logprobs[old.tokens :]), torch.tensor(expected.logprobs))


# What is reported


def test_the_report_adds_up(model: Any, worker: RolloutWorker) -> None:
    report = worker.memory_report()
    assert isinstance(report, MemoryReport)
    assert report.kv_blocks == 33 and 33 * 4096 <= report.kv_bytes < 33 * 4096 + (1 << 16)
    assert report.weights_own_bytes == 0
    assert report.weights_shared_bytes == sum(p.nbytes for p in model.parameters())
    slot = worker.engine.slots[0]
    assert report.slots_bytes == 2 * slot.bytes + 5 * 8 * 4 + 5 * 4 * 6
    assert report.held_bytes == report.kv_bytes + report.slots_bytes
    text = str(report)
    assert "\n" not in text and "KV (33 blocks) 0.000" in text and text.endswith(" GiB")
    asleep = worker.sleep()
    assert (asleep.held_bytes, asleep.slots_bytes) == (report.slots_bytes, report.slots_bytes)


def test_weights_the_learner_has_left_behind_are_the_engines(model: Any, worker: RolloutWorker) -> None:
    shared = worker.memory_report().weights_shared_bytes
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
    worker.exchange(model)
    report = worker.memory_report()
    assert report.weights_own_bytes == model.lm_head.weight.nbytes
    assert report.weights_own_bytes + report.weights_shared_bytes == shared
    assert worker.sleep().weights_own_bytes == report.weights_own_bytes, "it lies outside of the range, and stays"
    assert not worker.needs_exchange


def test_a_closed_worker_neither_sleeps_nor_wakes(model: Any) -> None:
    worker = RolloutWorker(model, CONFIG)
    worker.sleep()
    worker.close()
    for call in (worker.sleep, worker.wake, worker.memory_report, lambda: worker.asleep):
        with pytest.raises(RuntimeError, match="closed"):
            call()


# Paused


def test_weights_stepped_in_place_while_paused(model: Any, worker: RolloutWorker) -> None:
    stream = worker.stream(PROMPTS[:2], [GREEDY, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)])
    assert next(stream)[0] == 1
    with worker.paused():
        for call in (lambda: next(stream), lambda: worker.generate(PROMPTS), lambda: worker.stream(PROMPTS)):
            with pytest.raises(RuntimeError, match="paused"):
                call()
        with pytest.raises(RuntimeError, match="paused already"), worker.paused():
            pytest.fail("entered twice")
        assert not worker.engine._in_flight
        change(model)
        assert worker.policy_version == 0
    assert worker.policy_version == 1
    ((_, _, completion),) = stream
    check_switch(model, completion)


@pytest.mark.parametrize(("kv", "inside", "kept"), [("keep", None, True), ("keep", "recompute", False)])
def test_an_exchange_follows_the_pause_it_is_in(
    model: Any, worker: RolloutWorker, kv: Any, inside: Any, kept: bool
) -> None:
    stream = worker.stream(PROMPTS[:2], [GREEDY, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)])
    next(stream)
    prefilled = worker.engine.scheduler.counters.prefill_tokens
    with worker.paused(kv=kv):
        change(model)
        worker.exchange(model, kv=inside)
        assert worker.policy_version == 1
    assert worker.policy_version == 1, "leaving publishes no second time"
    ((_, _, completion),) = stream
    assert [run.version for run in completion.versions] == [0, 1]
    assert (worker.engine.scheduler.counters.prefill_tokens == prefilled) == kept


def test_keep_without_an_exchange(model: Any, worker: RolloutWorker) -> None:
    stream = worker.stream(PROMPTS[:1], GREEDY)
    other = worker.stream(PROMPTS[1:2], SamplingParams(max_tokens=2, ignore_eos=True))
    next(other)
    worker._mail.deliver(worker.engine.step())
    with pytest.raises(ValueError, match="drop"), worker.paused(kv="drop"):  # type: ignore[arg-type]
        pytest.fail("entered")
    with worker.paused(kv="keep"):
        change(model)
    list(other)
    ((_, _, completion),) = stream
    assert completion.max_version == 1


def test_a_body_that_raises_still_counts_as_a_change(model: Any, worker: RolloutWorker) -> None:
    worker.generate(PROMPTS, GREEDY)
    with pytest.raises(KeyError), worker.paused():
        change(model)
        raise KeyError
    assert worker.policy_version == 1
    got = worker.generate(PROMPTS, GREEDY)
    with RolloutWorker(model, CONFIG) as fresh:
        assert tokens(fresh.generate(PROMPTS, GREEDY)) == tokens(got)


def test_own_weights_cannot_have_changed_without_an_exchange(model: Any) -> None:
    with RolloutWorker(model, EngineConfig(**SIZES, dtype=torch.bfloat16)) as worker:
        expected = worker.generate(PROMPTS, GREEDY)
        with worker.paused():
            change(model)
        assert worker.policy_version == 0
        assert tokens(worker.generate(PROMPTS, GREEDY)) == tokens(expected)


def test_a_learner_that_moved_while_paused_needs_an_exchange(model: Any, worker: RolloutWorker) -> None:
    with pytest.raises(RuntimeError, match=r"1 of the learner's tensors .*lm_head.*call exchange"), worker.paused():
        model.lm_head.weight.data = model.lm_head.weight.data + 1.0
    with worker.paused():
        worker.exchange(model)
    with worker.paused():
        pass


def test_a_sleep_within_a_pause(model: Any, worker: RolloutWorker) -> None:
    stream = worker.stream(PROMPTS[:2], [GREEDY, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)])
    next(stream)
    with worker.paused():
        worker.sleep()
        change(model)
    assert worker.asleep
    worker.wake()
    ((_, _, completion),) = stream
    check_switch(model, completion)


def test_closing_within_a_pause(model: Any) -> None:
    worker = RolloutWorker(model, CONFIG)
    with worker.paused():
        worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.generate([[5]])


def test_the_cache_is_lent_if_it_is_long_enough_and_computed_again(worker: RolloutWorker) -> None:
    expected = tokens(worker.generate(PROMPTS[:2], GREEDY))
    engine = worker.engine
    stream = worker.stream(PROMPTS[:2], [GREEDY, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)])
    next(stream)
    worker._mail.deliver(engine.drain())
    size, running = engine.kv_memory.mapped_bytes, engine.scheduler.rows.num_live
    assert engine.lend_kv(size + 1) is None and engine.scheduler.rows.num_live == running == 1
    lent = engine.lend_kv(size)
    assert lent is not None and (lent.nbytes, lent.data_ptr()) == (size, engine.kv.data_ptr())
    assert engine.scheduler.rows.num_live == 0
    engine.kv[: engine.kv_memory.blocks].fill_(float("nan"))
    ((_, _, completion),) = stream
    assert completion.token_ids == expected[0][0]
    worker.sleep()
    assert engine.lend_kv(1) is None, "asleep there is none"
