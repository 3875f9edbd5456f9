"""The law: what comes out is what Hugging Face's own forward gives, on a CPU in float32, for every architecture."""

from __future__ import annotations

import pytest
import torch

from rollout import Completion, EngineConfig, RolloutWorker, SamplingParams
from tests.tiny_models import ARCHITECTURES, peaked, ragged_prompts, tiny, tokens

PROMPTS = ragged_prompts((5, 17, 32, 1, 16, 41))
SMALL = {"block_size": 8, "max_rows": 8}


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """What `generate` gives, one prompt at a time, so that nothing is padded."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def logprobs_of(model: torch.nn.Module, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """The learner's forward over prompt and completion: each token's logprob, float32 [tokens]."""
    prompt = list(completion.prompt_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    scaled = (logits.float() / temperature).log_softmax(-1)
    return scaled.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_generate_and_logprobs_are_the_forwards(architecture: str) -> None:
    model = tiny(architecture).eval()
    with RolloutWorker(model, EngineConfig(**SMALL)) as worker:
        groups = worker.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.0))
        sampled = worker.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.7, seed=5))
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        assert completion.token_ids == greedy(model, prompt, 20)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), logprobs_of(model, completion), atol=1e-5, rtol=0.0
        )
    for (completion,) in sampled:
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), logprobs_of(model, completion, 0.7), atol=1e-5, rtol=0.0
        )


SAMPLED = SamplingParams(n=3, max_tokens=24, temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return peaked()


@pytest.fixture(scope="module")
def oracle(model: torch.nn.Module) -> list[list[Completion]]:
    """Without overlap, one row at a time: nothing shares anything."""
    with RolloutWorker(model, EngineConfig(block_size=8, max_rows=1, overlap=False)) as worker:
        groups = worker.generate(PROMPTS, SAMPLED)
    assert len({tuple(c.token_ids) for group in groups for c in group}) == 3 * len(PROMPTS), "samples must differ"
    assert any(c.finish_reason == "eos" for group in groups for c in group)
    return groups


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap": False},
        {"use_graphs": True, "max_rows": 24},
        {"max_rows": 3},
        {"max_prefill_tokens": 7},
        {"block_size": 64},
        {"kv_cache_bytes": 12 * 2 * 2 * 2 * 8 * 16 * 4},  # 12 blocks: too few for all, so that rows are preempted
    ],
    ids=["overlap", "in-turns", "padded", "3-rows", "chunked-prefill", "one-block", "preempting"],
)
def test_the_batch_a_completion_runs_in_changes_nothing(
    model: torch.nn.Module, oracle: list[list[Completion]], config: dict[str, object]
) -> None:
    with RolloutWorker(model, EngineConfig(**{**SMALL, **config})) as worker:
        if "kv_cache_bytes" in config:  # let it expect short completions, and so admit too many
            worker.generate(PROMPTS, SamplingParams(max_tokens=1))
        groups = worker.generate(PROMPTS, SAMPLED)
        worker.engine.scheduler.check_conservation()
        assert worker.engine.scheduler.blocks.used == 0
        if "kv_cache_bytes" in config:
            assert worker.metrics.preemptions_total > 0
    assert tokens(groups) == tokens(oracle)
    for group, expected in zip(groups, oracle, strict=True):
        for completion, other in zip(group, expected, strict=True):
            assert completion.finish_reason == other.finish_reason
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0.0
            )


def test_a_prompt_alone_gives_what_it_gave_among_others(model: torch.nn.Module, oracle: list[list[Completion]]) -> None:
    with RolloutWorker(model, EngineConfig(**SMALL)) as worker:
        alone = worker.generate([PROMPTS[2]], SAMPLED)
        backwards = worker.generate(PROMPTS[::-1], SAMPLED)
    assert tokens(alone) == tokens(oracle[2:3])
    assert tokens(backwards) == tokens(oracle[::-1])


def test_equal_prompts_of_one_call_are_further_samples(model: torch.nn.Module, oracle: list[list[Completion]]) -> None:
    one = SamplingParams(max_tokens=24, seed=11)
    with RolloutWorker(model, EngineConfig(**SMALL)) as worker:
        groups = worker.generate([PROMPTS[0]] * 3, one)
    assert [group[0].token_ids for group in groups] == [c.token_ids for c in oracle[0]]


def test_a_group_shares_its_prompt(model: torch.nn.Module) -> None:
    prompt = ragged_prompts((33,))
    with RolloutWorker(model, EngineConfig(**SMALL)) as worker:
        worker.generate(prompt, SamplingParams(n=8, max_tokens=2))
        # 33 = 4 full blocks of 8, and one token that every sample computes
        assert worker.metrics.prefill_tokens == 33 + 7 * 1
        worker.generate(prompt, SamplingParams(n=1, max_tokens=2))
        assert worker.metrics.prefill_tokens == 1


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}]
)
def test_filters_keep_what_they_say(model: torch.nn.Module, filters: dict[str, float]) -> None:
    params = SamplingParams(n=4, max_tokens=16, seed=2, **filters)
    plain = SamplingParams(n=4, max_tokens=16, seed=2)
    with RolloutWorker(model, EngineConfig(**SMALL)) as worker:
        groups = worker.generate(PROMPTS, params)
        mixed = worker.generate(PROMPTS, [params if i % 2 else plain for i in range(len(PROMPTS))])
    assert tokens(mixed)[1::2] == tokens(groups)[1::2]
    kept: list[float] = []
    for completion in groups[0] + groups[1]:
        full = logprobs_of(model, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), full, atol=1e-5, rtol=0.0)
        assert completion.kept_mass is not None
        assert all(p <= m + 1e-5 for p, m in zip(full.exp().tolist(), completion.kept_mass, strict=True))
        kept += completion.kept_mass
    assert min(kept) < 0.99
    assert mixed[0][0].kept_mass is None


def test_stop_ids_and_reasons(model: torch.nn.Module, oracle: list[list[Completion]]) -> None:
    long = next(c for c in oracle[0] if len(c.token_ids) > 6)
    stop = long.token_ids[4]
    with RolloutWorker(model, EngineConfig(**SMALL)) as worker:
        params = SamplingParams(n=3, max_tokens=24, seed=11, stop_token_ids=(stop,))
        stopped = worker.generate([PROMPTS[0]], params)[0][oracle[0].index(long)]
        endless = worker.generate(PROMPTS, SamplingParams(max_tokens=9, seed=11, ignore_eos=True))
    first = long.token_ids.index(stop)
    assert stopped.token_ids == long.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert {(len(c.token_ids), c.finish_reason) for (c,) in endless} == {(9, "length")}
    for group in oracle:
        for completion in group:
            assert (completion.finish_reason == "eos") == (completion.token_ids[-1] == model.config.eos_token_id)
            assert model.config.eos_token_id not in completion.token_ids[:-1]
