"""Models that only their own forward shows the engine can't run: each is refused with its reason, none runs wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from rollout import EngineConfig, RolloutWorker, SamplingParams
from tests.tiny_models import SIZES

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def make(family: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**SIZES, **config})
    ).eval()


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("DiffLlama", {}, "layer 0 of DiffLlamaAttention attends twice"),
        ("Doge", {}, "DogeAttention makes a mask of its own"),
        ("Phimoe", {**MOE, "sliding_window": 8}, "sliding window of 8 in its mask alone"),
    ],
)
def test_is_refused_with_its_reason(family: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RolloutWorker(make(family, **config), EngineConfig(block_size=8, max_rows=2, max_model_len=64))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Phimoe", {**MOE, "sliding_window": None}),
        ("Phimoe", {**MOE, "sliding_window": 64}),
        ("Llama", {"sliding_window": 8}),  # left over in a config, and read by nobody
    ],
)
def test_a_window_that_nothing_reaches_is_none(family: str, config: dict[str, Any]) -> None:
    model = make(family, **config)
    with RolloutWorker(model, EngineConfig(block_size=8, max_rows=2, max_model_len=64)) as worker:
        ((completion,),) = worker.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
    with torch.no_grad():
        logprobs = model(ids, use_cache=False).logits[0, 2:-1].log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, atol=1e-5, rtol=0.0)
