"""Scheduling without a model: samples are scripted, invariants are checked after each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.engine.batch import Batch
from rollout.engine.lengths import LengthEstimate
from rollout.engine.scheduler import Ended, Scheduler
from rollout.types import Request, SamplingParams, VersionRun

EOS = 7


def make(**overrides: Any) -> Scheduler:
    sizes = {
        "max_rows": 4,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 65,
        "max_prefill_tokens": 32,
        "eos_token_ids": (EOS,),
    }
    return Scheduler(**{**sizes, **overrides})


def request(length: int = 5, max_tokens: int = 8, group: int = 0, first: int = 10, **params: Any) -> Request:
    ids = tuple(range(first, first + length))
    return Request(ids, SamplingParams(max_tokens=max_tokens, **params), key=(1, 2), group=group)


def token_after(batch: Batch, i: int) -> int:
    """A scripted sample that depends on row and position alone, never eos."""
    last = batch.prefill.query_start[i + 1] - 1 if batch.prefill is not None else i
    return 100 + int(batch.position[last])


def answer(scheduler: Scheduler, batch: Batch, tokens: list[int] | None = None, nan: int = -1) -> list[Ended]:
    if tokens is None:
        tokens = [token_after(batch, i) for i in range(batch.rows.size)]
    logprobs = np.full(batch.rows.size, -1.0, np.float32)
    if nan >= 0:
        logprobs[nan] = np.nan
    ended = scheduler.update(batch, np.asarray(tokens, np.int32), logprobs, np.ones(batch.rows.size, np.float32))
    scheduler.check_conservation()
    return ended


def run(scheduler: Scheduler, *, overlap: bool, limit: int = 2000) -> list[Ended]:
    """The engine's loop without an engine."""
    ended: list[Ended] = []
    in_flight: list[Batch] = []
    for _ in range(limit):
        batch = scheduler.schedule(in_flight[-1] if in_flight else None)
        scheduler.check_conservation()
        if batch is not None:
            in_flight.append(batch)
        if in_flight and (batch is None or len(in_flight) == 1 + overlap):
            ended += answer(scheduler, in_flight.pop(0))
        if not scheduler.has_work and not in_flight:
            return ended
    raise AssertionError("the scheduler doesn't come to an end")


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_comes_out_with_its_tokens(overlap: bool) -> None:
    scheduler = make()
    for i in range(9):
        scheduler.add(request(length=3 + i, max_tokens=1 + 2 * i, group=i, first=10 * i))
    ended = run(scheduler, overlap=overlap)
    assert sorted(e.request.group for e in ended) == list(range(9))
    for e in ended:
        length = 3 + e.request.group
        assert e.completion.token_ids == [100 + length - 1 + k for k in range(1 + 2 * e.request.group)]
        assert e.completion.finish_reason == "length"
        assert e.completion.versions == (VersionRun(0, len(e.completion.token_ids)),)
    assert scheduler.blocks.used == 0
    assert scheduler.counters.dropped_tokens == 0, "a length is known ahead: nothing is computed in vain"


def test_the_first_steps_by_hand() -> None:
    scheduler = make()
    scheduler.add(request(length=5, max_tokens=3))
    first = scheduler.schedule()
    assert first is not None and first.prefill is not None
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert first.position.tolist() == [0, 1, 2, 3, 4]
    assert first.prefill.query_start.tolist() == [0, 5]
    assert first.prefill.tables.shape == (1, 2)
    second = scheduler.schedule(first)  # in flight: the token isn't known
    assert second is not None and second.kind == "decode"
    assert (second.token_ids.tolist(), second.carry.tolist(), second.position.tolist()) == ([0], [0], [5])
    assert second.new_block.tolist() == [-1]
    assert answer(scheduler, first, [50]) == []
    third = scheduler.schedule(second)
    assert third is not None and third.position.tolist() == [6]
    assert answer(scheduler, second, [51]) == []
    assert scheduler.schedule(third) is None, "three tokens are asked for: the prompt's step and two more give them"
    (ended,) = answer(scheduler, third, [52])
    assert ended.completion.token_ids == [50, 51, 52]
    # collected before it is scheduled again, a row's token comes from the host
    scheduler2 = make()
    scheduler2.add(request(length=8, max_tokens=3))
    batch = scheduler2.schedule()
    assert batch is not None
    answer(scheduler2, batch, [50])
    decode = scheduler2.schedule()
    assert decode is not None
    assert (decode.token_ids.tolist(), decode.carry.tolist()) == ([50], [-1])
    assert decode.new_block[0] > 0, "position 8 begins a new block of 4"


def test_equal_phases_take_equal_rows() -> None:
    """Attention shares KV out in the order of rows, so rounding would differ from one phase to the next."""
    scheduler, phases = make(), []
    for _ in range(3):
        for i in range(9):
            scheduler.add(request(3 + i, max_tokens=2 + 3 * i % 7, group=i))
        rows = []
        while (batch := scheduler.schedule(None)) is not None:
            rows.append(batch.rows.tolist())
            answer(scheduler, batch)
        phases.append(rows)
    assert phases[0] == phases[1] == phases[2]


def test_what_ran_on_after_its_end_is_dropped_and_counted() -> None:
    scheduler = make()
    scheduler.add(request(group=1))
    scheduler.add(request(group=2, first=30))
    prefill = scheduler.schedule()
    assert prefill is not None
    decode = scheduler.schedule(prefill)
    assert decode is not None
    ended = answer(scheduler, prefill, [EOS, 50])
    assert [(e.request.group, e.completion.finish_reason) for e in ended] == [(1, "eos")]
    after = scheduler.schedule(decode)
    assert after is not None and after.rows.tolist() == [1]
    assert after.carry.tolist() == [1], "the second entry of the step in flight"
    assert answer(scheduler, decode, [60, 61]) == []
    assert scheduler.counters.dropped_tokens == 1
    assert scheduler.counters.generated_tokens == 3


def test_a_row_that_changed_hands_does_not_take_the_old_ones_token() -> None:
    scheduler = make(max_rows=1)
    scheduler.add(request(group=1))
    scheduler.add(request(group=2, first=30))
    first = scheduler.schedule()
    assert first is not None
    second = scheduler.schedule(first)
    assert second is not None
    answer(scheduler, first, [EOS])
    third = scheduler.schedule(second)  # group 2 in the same row
    assert third is not None and third.prefill is not None and third.rows.tolist() == [0]
    answer(scheduler, second, [66])  # group 1's, sampled after its end
    fourth = scheduler.schedule(third)
    assert fourth is not None and fourth.carry.tolist() == [0]
    answer(scheduler, third, [67])
    ended = answer(scheduler, fourth, [EOS])
    assert [(e.request.group, e.completion.token_ids) for e in ended] == [(2, [67, EOS])]


def test_chunked_prefill_samples_only_at_the_end() -> None:
    scheduler = make(max_prefill_tokens=4)
    scheduler.add(request(length=10, max_tokens=2))
    chunks = []
    in_flight = None
    for _ in range(3):
        batch = scheduler.schedule(in_flight)
        assert batch is not None and batch.prefill is not None
        chunks.append((batch.position.tolist(), batch.prefill.complete.tolist()))
        assert answer(scheduler, batch) == []
    assert chunks == [([0, 1, 2, 3], [False]), ([4, 5, 6, 7], [False]), ([8, 9], [True])]
    decode = scheduler.schedule()
    assert decode is not None and decode.token_ids.tolist() == [109]


def test_a_group_shares_full_blocks_while_its_leader_is_computed() -> None:
    scheduler = make()
    for _ in range(3):
        scheduler.add(request(length=10))
    batch = scheduler.schedule()
    assert batch is not None and batch.prefill is not None
    assert batch.prefill.query_start.tolist() == [0, 10, 12, 14]
    assert batch.position.tolist() == [*range(10), 8, 9, 8, 9]
    tables = batch.prefill.tables
    assert (tables[0, :2] == tables[1, :2]).all() and (tables[0, :2] == tables[2, :2]).all()
    assert len(set(tables[:, 2].tolist())) == 3
    assert scheduler.blocks.used == 5
    assert scheduler.counters.cached_prompt_tokens == 16


def test_out_of_blocks_preempts_the_youngest_and_loses_nothing() -> None:
    scheduler = make(num_blocks=9, max_rows=3)  # 32 positions for 3 x 20
    scheduler.lengths.observe(1)  # expects short ones, and so admits all three
    for i in range(3):
        scheduler.add(request(length=4, max_tokens=16, group=i, first=20 * i))
    ended = run(scheduler, overlap=True)
    assert scheduler.counters.preemptions > 0
    assert [e.request.group for e in ended] == [0, 1, 2], "the oldest is never the one that waits"
    for e in ended:
        assert e.completion.token_ids == [103 + k for k in range(16)]


def test_admission_keeps_room_for_what_runs() -> None:
    scheduler = make(num_blocks=11)  # 10 blocks
    scheduler.add(request(length=4, max_tokens=16, group=0))  # 5 blocks in the end
    scheduler.add(request(length=4, max_tokens=16, group=1, first=30))
    scheduler.add(request(length=4, max_tokens=16, group=2, first=50))
    batch = scheduler.schedule()
    assert batch is not None and batch.rows.size == 2
    answer(scheduler, batch)
    run(scheduler, overlap=True)
    assert scheduler.counters.preemptions == 0


def test_lengths_so_far_tell_how_far_a_sequence_will_grow() -> None:
    lengths = LengthEstimate(block_size=4)
    assert lengths.blocks(10, 2, 100) == 25, "nothing is known: as long as it may become"
    for length in (10, 20, 30):
        lengths.observe(length)
    assert lengths.mean == pytest.approx(20.0)
    expected = lengths.blocks(np.array([10, 40, 70, 96]), np.array([2, 32, 62, 20]), np.array([100, 100, 72, 100]))
    # 10 + 18 to come; 40 + a quarter of 32; held by its limit; a block at the least
    assert expected.tolist() == [7, 12, 18, 25]


def test_admission_waits_for_a_batch_of_rows() -> None:
    scheduler = make(max_rows=32, num_blocks=1000, max_prefill_tokens=1000)
    for i in range(40):
        scheduler.add(request(group=i, first=10 * i, max_tokens=30))
    batch = scheduler.schedule()
    assert batch is not None and batch.rows.size == 32
    answer(scheduler, batch, [EOS] + [50] * 31)
    one_free = scheduler.schedule()
    assert one_free is not None and one_free.kind == "decode", "2 of 32 rows are waited for"
    answer(scheduler, one_free, [EOS] + [50] * 30)
    two_free = scheduler.schedule()
    assert two_free is not None and two_free.prefill is not None and two_free.rows.size == 2


def test_admission_at_once() -> None:
    scheduler = make(max_rows=32, num_blocks=1000, max_prefill_tokens=1000, admission_rows=1)
    for i in range(40):
        scheduler.add(request(group=i, first=10 * i, max_tokens=30))
    batch = scheduler.schedule()
    assert batch is not None
    answer(scheduler, batch, [EOS] + [50] * 31)
    one_free = scheduler.schedule()
    assert one_free is not None and one_free.prefill is not None and one_free.rows.size == 1


def test_non_finite_logits_end_one_request_alone() -> None:
    scheduler = make()
    scheduler.add(request(group=1))
    scheduler.add(request(group=2, first=30))
    prefill = scheduler.schedule()
    assert prefill is not None
    answer(scheduler, prefill, [50, 51])
    decode = scheduler.schedule()
    assert decode is not None
    (bad,) = answer(scheduler, decode, [0, 52], nan=0)
    assert (bad.request.group, bad.non_finite, bad.completion.finish_reason) == (1, True, "aborted")
    assert bad.completion.token_ids == [50], "a token drawn from broken logits is none"
    (good,) = run(scheduler, overlap=False)
    assert (good.request.group, len(good.completion.token_ids)) == (2, 8)


def test_abort_ends_running_and_waiting_ones_of_one_call() -> None:
    scheduler = make(max_rows=1)
    scheduler.add(request(group=0))
    scheduler.add(request(group=1, first=30))
    batch = scheduler.schedule()
    assert batch is not None
    answer(scheduler, batch, [50])
    ended = scheduler.abort(call=0)
    assert [(e.request.group, e.completion.token_ids) for e in ended] == [(0, [50]), (1, [])]
    assert {e.completion.finish_reason for e in ended} == {"aborted"}
    assert not scheduler.has_work
    scheduler.check_conservation()


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_new_version_in_the_middle_of_a_sequence(keep_kv: bool) -> None:
    scheduler = make()
    scheduler.add(request(length=8, max_tokens=4))
    batch = scheduler.schedule()
    assert batch is not None
    answer(scheduler, batch, [50])
    scheduler.new_version(1, keep_kv=keep_kv)
    scheduler.check_conservation()
    batch = scheduler.schedule()
    assert batch is not None
    if keep_kv:
        assert batch.kind == "decode" and batch.token_ids.tolist() == [50]
    else:
        assert batch.prefill is not None and batch.token_ids.tolist() == [*range(10, 18), 50]
    answer(scheduler, batch, [51])
    (ended,) = run(scheduler, overlap=True)
    assert ended.completion.versions == (VersionRun(0, 1), VersionRun(1, 3))
    assert (ended.completion.min_version, ended.completion.max_version) == (0, 1)
    assert scheduler.counters.cached_prompt_tokens == 0, "old weights' keys never serve new ones"


def test_a_new_version_computes_prompts_anew_that_are_computed_in_part() -> None:
    """Blocks that straddle two versions would be shared as if of the new one, also where running KV is kept."""
    scheduler = make(max_prefill_tokens=6)
    for sample in range(2):
        scheduler.add(Request(tuple(range(10, 30)), SamplingParams(max_tokens=2, n=2), key=(1, sample), sample=sample))
    batch = scheduler.schedule()
    assert batch is not None and batch.position.tolist() == [*range(6)]
    answer(scheduler, batch)
    scheduler.new_version(1, keep_kv=True)
    scheduler.check_conservation()
    batch = scheduler.schedule()
    assert batch is not None and batch.position.tolist() == [*range(6)], "from the first token again"
    answer(scheduler, batch)
    assert {e.completion.versions for e in run(scheduler, overlap=False)} == {(VersionRun(1, 2),)}
    assert scheduler.counters.preemptions == 0, "those are for want of blocks"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (request(length=0), "empty"),
        (request(length=64), "prompt 0 has 64 tokens"),
        (request(length=60, max_tokens=5), "lower max_tokens to 4"),
    ],
)
def test_what_can_never_run_is_refused(wanted: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().check(wanted)


def test_what_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs 5 KV blocks, the cache has 4: lower max_tokens to 11"):
        make(num_blocks=5).check(request(length=5, max_tokens=12))
    with pytest.raises(ValueError, match=r"needs 5 KV blocks, the cache has 4: shorten the prompt or give"):
        make(num_blocks=5).check(request(length=16, max_tokens=4))


def test_steady_decoding_touches_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(max_rows=8, num_blocks=1000, max_prefill_tokens=1000)
    for i in range(8):
        scheduler.add(request(group=i, first=10 * i, max_tokens=50))
    batch = scheduler.schedule()
    assert batch is not None
    answer(scheduler, batch)

    class Untouchable(list[object]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("a sequence was looked at")

        def __iter__(self) -> Any:
            raise AssertionError("sequences were looped over")

    monkeypatch.setattr(scheduler.rows, "sequence", Untouchable(scheduler.rows.sequence))
    for _ in range(20):
        batch = scheduler.schedule()
        assert batch is not None and batch.rows.size == 8
        tokens = np.full(8, 50, np.int32)
        assert scheduler.update(batch, tokens, np.full(8, -1, np.float32), np.ones(8, np.float32)) == []
