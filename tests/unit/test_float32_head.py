"""A learner that keeps its head alone in float32 (TRL: `cast_lm_head_to_fp32`): logits come from that head here too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.calls import model_cost
from rollout.engine.models.forward import ModuleForward
from rollout.engine.models.fused import FusedDecoder
from rollout.engine.models.hf import build_module
from tests.tiny_models import fingerprint, ragged_prompts, tiny

PROMPTS = ragged_prompts((5, 17, 9))
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
UNTIED, TIED = "llama", "qwen2"


def with_float32_head(name: str, *, seed: int = 0, **sizes: Any) -> Any:
    """A bfloat16 model whose head computes in float32; what is tied to it looks up in float32 and hands bfloat16 on."""
    learner = tiny(name, seed=seed, **sizes).to(torch.bfloat16)
    head = learner.lm_head.float()
    head.forward = lambda hidden: F.linear(hidden.float(), head.weight)
    if learner.config.tie_word_embeddings:
        learner.model.embed_tokens.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    return learner.eval()


def make_worker(learner: nn.Module, **config: Any) -> RolloutWorker:
    return RolloutWorker(learner, EngineConfig(block_size=8, max_rows=4, max_model_len=64, **config))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (UNTIED, FusedDecoder),
        (TIED, FusedDecoder),
        (UNTIED, ModuleForward),
        (TIED, ModuleForward),
        ("gemma3", ModuleForward),  # scales its embeddings, which are tied
    ],
)
def test_logprobs_are_those_of_the_learners_forward(name: str, kind: type) -> None:
    learner = with_float32_head(name)
    before = fingerprint(learner)
    with make_worker(learner, fused_decoder=kind is FusedDecoder) as worker:
        engine, seen = worker.engine, []
        assert type(engine.runner.forward) is kind
        assert engine.dtype == engine.kv.dtype == torch.bfloat16
        forward = engine.runner.forward
        engine.runner.forward = lambda *inputs: seen.append(forward(*inputs)) or seen[-1]  # type: ignore[func-returns-value]
        completions = [group[0] for group in worker.generate(PROMPTS, PARAMS)]
    after = fingerprint(learner)
    assert (after["configs"], after["hooks"]) == (before["configs"], before["hooks"])
    assert all(logits.dtype == torch.float32 for logits in seen)
    assert any((logits != logits.bfloat16()).any() for logits in seen), "computed in float32, not only cast to it"
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        with torch.no_grad():
            logits = learner(input_ids=ids).logits
        assert logits.dtype == torch.float32
        start = len(completion.prompt_ids)
        expected = logits.log_softmax(-1)[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=0.06)


@pytest.mark.parametrize("name", [UNTIED, TIED])
def test_the_head_is_shared_and_tied_ones_stay_one(name: str) -> None:
    learner = with_float32_head(name)
    with make_worker(learner) as worker:
        module: Any = worker.engine.module
        dtypes = {n: p.dtype for n, p in module.named_parameters(remove_duplicate=False)}
        wide = {"lm_head.weight"} | ({"model.embed_tokens.weight"} if name == TIED else set())
        assert {n for n, dtype in dtypes.items() if dtype == torch.float32} == wide
        assert (module.lm_head.weight is module.model.embed_tokens.weight) == (name == TIED)
        assert module.lm_head.weight.data_ptr() == learner.lm_head.weight.data_ptr()
        report = worker.exchange(learner)
        assert (report.shared, report.copied) == (len(list(learner.parameters())), 0)
        cost = model_cost(worker.engine)
    assert cost is not None
    read = [p for n, p in learner.named_parameters() if name == TIED or n != "model.embed_tokens.weight"]
    assert cost.weight_bytes == sum(p.nbytes for p in read)


def test_an_exchange_keeps_every_bit_of_a_head_of_the_engines_own() -> None:
    learner, other = with_float32_head(TIED), with_float32_head(TIED, seed=5)
    engine: Any = build_module(learner, device="cpu", dtype=torch.float16)
    assert engine.model.norm.weight.dtype == torch.float16
    with make_worker(learner, dtype=torch.float16) as worker:
        first = worker.generate(PROMPTS, PARAMS)
        learner.load_state_dict(other.state_dict())
        worker.exchange(learner)
        module: Any = worker.engine.module
        assert torch.equal(module.lm_head.weight, other.lm_head.weight)
        assert module.lm_head.weight.dtype == torch.float32
        assert [g[0].token_ids for g in worker.generate(PROMPTS, PARAMS)] != [g[0].token_ids for g in first]


def test_a_learner_in_float32_throughout_says_nothing_of_its_head() -> None:
    engine: Any = build_module(tiny(UNTIED), device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}


def test_embeddings_alone_in_float32_are_no_head() -> None:
    learner = tiny(UNTIED).to(torch.bfloat16)
    learner.model.embed_tokens.float()
    engine: Any = build_module(learner, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
