"""A float32 head on a bfloat16 body, in CUDA graphs and Triton's sampler: logprobs within 0.15 nats of the learner."""

from __future__ import annotations

import pytest
import torch

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.models.forward import ModuleForward
from rollout.engine.models.fused import FusedDecoder
from tests.tiny_models import ragged_prompts
from tests.unit.test_float32_head import TIED, UNTIED, with_float32_head

pytestmark = pytest.mark.gpu

PROMPTS = ragged_prompts((5, 17, 9))


@pytest.mark.parametrize("kind", [FusedDecoder, ModuleForward])
@pytest.mark.parametrize("name", [UNTIED, TIED])
def test_logprobs_are_those_of_the_learners_forward(name: str, kind: type) -> None:
    learner = with_float32_head(name, hidden_size=256, intermediate_size=512).cuda()
    config = EngineConfig(max_rows=4, kv_cache_bytes=1 << 26, fused_decoder=kind is FusedDecoder)
    with RolloutWorker(learner, config) as worker:
        assert type(worker.engine.runner.forward) is kind and worker.engine.dtype == torch.bfloat16
        assert worker.engine.module.lm_head.weight.data_ptr() == learner.lm_head.weight.data_ptr()  # type: ignore[union-attr]
        completions = [group[0] for group in worker.generate(PROMPTS, SamplingParams(max_tokens=32, ignore_eos=True))]
        captures = worker.engine.steps.graphs.captures
        assert captures > 0
        worker.exchange(learner)
        assert worker.engine.steps.graphs.captures == captures
    for completion in completions:
        ids = torch.tensor([completion.prompt_ids + completion.token_ids], device="cuda")
        with torch.no_grad():
            logits = learner(input_ids=ids).logits
        start = len(completion.prompt_ids)
        expected = logits.log_softmax(-1)[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        assert logits.dtype == torch.float32
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.cpu(), rtol=0, atol=0.15)
