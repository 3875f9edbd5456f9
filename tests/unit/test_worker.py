"""The worker's contract: what is raised and when, phases, versions, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollout import EngineConfig, NonFiniteLogitsError, RolloutWorker, SamplingParams, VersionRun
from rollout.calls import random_key
from tests.tiny_models import fingerprint, ragged_prompts, tiny, tokens

PROMPTS = ragged_prompts((5, 12, 3))
CONFIG = EngineConfig(block_size=8, max_rows=4, max_model_len=64)
PARAMS = SamplingParams(n=2, max_tokens=10, seed=3)


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def worker(model: Any) -> Iterator[RolloutWorker]:
    with RolloutWorker(model, CONFIG) as worker:
        yield worker


def test_the_config_is_optional_and_so_are_params(model: Any) -> None:
    with RolloutWorker(model) as worker, pytest.raises(ValueError, match="lower max_tokens to 251"):
        worker.generate([PROMPTS[0]])  # 16,384 tokens by default, of a model with 256 positions


def test_groups_come_in_the_order_asked(worker: RolloutWorker) -> None:
    groups = worker.generate(PROMPTS, PARAMS)
    assert [[list(c.prompt_ids) for c in group] for group in groups] == [[p, p] for p in PROMPTS]
    one_each = [SamplingParams(n=n, max_tokens=10, seed=3) for n in (1, 3, 2)]
    assert [len(group) for group in worker.generate(PROMPTS, one_each)] == [1, 3, 2]
    assert worker.generate([], PARAMS) == []


def test_stream_gives_each_as_it_ends(worker: RolloutWorker) -> None:
    groups = worker.generate(PROMPTS, PARAMS)
    order = []
    for group, sample, completion in worker.stream(PROMPTS, PARAMS):
        assert completion.token_ids == groups[group][sample].token_ids
        order.append(len(completion.token_ids))
    assert len(order) == 6
    assert worker.metrics.completion_lengths == tuple(order)


def test_streams_share_the_engine(worker: RolloutWorker) -> None:
    expected = tokens(worker.generate(PROMPTS, PARAMS))
    first, second = worker.stream(PROMPTS, PARAMS), worker.stream(PROMPTS[::-1], PARAMS)
    got: list[dict[tuple[int, int], Any]] = [{}, {}]
    for a, b in zip(first, second, strict=True):
        got[0][a[:2]] = a[2].token_ids
        got[1][b[:2]] = b[2].token_ids
    assert [[got[0][g, s] for s in range(2)] for g in range(3)] == expected
    assert [[got[1][2 - g, s] for s in range(2)] for g in range(3)] == expected


def test_a_call_within_a_stream_whose_last_step_is_in_flight(worker: RolloutWorker) -> None:
    """With overlap, a row that has ended by a stop token may run in the next step already when it is given out."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
    expected = worker.generate(PROMPTS[1:2], params)[0][0].token_ids
    (whole,) = worker.generate(PROMPTS[:1], params)[0]
    stopping = SamplingParams(max_tokens=20, ignore_eos=True, seed=3, stop_token_ids=(whole.token_ids[4],))
    before = worker.totals.generated_tokens
    for _, _, completion in worker.stream(PROMPTS[:1], stopping):
        assert completion.finish_reason == "stop"
        assert worker.generate(PROMPTS[1:2], params)[0][0].token_ids == expected
    assert worker.totals.generated_tokens - before == len(completion.token_ids) + len(expected), "each counted once"


def test_a_stream_may_be_closed_in_the_middle_of_a_step(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's collector does with one that stands in a cycle of references, whenever it pleases."""
    prompts = [PROMPTS[0]] * 12
    params = [SamplingParams(max_tokens=count, ignore_eos=True, seed=3) for count in range(1, 13)]
    with RolloutWorker(model, EngineConfig(block_size=8, max_rows=24, max_model_len=64)) as worker:
        expected = worker.generate(prompts, params)
        abandoned, running = worker.stream(prompts, params), worker.stream(prompts, params)
        next(abandoned)
        got = [next(running)]  # from here on a row of either ends in nearly every step
        scheduler = worker.engine.scheduler
        end, ends = scheduler._end, []

        def ending(row: int, *args: Any, **options: Any) -> Any:
            if not ends:
                abandoned.close()
            ends.append(row)
            return end(row, *args, **options)

        monkeypatch.setattr(scheduler, "_end", ending)
        for group, _, completion in [*got, *running]:
            assert completion.token_ids == expected[group][0].token_ids
        assert not worker.engine.has_work
        scheduler.check_conservation()
        assert tokens(worker.generate(prompts, params)) == tokens(expected)


def test_leaving_a_stream_ends_its_requests_only(worker: RolloutWorker) -> None:
    expected = worker.generate(PROMPTS, PARAMS)
    other = worker.stream(PROMPTS, PARAMS)
    got = [next(other)]
    half = worker.stream(ragged_prompts((9, 9)), SamplingParams(max_tokens=50, ignore_eos=True, n=4))
    next(half)
    half.close()
    got += list(other)
    assert {(g, s): c.token_ids for g, s, c in got} == {
        (g, s): expected[g][s].token_ids for g in range(3) for s in range(2)
    }
    assert not worker.engine.has_work
    assert worker.engine.scheduler.blocks.used == 0


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([PROMPTS[0], []], PARAMS, "prompt 1 is empty"),
        ([list(range(4, 68))], PARAMS, "prompt 0 has 64 tokens"),
        (PROMPTS, SamplingParams(max_tokens=60), r"prompt 0 \(5 tokens\) with max_tokens=60"),
        ([[5, 128]], PARAMS, "token ids outside of the model's 0 to 127"),
        (PROMPTS, [PARAMS], "3 prompts, but 1 SamplingParams"),
        ([5, 6, 7], PARAMS, "prompt 0 is 5: give a list of prompts"),
        (["a text"], PARAMS, "prompt 0 is 'a text': give a list of prompts"),
    ],
)
def test_bad_input_raises_at_once_and_starts_nothing(
    worker: RolloutWorker, prompts: Any, params: Any, message: str
) -> None:
    running = worker.stream(PROMPTS, PARAMS)
    first = next(running)
    with pytest.raises(ValueError, match=message):
        worker.stream(prompts, params)
    with pytest.raises(ValueError, match=message):
        worker.generate(prompts, params)
    assert len([first, *running]) == 6, "no other request is lost"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", 1e-40),
        ("seed", 3.5),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("stop_token_ids", tuple(range(9))),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1 << 31,)),
    ],
)
def test_sampling_params_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_rows", 0),
        ("block_size", 12),
        ("block_size", 512),
        ("max_prefill_tokens", 0),
        ("kv_cache_fraction", 0.0),
        ("kv_cache_bytes", 0),
        ("max_model_len", 1),
    ],
)
def test_engine_config_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})


def test_non_finite_logits_raise_and_lose_nothing(model: Any) -> None:
    poison = 99  # a token whose embedding is broken: only the prompt that holds it is hit
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    params = SamplingParams(max_tokens=12, seed=1, temperature=0.0)
    clean = [p for p in PROMPTS if poison not in p]
    with RolloutWorker(model, CONFIG) as worker:
        expected = worker.generate(clean, params)
        assert all(poison not in c.token_ids for (c,) in expected)
        other = worker.stream(clean, params)
        others = [next(other)]
        with pytest.raises(NonFiniteLogitsError, match=r"prompt 1, sample 0, after 0 tokens.*learning rate") as caught:
            worker.generate([clean[0], [4, poison, 5], clean[1]], params)
        assert caught.value.request.group == 1
        assert set(caught.value.completions) == {(0, 0), (1, 0), (2, 0)}
        for group, index in ((0, 0), (2, 1)):
            part = caught.value.completions[group, 0].token_ids
            assert part == expected[index][0].token_ids[: len(part)]
        others += list(other)
        assert {g: c.token_ids for g, _, c in others} == {g: c.token_ids for g, (c,) in enumerate(expected)}
        assert tokens(worker.generate(clean, params)) == tokens(expected), "the engine goes on"


def test_a_closed_worker_says_so(model: Any) -> None:
    worker = RolloutWorker(model, CONFIG)
    running = worker.stream(PROMPTS, PARAMS)
    next(running)
    worker.close()
    worker.close()
    for call in (
        lambda: worker.generate(PROMPTS, PARAMS),
        lambda: worker.exchange(model),
        lambda: list(running),
        lambda: worker.engine,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_three_phases_with_an_exchange_between(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with RolloutWorker(model, EngineConfig(block_size=8, max_rows=4, max_model_len=64, use_graphs=True)) as worker:
        captures, engine = worker.engine.steps.graphs.captures, worker.engine
        pointers = [p.data_ptr() for p in engine.module.parameters()]
        seen = []
        for phase in range(3):
            assert worker.policy_version == phase
            (group,) = worker.generate(PROMPTS[:1], PARAMS)
            assert all(c.versions == (VersionRun(phase, len(c.token_ids)),) for c in group)
            seen.append([c.token_ids for c in group])
            with RolloutWorker(model, CONFIG) as fresh:
                assert [c.token_ids for c in fresh.generate(PROMPTS[:1], PARAMS)[0]] == seen[-1]
            before = fingerprint(model)
            ids = torch.tensor([PROMPTS[1]])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = worker.exchange(model)
            assert report.copied == 0, "one storage serves both"
            assert before["training"] == fingerprint(model)["training"]
        assert worker.engine is engine
        assert engine.steps.graphs.captures == captures
        assert [p.data_ptr() for p in engine.module.parameters()] == pointers
        assert seen[0] != seen[1] != seen[2], "the weights have moved"
        assert worker.totals.phases == 3
        assert worker.totals.exchanges == 3


def greedily(prompt: list[int], model: Any, count: int) -> Any:
    with RolloutWorker(model, CONFIG) as fresh:
        return fresh.generate([prompt], SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))[0][0]


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_an_exchange_in_the_middle_of_a_stream(model: Any, worker: RolloutWorker, kv: Any) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    # the short one ends first, and leaves the long one in the middle
    both = worker.stream(PROMPTS[:2], [params, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)])
    assert next(both)[0] == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    worker.exchange(model, kv=kv)
    ((_, _, completion),) = both
    old, new = completion.versions
    assert (old.version, new.version, old.tokens + new.tokens) == (0, 1, 20)
    assert 0 < old.tokens < 20
    assert (completion.min_version, completion.max_version) == (0, 1)
    fresh = greedily(PROMPTS[0] + completion.token_ids[: old.tokens], model, new.tokens)
    close = torch.allclose(torch.tensor(fresh.logprobs), torch.tensor(completion.logprobs[old.tokens :]), atol=1e-5)
    assert close == (kv == "recompute"), "kept keys and values are the old weights'"
    if kv == "recompute":
        assert completion.token_ids[old.tokens :] == fresh.token_ids


def test_a_failed_exchange_leaves_the_old_version(model: Any, worker: RolloutWorker) -> None:
    expected = worker.generate(PROMPTS, PARAMS)
    bigger = tiny("llama", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"model\.layers\.2"):
        worker.exchange(bigger)
    assert worker.policy_version == 0
    assert worker.generate(PROMPTS, PARAMS) == expected
    with pytest.raises(ValueError, match="recompute"):
        worker.exchange(model, kv="drop")  # type: ignore[arg-type]


def test_old_prefixes_never_serve_new_weights(model: Any) -> None:
    """Prefixes cached under old weights were served after an update elsewhere: logprobs were off by 1.68."""
    prompt = ragged_prompts((33,))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with RolloutWorker(model, CONFIG) as worker:
        old = worker.generate(prompt, params)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        worker.exchange(model)
        new = worker.generate(prompt, params)
        assert worker.metrics.prefill_tokens == 33
    with RolloutWorker(model, CONFIG) as fresh:
        assert fresh.generate(prompt, params)[0][0].logprobs == new[0][0].logprobs
    assert new[0][0].logprobs != old[0][0].logprobs


def test_random_keys_depend_on_what_is_asked_alone() -> None:
    assert random_key(0, (1, 2), 0) == random_key(0, (1, 2), 0)
    keys = {random_key(seed, ids, n) for seed in (0, 1, -1) for ids in ((1, 2), (2, 1), (1,)) for n in range(4)}
    assert len(keys) == 36


def test_numpys_integers_are_seeds() -> None:
    for seed in (np.int64(3), np.int32(3), np.uint8(3)):
        assert SamplingParams(seed=seed).seed == 3
        assert type(SamplingParams(seed=seed).seed) is int


def test_no_seed_is_a_fresh_one(worker: RolloutWorker) -> None:
    params = SamplingParams(n=2, max_tokens=12, seed=None, ignore_eos=True)
    first, second = worker.generate(PROMPTS, params), worker.generate(PROMPTS, params)
    assert [c.token_ids for group in first for c in group] != [c.token_ids for group in second for c in group]


def test_the_learner_is_left_alone() -> None:
    model = tiny("qwen3")
    model.gradient_checkpointing_enable()
    before = fingerprint(model)
    with RolloutWorker(model, CONFIG) as worker:
        joined = fingerprint(model)  # its projections are views now, of the same values
        worker.generate(PROMPTS, PARAMS)
        worker.exchange(model)
        assert fingerprint(model) == joined
    assert fingerprint(model) == joined
    for key in before:
        if key == "parameters":
            without_address = [[(*p[:2], *p[3:6], *p[7:]) for p in prints[key]] for prints in (before, joined)]
            assert without_address[0] == without_address[1]
        else:
            assert joined[key] == before[key], key


def test_metrics_of_a_phase(worker: RolloutWorker) -> None:
    groups = worker.generate(PROMPTS, PARAMS)
    lengths = [len(c.token_ids) for group in groups for c in group]
    metrics = worker.metrics
    assert metrics.generated_tokens == sum(lengths)
    assert sorted(metrics.completion_lengths) == sorted(lengths)
    # prompts of 5, 12 and 3 in blocks of 8: of the second, 8 tokens are shared
    assert metrics.prefill_tokens == 2 * 5 + 12 + 4 + 2 * 3
    assert 0.0 < metrics.row_occupancy <= 1.0
    assert 0.0 < metrics.kv_util <= 1.0
    assert 0.0 <= metrics.gpu_idle_frac < 1.0
    assert metrics.busy_s <= metrics.generate_s
    worker.generate(PROMPTS, PARAMS)
    assert worker.totals.phases == 2
    assert worker.totals.generated_tokens == 2 * sum(lengths)
