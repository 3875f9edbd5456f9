"""WeightExchange: the engine's weights are the learner's after it, whole, at the same addresses; or nothing changed."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.models import build_module, learner as learner_module
from rollout.engine.models.fused import FusedDecoder, obstacle
from rollout.weights import WeightExchange, named_weights
from rollout.weights.undo import Undo
from tests.tiny_models import ARCHITECTURES, fingerprint, ragged_prompts, tiny

peft = pytest.importorskip("peft")
torch.set_num_threads(1)


def build(learner: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    return build_module(learner, device="cpu", dtype=dtype)


def addresses(module: nn.Module) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in module.state_dict(keep_vars=True).items()}


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def perturb(module: nn.Module, seed: int = 1) -> None:
    """Adds noise to every parameter in place, as an optimiser's step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.05)


def step(learner: Any) -> None:
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-2)
    ids = torch.arange(3, 13)[None]
    learner(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class TestShared:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_optimizer_steps_arrive_by_themselves(self, name):
        learner = tiny(name)
        skeleton = build(learner)
        old, where = values(skeleton), addresses(skeleton)
        step(learner)
        assert_same(values(skeleton), values(learner))
        assert not torch.equal(values(skeleton)["model.norm.weight"], old["model.norm.weight"])
        before = fingerprint(learner)
        report = WeightExchange(skeleton).exchange(learner)
        assert fingerprint(learner) == before
        assert (report.shared, report.copied, report.copied_bytes, report.rebound) == (
            len(list(learner.parameters())),
            0,
            0,
            0,
        )
        assert report.seconds > 0
        assert addresses(skeleton) == where

    def test_through_wrappers(self):
        learner = tiny("llama")
        assert WeightExchange(build(learner)).exchange(torch.compile(learner)).copied == 0


class TestCopied:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_float32_arrives_as_bfloat16(self, name):
        learner = tiny(name)
        skeleton = build(learner, torch.bfloat16)
        where = addresses(skeleton)
        step(learner)
        before = fingerprint(learner)
        report = WeightExchange(skeleton).exchange(learner)
        assert fingerprint(learner) == before
        assert_same(values(skeleton), {n: t.to(torch.bfloat16) for n, t in values(learner).items()})
        assert addresses(skeleton) == where
        parameters = list(learner.parameters())
        assert (report.shared, report.copied) == (0, len(parameters))
        assert 0.0 < report.copy_seconds < report.seconds
        assert report.copied_bytes == 2 * sum(p.numel() for p in parameters)

    def test_one_fused_pass_for_a_pair_of_dtypes(self, monkeypatch):
        learner = tiny("llama")
        skeleton = build(learner, torch.bfloat16)
        calls: list[int] = []
        real = torch._foreach_copy_

        def counted(targets, sources, non_blocking=False):
            calls.append(len(targets))
            real(targets, sources, non_blocking=non_blocking)

        monkeypatch.setattr(torch, "_foreach_copy_", counted)
        WeightExchange(skeleton).exchange(learner)
        assert calls == [len(list(learner.parameters()))]

    def test_strides_that_differ(self):
        learner = tiny("llama")
        skeleton = build(learner, torch.bfloat16)
        weight = learner.lm_head.weight
        weight.data = weight.detach().T.contiguous().T
        perturb(learner)
        WeightExchange(skeleton).exchange(learner)
        assert_same(values(skeleton), {n: t.to(torch.bfloat16) for n, t in values(learner).items()})

    def test_parameters_that_became_views_of_fused_storage(self):
        learner = tiny("llama")
        skeleton = build(learner)
        attention = skeleton.model.layers[0].self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        fused = torch.cat([p.weight.detach() for p in parts])
        for part, view in zip(parts, fused.split([64, 32, 32]), strict=True):
            part.weight = nn.Parameter(view, requires_grad=False)
        perturb(learner)
        report = WeightExchange(skeleton).exchange(learner)
        assert report.copied == 3
        theirs = learner.model.layers[0].self_attn
        assert torch.equal(fused, torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]))

    def test_persistent_buffers(self):
        learner = tiny("llama")
        skeleton = build(learner, torch.bfloat16)
        for model in (learner, skeleton):
            model.model.register_buffer("bias_of_routing", torch.zeros(4))
        learner.model.bias_of_routing += 1
        assert "model.bias_of_routing" in dict(named_weights(learner))
        WeightExchange(skeleton).exchange(learner)
        assert skeleton.model.bias_of_routing.tolist() == [1.0] * 4


class TestRebound:
    @pytest.mark.parametrize("how", ["to", "assign", "data"])
    def test_a_moved_learner_is_copied_from_then_on(self, how):
        learner = tiny("qwen2")
        skeleton = build(learner)
        exchange = WeightExchange(skeleton)
        where = addresses(skeleton)
        if how == "to":
            learner.to(torch.bfloat16).to(torch.float32)
        elif how == "assign":
            learner.load_state_dict(values(learner), assign=True)
            learner.tie_weights()
        else:
            for parameter in learner.parameters():
                parameter.data = parameter.data.clone()
        perturb(learner)
        count = len(list(learner.parameters()))
        report = exchange.exchange(learner)
        assert (report.shared, report.copied, report.rebound) == (0, count, count)
        assert_same(values(skeleton), values(learner))
        assert addresses(skeleton) == where
        perturb(learner, seed=2)
        report = exchange.exchange(learner)
        assert (report.copied, report.rebound) == (count, 0)
        assert_same(values(skeleton), values(learner))

    def test_one_tensor(self):
        learner = tiny("llama")
        skeleton = build(learner)
        learner.model.norm.weight = nn.Parameter(torch.rand(64))
        report = WeightExchange(skeleton).exchange(learner)
        assert (report.copied, report.rebound, report.copied_bytes) == (1, 1, 256)
        assert torch.equal(skeleton.model.norm.weight, learner.model.norm.weight)

    def test_never_overwrites_a_model_in_use(self):
        learner, other = tiny("llama"), tiny("llama", seed=5)
        skeleton = build(learner)
        before = fingerprint(learner)
        with pytest.raises(ValueError, match="storage of the model it was built from"):
            WeightExchange(skeleton).exchange(other)
        assert fingerprint(learner) == before
        owned = build(learner, torch.bfloat16)
        WeightExchange(owned).exchange(other)
        assert torch.equal(owned.lm_head.weight, other.lm_head.weight.to(torch.bfloat16))

    def test_never_merges_into_a_base_in_use(self):
        learner = tiny("llama")
        skeleton = build(learner)
        adapted = lora(learner)
        before = fingerprint(learner)
        with pytest.raises(ValueError, match="and the adapters"):
            WeightExchange(skeleton).exchange(adapted)
        assert fingerprint(learner) == before


class TestRefused:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("fault", ["missing", "extra", "misshapen", "untied"])
    def test_other_tensors_change_nothing(self, fault, dtype):
        name = "qwen2" if fault == "untied" else "llama"
        learner = tiny(name)
        skeleton = build(learner, dtype)
        changed = tiny(name, seed=5)
        mlp = changed.model.layers[1].mlp
        if fault == "missing":
            mlp.up_proj = nn.Identity()
        elif fault == "extra":
            mlp.added = nn.Linear(2, 2, bias=False)
        elif fault == "misshapen":
            mlp.up_proj = nn.Linear(64, 95, bias=False)
        else:
            changed.lm_head.weight = nn.Parameter(changed.lm_head.weight.detach().clone())
        what, where = {
            "missing": ("missing", "model.layers.1.mlp.up_proj.weight"),
            "extra": ("extra", "model.layers.1.mlp.added.weight"),
            "misshapen": ("of another shape", "model.layers.1.mlp.up_proj.weight"),
            "untied": ("extra", "lm_head.weight"),
        }[fault]
        old = values(skeleton)
        exchange = WeightExchange(skeleton)
        with pytest.raises(ValueError, match=f"{what}: {where}.*Nothing was written"):
            exchange.exchange(changed)
        assert_same(values(skeleton), old)
        assert exchange.intact


class TestUndone:
    """Reading fails in the second layer, when the first has been written."""

    def halfway(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        monkeypatch.setattr(learner_module, "CHUNK_BYTES", 1)
        learner = randomised(lora(tiny("llama")))
        skeleton = build(learner, dtype)
        perturb(learner)
        layer = learner.get_base_model().model.layers[1].self_attn.q_proj
        layer.lora_A["default"], layer.whole = nn.Linear(3, 3), layer.lora_A["default"]  # no product with B any more
        return learner, skeleton, layer

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_every_value_is_put_back(self, monkeypatch, dtype):
        learner, skeleton, layer = self.halfway(monkeypatch, dtype)
        exchange, old = WeightExchange(skeleton), values(skeleton)
        written = skeleton.model.layers[0].self_attn.q_proj.weight
        version = written._version
        with pytest.raises(RuntimeError, match="was undone, so the old weights are whole") as caught:
            exchange.exchange(learner)
        assert caught.value.__cause__ is not None
        assert written._version == version + 2, "written, and put back"
        assert exchange.intact
        # What is shared with the learner has changed with it, as it does without an exchange.
        own = {name for name, value in values(skeleton).items() if dtype == torch.bfloat16 or "q_proj" in name}
        assert_same({n: values(skeleton)[n] for n in own}, {n: old[n] for n in own})
        layer.lora_A["default"] = layer.whole
        exchange.exchange(learner)
        if dtype == torch.float32:
            assert_close_to_merged(skeleton, learner)
        assert not torch.equal(written, old["model.layers.0.self_attn.q_proj.weight"])

    def test_an_interrupt_is_undone_and_stays_one(self, monkeypatch):
        learner, skeleton, layer = self.halfway(monkeypatch, torch.bfloat16)
        exchange, old = WeightExchange(skeleton), values(skeleton)
        layer.get_delta_weight = mock.Mock(side_effect=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            exchange.exchange(learner)
        assert exchange.intact
        assert_same(values(skeleton), old)

    def test_what_cannot_be_undone_is_refused_until_the_next(self, monkeypatch):
        learner, skeleton, layer = self.halfway(monkeypatch, torch.bfloat16)
        exchange = WeightExchange(skeleton)
        with (
            mock.patch.object(Undo, "restore", side_effect=RuntimeError("the device is gone")),
            pytest.raises(RuntimeError, match="the device is gone"),
        ):
            exchange.exchange(learner)
        assert not exchange.intact
        with pytest.raises(RuntimeError, match="was undone"):
            exchange.exchange(learner)
        assert not exchange.intact, "what was put back is the mixture"
        layer.lora_A["default"] = layer.whole
        exchange.exchange(learner)
        assert exchange.intact

    def test_a_learner_that_is_there_costs_nothing(self):
        learner = tiny("llama")
        skeleton = build(learner, torch.bfloat16)
        with mock.patch.object(Undo, "save", side_effect=AssertionError("saved for nothing")):
            assert WeightExchange(skeleton).exchange(learner).copied > 0

    @pytest.mark.parametrize("kv", ["recompute", "keep"])
    def test_a_worker_goes_on_with_the_old_version(self, monkeypatch, kv):
        monkeypatch.setattr(learner_module, "CHUNK_BYTES", 1)
        learner = randomised(lora(tiny("llama")))
        config = EngineConfig(block_size=8, max_rows=4, max_model_len=64, dtype=torch.bfloat16)
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        prompts = ragged_prompts((5, 12))
        with RolloutWorker(learner, config) as worker:
            expected = [group[0] for group in worker.generate(prompts, params)]
            perturb(learner)
            layer = learner.get_base_model().model.layers[1].self_attn.q_proj
            layer.lora_A["default"], whole = nn.Linear(3, 3), layer.lora_A["default"]
            short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            stream = worker.stream(prompts, [params, short])
            ended = [next(stream)]  # the other one has tokens by now
            cache = worker.engine.kv.clone()
            with pytest.raises(RuntimeError, match="was undone"):
                worker.exchange(learner, kv=kv)
            assert torch.equal(worker.engine.kv, cache) == (kv == "keep")
            ended += stream
            assert worker.policy_version == 0 and not worker.needs_exchange
            got = {prompt: completion for prompt, _, completion in ended}
            assert got[0].token_ids == expected[0].token_ids and got[0].max_version == 0
            assert got[1].token_ids == expected[1].token_ids[:4]
            again = [group[0].token_ids for group in worker.generate(prompts, params)]
            assert again == [completion.token_ids for completion in expected]
            layer.lora_A["default"] = whole
            worker.exchange(learner, kv=kv)
            assert worker.policy_version == 1
            new = [group[0] for group in worker.generate(prompts, params)]
        with RolloutWorker(learner, config) as fresh:
            assert [group[0].token_ids for group in fresh.generate(prompts, params)] == [c.token_ids for c in new]
        assert [c.token_ids for c in new] != [c.token_ids for c in expected]

    def test_asleep_nothing_is_saved_of_what_sleep_gave_up(self, monkeypatch):
        learner = randomised(lora(tiny("llama")))
        config = EngineConfig(block_size=8, max_rows=4, max_model_len=64, dtype=torch.bfloat16)
        with RolloutWorker(learner, config) as worker:
            worker.sleep()
            saved = mock.Mock(side_effect=AssertionError("room was looked for"))
            with mock.patch.object(Undo, "_room", saved):
                worker.exchange(learner)
            worker.wake()
            assert worker.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0][0].token_ids


class TestUndo:
    def weights(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(5, 7, generator=generator),
            torch.randn(3, 4, generator=generator).T,
            torch.randn(9, generator=generator).bfloat16(),
            torch.tensor(3),
        ]

    def test_any_shape_stride_and_dtype_comes_back(self):
        weights, expected = self.weights(), self.weights()
        undo = Undo()
        undo.save(weights)
        for weight in weights:
            weight.fill_(7)
        undo.restore()
        undo.close()
        for weight, old in zip(weights, expected, strict=True):
            assert torch.equal(weight, old) and weight.stride() == old.stride()

    def test_borrowed_memory_is_used_and_asked_for_by_size(self):
        weights = self.weights()
        lent = torch.zeros(4096, dtype=torch.uint8)
        asked: list[int] = []

        def borrow(size: int) -> torch.Tensor:
            asked.append(size)
            return lent

        undo = Undo(borrow=borrow)
        undo.save(weights)
        assert asked == [4 * 512]
        assert torch.equal(lent[: 5 * 7 * 4].view(torch.float32).view(5, 7), weights[0])

    def test_what_is_lost_is_left_alone(self):
        weights, expected = self.weights(), self.weights()
        undo = Undo(lost=lambda weight: weight is weights[0])
        undo.save(weights)
        for weight in weights:
            weight.fill_(7)
        undo.restore()
        assert (weights[0] == 7).all() and torch.equal(weights[2], expected[2])

    def test_only_what_was_saved_has_begun(self):
        undo = Undo(borrow=mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            undo.save(self.weights())
        assert not undo.begun


class Float32Head(nn.Linear):
    """Computes the logits in float32, whatever the rest runs in."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(self.weight.dtype))


class LlamaWithFloat32Head(transformers.LlamaForCausalLM):
    _keep_in_fp32_modules_strict = {"lm_head"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = Float32Head(config.hidden_size, config.vocab_size, bias=False)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # the class's own file tells nothing


def with_float32_head(dtype: torch.dtype, seed: int = 0) -> Any:
    learner = LlamaWithFloat32Head(tiny("llama").config)
    learner.load_state_dict(values(tiny("llama", seed=seed)))
    learner.to(dtype).lm_head.float()
    return learner


class TestFloat32Head:
    def dtypes(self, module: nn.Module) -> dict[str, torch.dtype]:
        return {name: parameter.dtype for name, parameter in module.named_parameters()}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_every_tensor_keeps_its_dtype(self, dtype):
        learner = with_float32_head(dtype)
        skeleton = build(learner, torch.bfloat16)
        expected = {n: torch.float32 if n == "lm_head.weight" else torch.bfloat16 for n in self.dtypes(learner)}
        assert self.dtypes(skeleton) == expected
        assert skeleton.lm_head.weight.data_ptr() == learner.lm_head.weight.data_ptr()
        exchange, where = WeightExchange(skeleton), addresses(skeleton)
        perturb(learner)
        report = exchange.exchange(learner)
        assert report.shared == (len(expected) if dtype == torch.bfloat16 else 1)
        learner.lm_head.weight.data = learner.lm_head.weight.data + 1.0
        report = exchange.exchange(learner)
        assert report.rebound == 1
        assert self.dtypes(skeleton) == expected and addresses(skeleton) == where
        assert torch.equal(skeleton.lm_head.weight, learner.lm_head.weight), "no bit is lost on the way"
        assert torch.equal(skeleton.model.norm.weight, learner.model.norm.weight.bfloat16())

    def test_a_head_cast_in_the_engine_gets_all_the_bits(self):
        learner = tiny("llama")
        skeleton = build(learner, torch.bfloat16)
        skeleton.lm_head.float()
        WeightExchange(skeleton).exchange(learner)
        assert torch.equal(skeleton.lm_head.weight, learner.lm_head.weight)
        assert obstacle(skeleton) is None
        skeleton.model.norm.float()
        assert obstacle(skeleton) == "its parameters are of 2 dtypes beside the head's"

    def test_a_class_with_a_head_of_its_own_is_run(self):
        learner = with_float32_head(torch.bfloat16)
        config = EngineConfig(block_size=8, max_rows=4, max_model_len=64)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        with RolloutWorker(learner, config) as worker:
            assert isinstance(worker.engine.runner.forward, FusedDecoder)
            old = worker.generate([[5, 6, 7]], params)
            learner.load_state_dict(values(with_float32_head(torch.bfloat16, seed=5)))
            report = worker.exchange(learner)
            assert report.shared == len(list(learner.parameters()))
            ((completion,),) = worker.generate([[5, 6, 7]], params)
        assert completion.token_ids != old[0][0].token_ids
        ids = torch.tensor([[5, 6, 7, *completion.token_ids]])
        with torch.no_grad():
            logits = learner.eval()(input_ids=ids).logits
        assert logits.dtype == torch.float32
        logprobs = logits.log_softmax(-1)[0, 2:-1].gather(1, ids[0, 3:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, rtol=0, atol=0.05)


# --- PEFT ---


def lora(learner: Any, name: str = "default", **options: Any) -> Any:
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return peft.get_peft_model(learner, peft.LoraConfig(**options), adapter_name=name)


def randomised(learner: Any, seed: int = 3) -> Any:
    """Gives every adapter values that do something; B starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                if "magnitude" in name:
                    parameter.abs_().add_(0.5)
    return learner


def merged(learner: Any) -> Any:
    return copy.deepcopy(learner).merge_and_unload()


def assert_close_to_merged(skeleton: Any, learner: Any) -> None:
    theirs = dict(merged(learner).named_parameters(remove_duplicate=False))
    ours = dict(skeleton.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.detach(), theirs[name].detach().to(tensor.dtype), msg=lambda m, n=name: n + m)


LORAS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "biased": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "rslora": ("llama", {"use_rslora": True}),
    "all-linear": ("qwen3", {"target_modules": "all-linear"}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "modules_to_save": ("llama", {"modules_to_save": ["lm_head", "norm"]}),
    "dora": ("llama", {"use_dora": True}),
    "experts": ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "gemma": ("gemma3", {}),
}


def test_after_an_error_the_rest_is_read_all_the_same() -> None:
    """Other ranks gather what this one must, too: one that stopped reading would leave them waiting."""
    from rollout.engine.models.learner import Source, write

    read: list[int] = []

    def source(index: int) -> Source:
        def value() -> torch.Tensor:
            read.append(index)
            if index in (1, 3):
                raise OSError(f"tensor {index} is gone")
            return torch.full((2,), float(index))

        return Source(torch.Size([2]), torch.float32, torch.device("cpu"), True, None, value)

    targets = [torch.zeros(2) for _ in range(5)]
    with pytest.raises(OSError, match="tensor 1 is gone"):
        write([(target, source(index)) for index, target in enumerate(targets)])
    assert read == [0, 1, 2, 3, 4]
    assert all(not target.any() for target in targets), "nothing is written behind an error"


class TestLora:
    @pytest.mark.parametrize("case", LORAS)
    def test_built_and_exchanged_merged_and_the_base_is_untouched(self, case):
        name, options = LORAS[case]
        learner = randomised(lora(tiny(name), **options))
        before = fingerprint(learner)
        skeleton = build(learner)
        assert fingerprint(learner) == before
        assert type(skeleton) is type(learner.get_base_model())
        assert_close_to_merged(skeleton, learner)
        where = addresses(skeleton)
        randomised(learner, seed=4)
        before = fingerprint(learner)
        report = WeightExchange(skeleton).exchange(learner)
        assert fingerprint(learner) == before
        assert_close_to_merged(skeleton, learner)
        assert addresses(skeleton) == where
        assert report.copied > 0
        assert report.shared > 0
        assert report.rebound == 0

    def test_runs_as_the_learner_does(self):
        learner = randomised(lora(tiny("llama"), modules_to_save=["lm_head"]))
        skeleton = build(learner)
        skeleton.config._attn_implementation = "sdpa"
        ids = torch.arange(3, 23)[None]
        with torch.no_grad():
            torch.testing.assert_close(skeleton(input_ids=ids).logits, learner.eval()(input_ids=ids).logits)

    def test_only_adapted_tensors_are_the_engines_own(self):
        learner = lora(tiny("llama"))
        skeleton = build(learner)
        base = {n.replace(".base_layer", ""): p for n, p in learner.get_base_model().named_parameters()}
        own = {n for n, p in skeleton.named_parameters() if p.data_ptr() != base[n].data_ptr()}
        parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        assert own == {f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts}
        assert WeightExchange(skeleton).exchange(learner).copied == 6

    def test_a_trained_saved_module_is_shared(self):
        learner = randomised(lora(tiny("llama"), modules_to_save=["lm_head"]))
        skeleton = build(learner)
        saved = learner.get_base_model().lm_head.modules_to_save["default"].weight
        assert skeleton.lm_head.weight.data_ptr() == saved.data_ptr()

    def test_several_active_adapters(self):
        learner = lora(tiny("llama"))
        learner.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
        randomised(learner)
        skeleton = build(learner)
        for active in (["default", "second"], ["second"], ["default"]):
            learner.base_model.set_adapter(active)
            WeightExchange(skeleton).exchange(learner)
            assert_close_to_merged(skeleton, learner)

    def test_several_dora_adapters_act_as_in_forward(self):
        learner = lora(tiny("llama"), use_dora=True)
        learner.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
        learner.base_model.set_adapter(["default", "second"])
        skeleton = build(randomised(learner))
        layer = learner.get_base_model().model.layers[0].self_attn.q_proj
        eye = torch.eye(64)
        with torch.no_grad():
            torch.testing.assert_close(
                skeleton.model.layers[0].self_attn.q_proj.weight.detach(), layer.eval()(eye).T.contiguous()
            )

    def test_disabled_adapters_give_the_base(self):
        learner = randomised(lora(tiny("llama"), modules_to_save=["norm"]))
        skeleton = build(learner, torch.bfloat16)
        base = learner.get_base_model()
        with learner.disable_adapter():
            WeightExchange(skeleton).exchange(learner)
        q, norm = base.model.layers[0].self_attn.q_proj, base.model.norm
        assert torch.equal(skeleton.model.layers[0].self_attn.q_proj.weight, q.base_layer.weight.bfloat16())
        assert torch.equal(skeleton.model.norm.weight, norm.original_module.weight.bfloat16())
        WeightExchange(skeleton).exchange(learner)
        assert_close_to_merged(skeleton, learner)

    def test_adapters_merged_by_the_learner_count_once(self):
        learner = randomised(lora(tiny("llama")))
        expected = merged(learner)
        skeleton = build(learner)
        learner.merge_adapter()
        WeightExchange(skeleton).exchange(learner)
        assert_same(values(skeleton), values(expected))
        with (
            pytest.raises(ValueError, match="merged and disabled"),
            learner.disable_adapter(),
        ):
            WeightExchange(skeleton).exchange(learner)

    def test_tied_embeddings_part_where_only_one_is_adapted(self):
        learner = randomised(lora(tiny("qwen2"), target_modules=["embed_tokens"]))
        skeleton = build(learner)
        base = learner.get_base_model()
        assert skeleton.lm_head.weight.data_ptr() == base.lm_head.weight.data_ptr()
        assert skeleton.model.embed_tokens.weight.data_ptr() != base.lm_head.weight.data_ptr()
        skeleton.config._attn_implementation = "sdpa"
        ids = torch.arange(3, 23)[None]
        with torch.no_grad():
            torch.testing.assert_close(skeleton(input_ids=ids).logits, learner.eval()(input_ids=ids).logits)

    def test_a_bfloat16_base_is_merged_with_one_rounding(self):
        learner = randomised(lora(tiny("llama").to(torch.bfloat16)))
        layer = learner.get_base_model().model.layers[0].self_attn.q_proj
        assert layer.lora_B["default"].weight.dtype == torch.float32
        exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
        ours = build(learner, torch.bfloat16).model.layers[0].self_attn.q_proj.weight
        assert torch.equal(ours, exact.to(torch.bfloat16))

    def test_merges_in_bounded_chunks(self, monkeypatch):
        learner = randomised(lora(tiny("llama")))
        skeleton = build(learner)
        alive: list[int] = []
        real = torch._foreach_copy_

        def watched(targets, sources, non_blocking=False):
            alive.append(sum(s.nbytes for s in sources))
            real(targets, sources, non_blocking=non_blocking)

        monkeypatch.setattr(torch, "_foreach_copy_", watched)
        monkeypatch.setattr(learner_module, "CHUNK_BYTES", 20_000)
        WeightExchange(skeleton).exchange(learner, Undo(lost=lambda weight: True))
        assert sum(alive) == 2 * (64 * 64 + 32 * 64 + 64 * 96) * 4
        assert len(alive) > 1
        assert max(alive) < 20_000 + 64 * 96 * 4

    def test_adapters_added_without_a_peft_model(self):
        learner = tiny("llama")
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), learner)
        randomised(learner)
        layer = learner.model.layers[0].self_attn.q_proj
        expected = layer.base_layer.weight + layer.get_delta_weight("default")
        assert torch.equal(build(learner).model.layers[0].self_attn.q_proj.weight, expected)

    def test_merging_follows_a_compiled_learner(self):
        learner = randomised(lora(tiny("llama")))
        assert_close_to_merged(build(torch.compile(learner)), learner)

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "use LoraConfig"),
            (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "adds prompts"),
            (lambda: peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True), "DoRA on an embedding"),
            (lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "modules_to_save"),
            (
                lambda: peft.LoraConfig(
                    task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6]
                ),
                "ALora",
            ),
        ],
    )
    def test_refuses_what_cannot_be_merged(self, config, reason):
        learner = peft.get_peft_model(tiny("llama"), config())
        with pytest.raises(ValueError, match=reason):
            build(learner)


class TestNamedWeights:
    def test_plain_names_and_aliases(self):
        learner = tiny("qwen2")
        named = dict(named_weights(torch.compile(learner)))
        theirs = dict(learner.named_parameters())
        assert list(named) == list(theirs)
        assert all(named[n].data_ptr() == p.data_ptr() for n, p in theirs.items())

    def test_lora_is_merged_one_tensor_at_a_time(self):
        learner = randomised(lora(tiny("llama")))
        before = fingerprint(learner)
        expected = merged(learner).state_dict()
        named = dict(named_weights(learner))
        assert named.keys() == expected.keys()
        for name, tensor in named.items():
            torch.testing.assert_close(tensor, expected[name])
        assert fingerprint(learner) == before


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp2_shards_are_gathered(mesh):
    from torch.distributed.fsdp import fully_shard

    learner = tiny("llama")
    whole = values(learner)
    for layer in learner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(learner, mesh=mesh)
    skeleton = build(learner)
    assert type(skeleton).__name__ == "LlamaForCausalLM"
    assert_same(values(skeleton), whole)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.mul_(2)
    report = WeightExchange(skeleton).exchange(learner)
    assert report.shared == 0
    assert_same(values(skeleton), {n: 2 * t for n, t in whole.items()})
