"""build_module: the skeleton is the learner over again, sharing its storage, and the learner is none the wiser."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rollout.engine.models import ModelShape, build_module, capture_obstacle, model_shape, unwrap
from tests.tiny_models import ARCHITECTURES, fingerprint, tiny

torch.set_num_threads(1)


def build(learner: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    return build_module(learner, device="cpu", dtype=dtype)


def runnable(skeleton: Any) -> Any:
    """The skeleton with transformers' own attention, for its forward to be compared. Gemma 2's softcap needs eager."""
    skeleton.config._attn_implementation = "eager"
    return skeleton


def logits(model: Any, **kwargs: Any) -> torch.Tensor:
    ids = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
class TestEveryArchitecture:
    def test_shares_every_parameter_and_runs_alike(self, name):
        learner = tiny(name)
        before = fingerprint(learner)
        skeleton = build(learner)
        assert fingerprint(learner) == before
        theirs = dict(learner.named_parameters())
        assert {n: p.data_ptr() for n, p in skeleton.named_parameters()} == {n: p.data_ptr() for n, p in theirs.items()}
        assert not any(p is theirs[n] for n, p in skeleton.named_parameters())
        reference = copy.deepcopy(learner).eval()
        reference.set_attn_implementation("eager")
        keep = torch.tensor([3, 19])
        torch.testing.assert_close(
            logits(runnable(skeleton), logits_to_keep=keep, use_cache=False), logits(reference)[:, keep]
        )

    def test_is_for_generation_only(self, name):
        learner = tiny(name)
        learner.gradient_checkpointing_enable()
        before = fingerprint(learner)
        skeleton = build(learner)
        assert fingerprint(learner) == before
        assert not any(m.training for m in skeleton.modules())
        assert not any(getattr(m, "gradient_checkpointing", False) for m in skeleton.modules())
        assert not any(p.requires_grad for p in skeleton.parameters())
        assert skeleton.config._attn_implementation == "rollout"
        assert skeleton.config is not learner.config
        assert type(skeleton) is type(learner)

    def test_nothing_is_left_on_meta_and_buffers_are_its_own(self, name):
        learner = tiny(name)
        theirs = dict(learner.named_buffers())
        for buffer in theirs.values():
            buffer.mul_(0.5)  # as if the learner had been given other frequencies than its config's
        skeleton = build(learner)
        ours = dict(skeleton.named_buffers())
        assert ours.keys() == theirs.keys()
        for n, buffer in ours.items():
            assert torch.equal(buffer, theirs[n])
            assert buffer.dtype == theirs[n].dtype
            assert buffer.data_ptr() != theirs[n].data_ptr()
        for module in skeleton.modules():
            assert not any(isinstance(v, torch.Tensor) and v.is_meta for v in vars(module).values())

    def test_another_dtype_is_a_rounded_copy(self, name):
        learner = tiny(name)
        before = fingerprint(learner)
        skeleton = build(learner, torch.bfloat16)
        assert fingerprint(learner) == before
        for n, p in learner.named_parameters():
            ours = skeleton.get_parameter(n)
            assert ours.dtype == torch.bfloat16
            assert torch.equal(ours, p.to(torch.bfloat16))
        assert skeleton.config.dtype == torch.bfloat16

    def test_shape(self, name):
        learner = tiny(name)
        config = learner.config
        expected = ModelShape(2, 4, 2, getattr(config, "head_dim", None) or 16, 128, 256)
        assert model_shape(learner) == model_shape(config) == model_shape(build(learner)) == expected


def test_experts_run_without_the_host():
    learner = tiny("qwen3_moe", experts_implementation="eager")
    skeleton = build(learner)
    assert learner.config._experts_implementation == "eager"
    assert skeleton.config._experts_implementation == "grouped_mm"
    assert "bfloat16" in capture_obstacle(skeleton)
    assert capture_obstacle(build(learner, torch.bfloat16)) is None
    assert capture_obstacle(build(tiny("llama"))) is None


@pytest.mark.parametrize("tied", [True, False])
def test_ties_follow_the_learner_not_its_config(tied):
    learner = tiny("llama", tie_word_embeddings=tied)
    learner.config.tie_word_embeddings = not tied
    for dtype in (torch.float32, torch.bfloat16):
        skeleton = build(learner, dtype)
        assert (skeleton.lm_head.weight is skeleton.model.embed_tokens.weight) == tied


def test_a_learner_in_mixed_dtypes_shares_what_fits():
    learner = tiny("llama").to(torch.bfloat16)
    learner.model.layers[0].mlp.up_proj.float()
    skeleton = build(learner, torch.bfloat16)
    ours, theirs = skeleton.model.layers[0].mlp.up_proj.weight, learner.model.layers[0].mlp.up_proj.weight
    assert ours.dtype == torch.bfloat16
    assert ours.data_ptr() != theirs.data_ptr()
    assert skeleton.model.norm.weight.data_ptr() == learner.model.norm.weight.data_ptr()


def test_resized_embeddings():
    learner = tiny("qwen2")
    learner.resize_token_embeddings(136)
    assert build(learner).get_input_embeddings().weight.shape == (136, 64)
    assert model_shape(learner).vocab_size == 136


def test_built_in_inference_mode_it_can_still_be_written():
    with torch.inference_mode():
        skeleton = build(tiny("llama"), torch.bfloat16)
    before = skeleton.model.norm.weight.clone()
    with torch.no_grad():
        skeleton.model.norm.weight.add_(1)
    assert torch.equal(skeleton.model.norm.weight, before + 1)


class DistributedDataParallel(nn.Module):
    """Wraps as DDP does, with no process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_unwraps_ddp_and_compile_in_any_nesting():
    learner = tiny("llama")
    for wrapped in (
        DistributedDataParallel(learner),
        torch.compile(learner),
        torch.compile(DistributedDataParallel(learner)),
        DistributedDataParallel(torch.compile(learner)),
    ):
        assert unwrap(wrapped) is learner
        assert build(wrapped).model.norm.weight.data_ptr() == learner.model.norm.weight.data_ptr()
        assert model_shape(wrapped) == model_shape(learner)


def test_layers_compiled_one_by_one():
    learner = tiny("llama")
    names = [n for n, _ in learner.named_parameters()]
    learner.model.layers[0] = torch.compile(learner.model.layers[0])
    learner.lm_head = torch.compile(learner.lm_head)
    skeleton = build(learner)
    assert [n for n, _ in skeleton.named_parameters()] == names
    assert skeleton.lm_head.weight.data_ptr() == learner.lm_head.weight.data_ptr()


def _zero3(model: Any) -> Any:
    model.model.norm.weight.ds_id = 7
    return model


def _with(name: str, value: Any, model: str = "llama") -> Any:
    learner = tiny(model)
    learner.config.__dict__[name] = value  # past the config's own validation, as a checkpoint's remote code may
    return learner


def _quantised(dtype: torch.dtype) -> Any:
    model = tiny("llama")
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
    return model


def _half_on_meta() -> Any:
    model = tiny("llama")
    model.model.layers[1].to("meta")
    return model


def _without_backend() -> Any:
    model = tiny("llama")
    model.__class__ = type("OldForCausalLM", (type(model),), {"_supports_attention_backend": False})
    return model


def _gpt_oss() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads, rope_parameters=_ROPE))


def _other(family: str, cls: str, **config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, cls)(getattr(transformers, f"{family}Config")(**config))


def _bert(family: str, cls: str, **config: Any) -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return getattr(transformers, cls)(getattr(transformers, f"{family}Config")(vocab_size=128, **sizes, **config))


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

REFUSED = {
    "not a Hugging Face model": (lambda: nn.Linear(2, 2), "PreTrainedModel"),
    "no backend": (_without_backend, "attention"),
    "encoder-decoder": (lambda: _other("T5", "T5ForConditionalGeneration", num_layers=1), "encoder-decoder"),
    "state space": (lambda: _other("Mamba", "MambaForCausalLM", num_hidden_layers=1), "recurrent"),
    "latent attention": (lambda: _other("DeepseekV3", "DeepseekV3ForCausalLM", num_hidden_layers=1), "latent"),
    "linear layers": (
        lambda: _with("layer_types", ["linear_attention", "full_attention"], "qwen3"),
        "linear_attention",
    ),
    "chunked layers": (lambda: _with("layer_types", ["chunked_attention"] * 2, "qwen3"), "chunked_attention"),
    "heads that differ": (lambda: _with("num_key_value_heads", [2, 1]), "differ in num_key_value_heads"),
    "odd head size": (lambda: tiny("qwen3", head_dim=24), "multiple of 16"),
    "huge heads": (lambda: tiny("qwen3", head_dim=272), "multiple of 16"),
    "sinks": (_gpt_oss, "sinks"),
    "bidirectional": (lambda: _with("use_bidirectional_attention", True, "gemma3"), "later tokens"),
    "encoder": (lambda: _bert("Bert", "BertLMHeadModel", is_decoder=False), "later tokens"),
    "positions of Roberta": (lambda: _bert("Roberta", "RobertaForCausalLM", is_decoder=True), "padding token's id"),
    "dynamic rope": (lambda: _with("rope_parameters", _DYNAMIC), "neighbours"),
    "no head": (lambda: tiny("llama").model, "logits_to_keep"),
    "quantised config": (lambda: _with("quantization_config", {"quant_method": "bitsandbytes"}), "quantised"),
    "integer weights": (lambda: _quantised(torch.uint8), "q_proj.weight is torch.uint8"),
    "float8 weights": (lambda: _quantised(torch.float8_e4m3fn), "q_proj.weight is torch.float8_e4m3fn"),
    "meta": (_half_on_meta, "meta device"),
    "ZeRO-3": (lambda: _zero3(tiny("llama")), "ZeRO-3"),
    "config that lies": (lambda: _with("intermediate_size", 80), "mlp.up_proj.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    make, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        build(make())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64])
def test_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match="change dtype"):
        build(tiny("llama"), dtype)


def test_refuses_several_devices():
    from rollout.engine.models.learner import sources
    from rollout.engine.models.support import check_learner

    learner = tiny("llama")
    named = sources(learner)
    moved = named["lm_head.weight"]
    named["lm_head.weight"] = type(moved)(
        moved.shape, moved.dtype, torch.device("cuda", 1), moved.is_parameter, moved.owner, moved.read
    )
    with pytest.raises(ValueError, match=r"several devices \(cpu, cuda:1\)"):
        check_learner(learner, named, torch.float32)
