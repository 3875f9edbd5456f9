"""The fused decoder's Triton kernels against their reference on float64 inputs, in the interpreter or on a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.engine import reference_layers
from tests.devices import on_devices
from tests.fakes import Launches

pytest.importorskip("triton")
from rollout.engine.kernels import few_products, layer_ops, placement, pointwise, rms_norm, streamed_products, tuning

DTYPES = [torch.float32, torch.float16]


def relative(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def random(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


early_or_not = pytest.mark.parametrize("early", [False, True], ids=["", "early"])


@on_devices
@early_or_not
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_add_norm(device: str, early: bool, dtype: torch.dtype, splits: int) -> None:
    residual = random(4, 80, device=device, dtype=dtype)
    weight = random(80, device=device, dtype=dtype, seed=1)
    partial = random(splits, 4, 80, device=device, dtype=torch.float32, seed=2)
    expected_residual = residual.double()
    expected = reference_layers.add_norm(expected_residual, partial.double(), weight.double(), 1e-5)
    out = rms_norm.add_norm(residual, partial, weight, 1e-5, early=early)
    assert relative(residual, expected_residual) < TOLERANCE[dtype]
    assert relative(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("tokens", "early", "apart"), [(1, True, True), (2, True, False), (1, False, False)])
def test_one_tokens_norm_in_a_chain_is_kept_apart(
    tokens: int, early: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, kept = Launches(), []
    monkeypatch.setattr(rms_norm, "_add_norm_kernel", launches)
    monkeypatch.setattr(placement, "keep_apart", kept.append)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rms_norm.add_norm(torch.empty(tokens, 80), torch.empty(1, tokens, 80), torch.empty(80), 1e-5, early=early)
    assert [options["APART"] for options in launches.options] == [apart]
    assert len(kept) == apart


def test_kernels_are_kept_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    cuda = SimpleNamespace(
        CUfunction=lambda handle: ("function", handle),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carve-out"),
        CUresult=SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_OUT_OF_MEMORY=2),
        cuFuncSetAttribute=lambda *arguments: (calls.append(arguments), (0,))[1],
    )
    monkeypatch.setattr(placement, "cuda_bindings", lambda need: cuda)
    placement._prefer_no_shared_memory.cache_clear()
    try:
        for handle in (7, 8, 7):
            placement.keep_apart(SimpleNamespace(function=handle))
        assert calls == [(("function", handle), "carve-out", 0) for handle in (7, 8)]
        cuda.cuFuncSetAttribute = lambda *_: (1,)
        with pytest.raises(RuntimeError, match="cuFuncSetAttribute on a kernel failed: 1"):
            placement.keep_apart(SimpleNamespace(function=9))
    finally:
        placement._prefer_no_shared_memory.cache_clear()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
def test_embed_norm(device: str, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    table = random(50, 80, device=device, dtype=table_dtype)
    weight = random(80, device=device, dtype=dtype, seed=1)
    ids = torch.tensor([49, 0, 7, 7], dtype=torch.int32, device=device)
    for laid_out in (table, table.t().contiguous().t()):
        residual, out = rms_norm.embed_norm(ids, laid_out, weight, 1e-5)
        assert torch.equal(residual, table[ids.long()].to(dtype))
        if device == "cpu":  # a GPU might add products up otherwise
            nothing = torch.zeros(1, *residual.shape)
            assert torch.equal(out, rms_norm.add_norm(residual, nothing, weight, 1e-5)), "the stored residual's norm"
        expected = reference_layers.rms_norm(residual.double(), weight.double(), 1e-5)
        assert relative(out, expected) < TOLERANCE[dtype]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(device: str, dtype: torch.dtype) -> None:
    gate, up = (random(3, 200, device=device, dtype=dtype) * 3).split([100, 100], dim=1)
    out = pointwise.silu_mul(gate, up)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert relative(out, reference_layers.silu_mul(gate.double(), up.double())) < TOLERANCE[dtype]


@on_devices
@early_or_not
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "bias", "norm", "rope"),
    [
        (4, 2, 16, False, False, True),
        (3, 1, 32, True, False, True),
        (4, 2, 16, False, True, True),
        (2, 2, 48, False, False, False),
        (2, 1, 16, True, True, True),
        (16, 8, 16, True, True, True),
        (12, 4, 16, False, True, True),
    ],
)
def test_rope_write(
    device: str,
    early: bool,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool,
    norm: bool,
    rope: bool,
) -> None:
    tokens, block_size, blocks = 5, 8, 12
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = random(tokens, sum(sizes), device=device, dtype=dtype).split(sizes, dim=1)
    biases = tuple(random(n, device=device, dtype=dtype, seed=n + i) for i, n in enumerate(sizes)) if bias else None
    norms = tuple(random(head_dim, device=device, dtype=dtype, seed=7 + i) for i in range(2)) if norm else None
    angles = torch.outer(torch.arange(40.0), torch.rand(head_dim // 2, generator=torch.Generator().manual_seed(3)))
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1).to(device, dtype) if rope else None
    table = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(4))[:10].view(2, 5) + 1
    table = table.to(device, torch.int32)
    token_row = torch.tensor([0, 1, 0, 1, 0], dtype=torch.int32, device=device)
    position = torch.tensor([0, 7, 8, 39, 17], dtype=torch.int32, device=device)

    def cache(dtype: torch.dtype) -> Tensor:
        return torch.full((blocks, 3, 2, kv_heads, block_size, head_dim), 9.0, dtype=dtype, device=device)

    kv, exact = cache(dtype), cache(torch.float64)
    where = (table, token_row, position)
    caches = (kv[:, 1, 0], kv[:, 1, 1])
    out = pointwise.rope_write(q, k, v, biases, norms, 1e-6, cos_sin, *caches, *where, early=early)
    expected = reference_layers.rope_write(
        q.double(),
        k.double(),
        v.double(),
        tuple(b.double() for b in biases) if biases else None,  # type: ignore[arg-type]
        tuple(n.double() for n in norms) if norms else None,  # type: ignore[arg-type]
        1e-6,
        cos_sin.double() if cos_sin is not None else None,
        exact[:, 1, 0],
        exact[:, 1, 1],
        *where,
    )
    assert relative(out, expected) < TOLERANCE[dtype]
    assert relative(kv, exact) < TOLERANCE[dtype]
    assert bool((kv == 9.0).eq(exact == 9.0).all()), "nothing beside the tokens' cells is written"


@on_devices
@pytest.mark.parametrize(("tokens", "inputs"), [(1, 2048), (8, 6144), (65, 2048), (300, 512), (5, 576)])
def test_partial_linear_adds_up(device: str, tokens: int, inputs: int) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight = (
        random(tokens, inputs, device=device, dtype=dtype),
        random(96, inputs, device=device, dtype=dtype, seed=1),
    )
    parts = layer_ops.partial_linear(x, weight)
    assert parts.shape[1:] == (tokens, 96)
    assert parts.is_contiguous()
    expected = x.double() @ weight.double().T
    assert relative(parts.double().sum(0), expected) < (TOLERANCE[dtype] if parts.dtype == dtype else 1e-5)


def check_products(
    products: ModuleType, *, device: str, tokens: int, inputs: int, outputs: int
) -> tuple[Tensor, float]:
    """Holds `linear` against float64, gated and not. The parts `partial_linear` gives, and how far off their sum is."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = random(tokens, inputs, device=device, dtype=dtype)
    weight = random(2 * outputs, inputs, device=device, dtype=dtype, seed=1) * inputs**-0.5
    expected = x.double() @ weight.double().T
    assert relative(products.linear(x, weight), expected) < TOLERANCE[dtype]
    gate, up = expected.chunk(2, dim=1)
    gated = products.linear(x, weight, gated=True)
    assert gated.shape == (tokens, outputs)
    assert relative(gated, reference_layers.silu_mul(gate, up)) < TOLERANCE[dtype]
    parts = products.partial_linear(x, weight)
    return parts, relative(parts.double().sum(0), expected)


@on_devices
@pytest.mark.parametrize("alone", [0, 8], ids=["", "alone"])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "rounds"),
    [(1, 2048, 40, 1), (1, 2048, 16, 1), (3, 576, 33, 1), (8, 5000, 7, 1), (11, 2048, 24, 2), (2, 256, 200, 3)],
)
def test_products_of_few_tokens(
    device: str, tokens: int, inputs: int, outputs: int, rounds: int, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "ALONE_TOKENS", alone)
    monkeypatch.setattr(tuning, "few_rounds", lambda *_: rounds)
    parts, off = check_products(few_products, device=device, tokens=tokens, inputs=inputs, outputs=outputs)
    assert parts.dtype == torch.float32
    assert parts.shape == (-(-inputs // 2048), tokens, 2 * outputs)
    assert off < 1e-5


@on_devices
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 64, 1), (9, 256, 130), (16, 576, 64), (33, 768, 200), (64, 2048, 65)]
)
def test_products_that_stream_their_weights(device: str, tokens: int, inputs: int, outputs: int) -> None:
    parts, off = check_products(streamed_products, device=device, tokens=tokens, inputs=inputs, outputs=outputs)
    assert parts.shape == (tuning.streamed_splits(inputs), tokens, 2 * outputs)
    assert off < TOLERANCE[parts.dtype]


@on_devices
def test_parts_of_a_sum_may_leave_the_range_of_float16(device: str) -> None:
    x = torch.full((16, 1024), 200.0, dtype=torch.float16, device=device)
    weight = torch.cat([torch.full((8, 512), sign * 4.0) for sign in (1, -1)], dim=1).to(device, torch.float16)
    parts = streamed_products.partial_linear(x, weight)
    assert torch.equal(parts.sum(0), torch.zeros(16, 8, device=device))


def test_streamed_products_are_cut_and_staged_as_fits() -> None:
    assert [tuning.streamed_splits(inputs) for inputs in (64, 128, 576, 896, 2048, 6144)] == [1, 2, 3, 2, 4, 4]
    hopper, small = 232448, 101376
    line = 2 * (64 + 64)  # bytes of 64 rows of a weight and 64 tokens
    assert tuning.streamed_tiles(line, 1536, alone=True, shared=hopper) == (128, 6)
    assert tuning.streamed_tiles(line, 1536, alone=False, shared=hopper) == (128, 4)
    assert tuning.streamed_tiles(line, 192, alone=True, shared=hopper) == (64, 8), "a tile divides the depth"
    assert tuning.streamed_tiles(line, 1536, alone=True, shared=small) == (128, 3)
    assert tuning.streamed_tiles(2 * line, 1536, alone=True, shared=small) == (64, 3), "three tiles at least"
    for tokens in (16, 32, 64):
        for depth in (192, 320, 448, 512, 1216, 1536, 2240, 2752, 3584):
            step, stages = tuning.streamed_tiles(2 * (64 + tokens), depth, alone=True, shared=hopper)
            assert hopper // 2 < stages * step * 2 * (64 + tokens) <= hopper, "no two of them fit on an SM"


def test_programs_of_streamed_products_are_alone_where_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    own_tiles = tuning.streamed_tiles

    def tiles(line_bytes: int, depth: int, *, alone: bool, shared: int) -> tuple[int, int]:
        asked.append(alone)
        return own_tiles(line_bytes, depth, alone=alone, shared=shared)

    monkeypatch.setattr(tuning, "streamed_tiles", tiles)
    monkeypatch.setattr(streamed_products, "_streamed_kernel", Launches())
    monkeypatch.setattr(tuning, "sm_count", lambda _: 132)
    for outputs, gated in ((4096, False), (12288, False), (12288, True), (128, True)):
        streamed_products.linear(torch.empty(16, 64), torch.empty(outputs, 64), gated=gated)
    assert asked == [True, False, False, False]


@pytest.mark.parametrize(("tokens", "outputs", "warps"), [(1, 2048, 8), (1, 4096, 4), (2, 2048, 4)])
def test_products_of_few_tokens_are_launched_with_as_many_warps(
    tokens: int, outputs: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches()
    monkeypatch.setattr(few_products, "_few_kernel", launches)
    monkeypatch.setattr(tuning, "sm_count", lambda _: 132)
    few_products.partial_linear(torch.empty(tokens, 2048), torch.empty(outputs, 2048))
    assert [(options["num_warps"], options["PARTS"]) for options in launches.options] == [(warps, warps)]


@on_devices
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_products_in_turns(device: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs, of which the GPU puts several on a multiprocessor."""
    launches = Launches(few_products._few_kernel)
    monkeypatch.setattr(tuning, "sm_count", lambda _: 6)
    monkeypatch.setattr(few_products, "_few_kernel", launches)
    _, off = check_products(few_products, device=device, tokens=tokens, inputs=256, outputs=16 * 18)
    assert off < 1e-5
    assert [options["ROUNDS"] for options in launches.options] == [2] * 3, "18 programs"
    assert [options["TURN"] for options in launches.options] == [6 if tokens <= 2 else 0] * 3


def test_programs_begin_in_turns_where_three_share_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "sm_count", lambda _: 132)
    monkeypatch.setattr(tuning, "memory_bandwidth", lambda _: 4.8e12)

    def turn_ns(tokens: int, programs: int, rounds: int = 1, *, gated: bool = False) -> int:
        return tuning.few_turn_ns(tokens, programs, rounds, 65536, torch.device("cuda"), gated=gated)

    assert [turn_ns(tokens, 384, gated=True) for tokens in (1, 2, 3, 8)] == [1622, 1622, 0, 0]
    assert [turn_ns(1, 384, rounds, gated=True) for rounds in (1, 2, 3)] == [1622, 1622, 811]
    assert [turn_ns(1, programs) for programs in (128, 264, 265, 384)] == [0, 0, 811, 811]


def test_bandwidth_is_by_the_memorys_clock_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    assert tuning.memory_bandwidth.__wrapped__(torch.device("cuda")) == pytest.approx(4.917e12, rel=1e-3)


def test_decode_steps_are_run_by_the_fastest_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def chain_for(
        tokens: int, widths: tuple[int, ...], device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> Any:
        like: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return layer_ops.chain_for(tokens, widths, like)

    def chains(widths: tuple[int, ...]) -> list[str | None]:
        return [chain_for(tokens, widths) for tokens in (1, 8, 9, 64, 65)]

    assert chains((2048, 2048, 6144)) == ["few", "few", "streamed", "streamed", None]
    assert chains((4096, 4096, 14336)) == ["streamed"] * 4 + [None], "too wide for the kernels for few"
    assert chains((576, 576, 1500)) == ["few", "few", None, None, None], "widths that aren't a multiple of 64"
    assert chain_for(1, (2048,), dtype=torch.float32) is None
    assert chain_for(1, (2048,), device="cpu") is None
    capability = (8, 9)
    assert chains((2048, 2048, 6144)) == [None] * 5


def test_logits_of_few_rows_are_streamed_after_a_chain() -> None:
    head = torch.empty(100, 64, dtype=torch.bfloat16)

    def streams(rows: int, head: Tensor) -> bool:
        return layer_ops.streams_head(torch.empty(rows, head.shape[1], dtype=torch.bfloat16), head)

    assert [streams(rows, head) for rows in (1, 32, 33, 64)] == [True, True, False, False]
    assert not streams(1, head.float()), "a head kept in float32"
    assert not streams(1, head[:, :32].contiguous()), "no whole tile"
    assert not streams(1, torch.empty(64, 100, dtype=torch.bfloat16).T), "transposed in memory"
    assert not streams(1, torch.empty(6401, dtype=torch.bfloat16)[1:].view(100, 64)), "not at a multiple of 16 bytes"
    assert not streams(1, torch.empty(1 << 25, 64, dtype=torch.bfloat16, device="meta")), "offsets of 32 bits"


def test_a_program_takes_several_tiles_where_not_all_run_at_once() -> None:
    assert [tuning.few_rounds(tiles, 132) for tiles in (1, 128, 396, 397, 768, 793)] == [1, 1, 1, 2, 2, 3]


def test_programs_for_one_token_take_more_warps_where_each_could_have_an_sm() -> None:
    assert [tuning.few_warps(1, programs, 2048, 132) for programs in (128, 132, 133, 384)] == [8, 8, 4, 4]
    assert tuning.few_warps(2, 128, 2048, 132) == 4
    assert tuning.few_warps(1, 36, 1024, 132) == 4, "or two would fit on one again"


def test_products_are_split_where_that_pays() -> None:
    half = torch.bfloat16
    assert layer_ops.product_splits(1, 2048, half) == (4, torch.float32)
    assert layer_ops.product_splits(16, 14336, half) == (4, torch.float32)
    assert layer_ops.product_splits(17, 14336, half) == (2, half)
    assert layer_ops.product_splits(256, 4096, half) == (2, half)
    assert layer_ops.product_splits(256, 4096, torch.float16) == (2, torch.float32), "its range may not reach"
    assert layer_ops.product_splits(257, 4096, half) == (1, half)
    assert layer_ops.product_splits(8, 576, half) == (1, half), "parts that aren't a multiple of 64 wide"
    assert layer_ops.product_splits(8, 2048, torch.float32) == (1, torch.float32)
