"""The fused decoder: that it is what runs, gives the module's numbers, and leaves training and saving as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.kernels import layer_ops
from rollout.engine.models.forward import ModuleForward
from rollout.engine.models.fused import FusedDecoder, obstacle
from rollout.engine.models.join import join_projections, joined
from tests.tiny_models import ARCHITECTURES, ragged_prompts, tiny

CONFIG = EngineConfig(block_size=8, max_rows=4, max_model_len=64)
PARAMS = SamplingParams(n=2, max_tokens=12, seed=3, ignore_eos=True)
PROMPTS = ragged_prompts((5, 17, 9))
FUSED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def tokens(model: Any, **config: Any) -> list[list[int]]:
    with RolloutWorker(model, EngineConfig(block_size=8, max_rows=4, max_model_len=64, **config)) as worker:
        return [c.token_ids for group in worker.generate(PROMPTS, PARAMS) for c in group]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_decoders_are_fused_and_others_are_not(architecture: str) -> None:
    with RolloutWorker(tiny(architecture), CONFIG) as worker:
        expected = FusedDecoder if architecture in FUSED else ModuleForward
        assert type(worker.engine.runner.forward) is expected
    with RolloutWorker(tiny(architecture), EngineConfig(block_size=8, max_rows=4, fused_decoder=False)) as worker:
        assert type(worker.engine.runner.forward) is ModuleForward


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_gives_the_modules_tokens(architecture: str) -> None:
    model = tiny(architecture)
    assert tokens(model) == tokens(model, fused_decoder=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_fused_is_greedy_as_the_module_is_at_length(architecture: str) -> None:
    model = tiny(architecture, max_position_embeddings=512)
    greedy = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    completions = []
    for fused in (True, False):
        with RolloutWorker(model, EngineConfig(block_size=8, max_rows=4, fused_decoder=fused)) as worker:
            completions.append(worker.generate(PROMPTS, greedy))
    for (ours,), (theirs,) in zip(*completions, strict=True):
        assert len(ours.token_ids) == 300
        assert ours.token_ids == theirs.token_ids


def test_another_computation_under_a_known_name_is_run_by_its_module() -> None:
    model = tiny("llama")
    with torch.no_grad():
        expected = tokens(model, fused_decoder=False)
    own = type(model.model.layers[0].mlp)
    forward = own.forward
    try:
        own.forward = lambda self, x: forward(self, x) * 2  # say, a model that scales its branches
        with pytest.warns(UserWarning, match="other logits than LlamaForCausalLM"):
            scaled = tokens(model)
        assert scaled == tokens(model, fused_decoder=False)
        assert scaled != expected
    finally:
        own.forward = forward


def test_obstacles_are_named() -> None:
    assert obstacle(tiny("gemma2")) == "its type is gemma2"
    assert obstacle(tiny("llama", hidden_act="gelu")) == "its activation is gelu"
    assert obstacle(tiny("llama", mlp_bias=True)) == "its output or MLP projections have biases"
    assert obstacle(tiny("llama")) is None


def test_joined_are_only_neighbours_in_order() -> None:
    buffer = torch.arange(24.0).view(6, 4)
    a, b, c = buffer.split([1, 2, 3])
    whole = joined([a, b, c])
    assert whole is not None
    assert torch.equal(whole, buffer)
    assert whole.data_ptr() == buffer.data_ptr()
    tail = joined([b, c])
    assert tail is not None and torch.equal(tail, buffer[1:])
    assert joined([b, a]) is None
    assert joined([a, c]) is None
    assert joined([a, b.clone()]) is None
    assert joined([torch.ones(2, 3).T, torch.ones(2, 3).T]) is None


def test_chains_are_for_weights_that_lie_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def chain_for(tokens: int, widths: tuple[int, ...], like: Tensor) -> str:
        asked.append((tokens, widths))
        return "streamed"

    monkeypatch.setattr(layer_ops, "chain_for", chain_for)
    module = tiny("llama", hidden_size=48, head_dim=16, num_attention_heads=4, intermediate_size=80).eval()
    assert FusedDecoder(module, 64)._chain(1) is None, "projections lie apart"
    join_projections(module)
    assert FusedDecoder(module, 64)._chain(1) == "streamed"
    assert asked == [(1, (48, 64, 80))]
    attention, mlp = module.model.layers[1].self_attn, module.model.layers[0].mlp
    for projection in (attention.o_proj, mlp.down_proj):
        kept = projection.weight.data
        projection.weight.data = kept.T.contiguous().T
        assert FusedDecoder(module, 64)._chain(1) is None, "one is transposed in memory"
        projection.weight.data = kept
    for projection in (attention.v_proj, mlp.up_proj):
        kept = projection.weight.data
        projection.weight.data = kept.clone()
        assert FusedDecoder(module, 64)._chain(1) is None, "one lies apart from its neighbours"
        projection.weight.data = kept


def test_prompts_take_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def chain_for(tokens: int, *_: object) -> None:
        asked.append(tokens)

    monkeypatch.setattr(layer_ops, "chain_for", chain_for)
    tokens(tiny("llama"))
    assert asked
    assert max(asked) <= CONFIG.max_rows < min(map(len, PROMPTS)), "rows that decode, and no prompt's tokens"


def worker_and_module(model: Any) -> tuple[RolloutWorker, Any]:
    worker = RolloutWorker(model, CONFIG)
    return worker, worker.engine.module


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_learners_projections_become_views_and_train_on(architecture: str) -> None:
    model, twin = tiny(architecture), tiny(architecture)
    before = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    worker, module = worker_and_module(model)
    with worker:
        attention = model.model.layers[0].self_attn
        assert joined([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True)), "the same Parameter objects"
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), module.parameters(), strict=True))
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            for _ in range(3):
                ids = torch.tensor([PROMPTS[1]])
                m(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), "training is the same, bit for bit"
        assert worker.exchange(model).copied == 0
        trained = [c.token_ids for group in worker.generate(PROMPTS, PARAMS) for c in group]
    assert trained == tokens(twin)
    assert trained != tokens(tiny(architecture))


def test_saving_and_loading_go_on(tmp_path: Path) -> None:
    model, twin = tiny("llama", seed=1), tiny("llama", seed=2)
    worker, _ = worker_and_module(model)
    with worker:
        model.save_pretrained(tmp_path / "views")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "views")
        for (name, a), (_, b) in zip(model.state_dict().items(), reloaded.state_dict().items(), strict=True):
            assert torch.equal(a, b), name
        model.load_state_dict(twin.state_dict())
        assert worker.exchange(model).copied == 0
        assert [c.token_ids for group in worker.generate(PROMPTS, PARAMS) for c in group] == tokens(twin)


def test_checkpoints_of_accelerate_hold_every_weight(tmp_path: Path) -> None:
    """What takes tensors of one storage for one would keep q and leave k and v out, without an error."""
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    accelerator = accelerate.Accelerator(cpu=True)
    model, twin = tiny("llama", seed=1), tiny("llama", seed=1)
    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "before"))
    worker, _ = worker_and_module(model)
    with worker:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        accelerator.load_state(str(tmp_path / "before"))
        assert worker.exchange(model).copied == 0, "it was loaded in place"
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b), name
        accelerator.save_model(prepared, str(tmp_path / "during"))
    safetensors.save_model(model, str(tmp_path / "after.safetensors"))
    for file in (tmp_path / "during" / "model.safetensors", tmp_path / "after.safetensors"):
        saved = safetensors.load_file(file)
        assert saved.keys() == dict(twin.named_parameters()).keys()
        assert all(torch.equal(saved[name], parameter) for name, parameter in twin.named_parameters())


def test_weights_that_move_into_shared_memory_are_followed() -> None:
    model = tiny("llama")
    worker, _ = worker_and_module(model)
    with worker:
        model.share_memory()  # as torch.multiprocessing does with what it sends
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(3.0)
        assert worker.exchange(model).copied == 0
        moved = [c.token_ids for group in worker.generate(PROMPTS, PARAMS) for c in group]
    assert moved == tokens(model, fused_decoder=False)


def test_two_engines_share_a_learners_joined_projections() -> None:
    model = tiny("qwen3")
    first, module = worker_and_module(model)
    with first:
        pointers = [p.data_ptr() for p in model.parameters()]
        second, other = worker_and_module(model)
        with second:
            assert [p.data_ptr() for p in model.parameters()] == pointers
            assert join_projections(other) == 4, "the buffers that are there are found"
            with torch.no_grad():
                model.model.layers[0].self_attn.v_proj.weight.mul_(3.0)
            for worker in (first, second):
                assert worker.exchange(model).copied == 0
                assert [c.token_ids for group in worker.generate(PROMPTS, PARAMS) for c in group] == tokens(model)
    third, module = worker_and_module(model)  # nobody keeps the buffers any more
    with third:
        assert join_projections(module) == 4
        assert third.exchange(model).copied == 0


def test_a_learner_that_moves_away_is_copied_from() -> None:
    model = tiny("llama")
    worker, _ = worker_and_module(model)
    with worker:
        model.to(torch.float64)
        model.to(torch.float32)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(3.0)
        report = worker.exchange(model)
        assert report.copied > 0
        moved = [c.token_ids for group in worker.generate(PROMPTS, PARAMS) for c in group]
    assert moved == tokens(model)


def test_views_of_a_flat_buffer_stay_where_they_are() -> None:
    model = tiny("llama")
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for parameter in model.parameters():  # as DeepSpeed's ZeRO-1 and 2 lay them out
        parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    pointers = [p.data_ptr() for p in model.parameters()]
    worker, module = worker_and_module(model)
    with worker:
        worker.generate(PROMPTS, PARAMS)
        assert [p.data_ptr() for p in model.parameters()] == pointers
        # q, k and v follow one another in the flat buffer as it is
        assert join_projections(module) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engines_own_copies_are_joined(dtype: torch.dtype) -> None:
    model = tiny("qwen2").double().float() if dtype == torch.float32 else tiny("qwen2")
    peft = pytest.importorskip("peft")
    if dtype == torch.float32:
        config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], r=2)
        model = peft.get_peft_model(model, config)
    with RolloutWorker(model, EngineConfig(block_size=8, max_rows=4, max_model_len=64, dtype=dtype)) as worker:
        forward = worker.engine.runner.forward
        assert isinstance(forward, FusedDecoder)
        assert all(layer.qkv.whole is not None and layer.gate_up.whole is not None for layer in forward.layers)
