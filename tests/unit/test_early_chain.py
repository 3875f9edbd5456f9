"""Decode steps of few rows as chains of early kernels, in Triton's interpreter, against the reference operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from rollout.engine import kernels
from rollout.engine.attention import PagedStep
from rollout.engine.kernels import decode, fused_attention, layer_ops, pointwise, rms_norm, shares
from rollout.engine.models.fused import FusedDecoder
from rollout.engine.models.join import join_projections
from tests.devices import in_interpreter
from tests.tiny_models import tiny

pytestmark = in_interpreter
LAYERS, KV_HEADS, BLOCK_SIZE, ROW_BLOCKS = 2, 2, 16, 5


def step_of(lengths: list[int], head_dim: int) -> PagedStep:
    """Rows of a cache filled at random but for each row's last position, which the step computes."""
    rows, generator = len(lengths), torch.Generator().manual_seed(len(lengths))
    blocks = 1 + torch.randperm(rows * ROW_BLOCKS, generator=generator).view(rows, ROW_BLOCKS)
    kv = torch.randn(1 + rows * ROW_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, head_dim, generator=generator)
    for row, length in enumerate(lengths):
        at = length - 1
        kv[blocks[row, at // BLOCK_SIZE], :, :, :, at % BLOCK_SIZE] = float("nan")
    table = torch.cat([blocks, torch.zeros(1, ROW_BLOCKS, dtype=torch.int64)]).int()
    return PagedStep(kv, table, torch.arange(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32) - 1)


def run(decoder: FusedDecoder, lengths: list[int], head_dim: int) -> tuple[Tensor, Tensor]:
    """Logits, and the cache afterwards."""
    step = step_of(lengths, head_dim)
    ids = torch.arange(len(lengths), dtype=torch.int32) * 7 + 3
    with torch.no_grad():
        return decoder(ids, step, None), step.kv


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of minus infinity
@pytest.mark.parametrize("lengths", [[37], [1, 16, 17, 70], [5, 80, 33, 16, 64, 2, 49]])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize(("chain", "fused"), [("few", False), ("streamed", True), ("streamed", False)])
def test_a_chain_of_early_kernels_is_the_reference(
    chain: layer_ops.Chain, fused: bool, architecture: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192, "num_hidden_layers": LAYERS}
    module = tiny(architecture, **sizes).eval()
    assert join_projections(module) == 2 * LAYERS
    head_dim = module.model.layers[0].self_attn.head_dim
    decoder = FusedDecoder(module, ROW_BLOCKS * BLOCK_SIZE)
    expected_logits, expected_kv = run(decoder, lengths, head_dim)

    calls: list[str] = []
    attend_and_project = layer_ops.attend_and_project

    def add_norm(*args: Any, **options: Any) -> Tensor:
        calls.append("norm")
        return rms_norm.add_norm(*args, **options)

    def embed_norm(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append("first norm")
        return rms_norm.embed_norm(*args)

    def decode_cuts(*args: Any, **options: Any) -> Tensor:
        calls.append("cuts")
        return shares.decode_cuts(*args, **options)

    def attention(*args: Any, **options: Any) -> Tensor:
        calls.append("attention")
        if chain == "few":
            return attend_and_project(*args, **options)
        if fused:
            assert options["early"]
            return fused_attention.attend(*args, **options)
        return decode.paged_decode(*args, **options)

    def rope_write(*args: Any, early: bool) -> Tensor:
        assert early, "it is of the chain, whatever comes after it"
        return pointwise.rope_write(*args, early=early)

    monkeypatch.setattr(layer_ops, "chain_for", lambda *_: chain)
    monkeypatch.setattr(layer_ops, "rope_write", rope_write)
    if chain == "few":
        monkeypatch.setattr(layer_ops, "attend_and_project", attention)
    elif fused:
        monkeypatch.setattr(layer_ops, "decode_attention", attention)
    else:
        monkeypatch.setattr(kernels, "paged_decode", attention)
    monkeypatch.setattr(layer_ops, "embed_norm", embed_norm)
    monkeypatch.setattr(layer_ops, "add_norm", add_norm)
    monkeypatch.setattr(kernels, "decode_cuts", decode_cuts)
    logits, kv = run(decoder, lengths, head_dim)
    # attention reads the cuts before it waits, so they are made before the last ordinary kernel, the first norm
    assert calls == ["cuts", "first norm", *["attention", "norm", "norm"] * LAYERS]
    torch.testing.assert_close(logits, expected_logits, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kv, expected_kv, atol=1e-5, rtol=1e-4)
