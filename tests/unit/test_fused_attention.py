"""Fused attention against the reference operations that it stands for, in float64. See test_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollout.engine import reference, reference_layers
from rollout.engine.kernels import tuning
from rollout.engine.kernels.tuning import Tiles
from tests import paged
from tests.devices import on_devices
from tests.fakes import Launches

pytest.importorskip("triton")
from rollout.engine.kernels import fused_attention, pieces, shares

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, of minus infinity
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
SMALL = Tiles(16, 16, 4, 2, 1)


def check(
    lengths: list[int],
    *,
    device: str,
    heads: int,
    kv_heads: int,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    norm: bool = False,
    rope: bool = True,
    window: int = 0,
    tiles: Tiles | None = None,
    programs: int | None = None,
    early: bool = False,
) -> None:
    """Rows of these lengths, the newest position of each being worked out, as everything but it is in the cache."""
    case = paged.make(lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device=device)
    for row, length in enumerate(lengths):
        case.kv[case.block_table[row, (length - 1) // block_size], 1, :, :, (length - 1) % block_size] = float("nan")
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = random(len(lengths), sum(sizes)).split(sizes, dim=1)
    biases = [random(n) for n in sizes] if bias else None
    norms = [random(head_dim) for _ in range(2)] if norm else None
    angles = torch.outer(torch.arange(max(lengths)), torch.rand(head_dim // 2, generator=generator))
    cos_sin = torch.stack([angles.cos(), angles.sin()], dim=1).to(device, dtype) if rope else None
    exact = replace(case.double())
    where = (case.block_table, case.rows, case.last)
    expected_q = reference_layers.rope_write(
        q.double(),
        k.double(),
        v.double(),
        tuple(b.double() for b in biases) if biases else None,  # type: ignore[arg-type]
        tuple(n.double() for n in norms) if norms else None,  # type: ignore[arg-type]
        1e-6,
        None if cos_sin is None else cos_sin.double(),
        exact.k_cache,
        exact.v_cache,
        *where,
    )
    scaling = head_dim**-0.5
    expected = reference.paged_decode(expected_q, exact.k_cache, exact.v_cache, *where, scaling=scaling, window=window)
    cuts = None
    if programs is not None:
        choices = {"window": window, "tiles": tiles, "programs": programs, "least_tokens": 16}
        cuts = shares.decode_cuts(case.rows, case.last, case.k_cache, **choices)  # type: ignore[arg-type]
    out = fused_attention.attend(
        q,
        k,
        v,
        tuple(biases) if biases else None,  # type: ignore[arg-type]
        tuple(norms) if norms else None,  # type: ignore[arg-type]
        1e-6,
        cos_sin,
        case.k_cache,
        case.v_cache,
        *where,
        scaling=scaling,
        window=window,
        tiles=tiles,
        cuts=cuts,
        early=early,
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(case.kv.double(), exact.kv, atol=TOLERANCE[dtype], rtol=1e-2, equal_nan=True)
    assert not any(bool(counters.any()) for made in pieces._made.values() for counters in made)


@on_devices
@pytest.mark.parametrize("window", [0, 1, 2, 17, 100])
def test_windows(device: str, window: int) -> None:
    how = {"heads": 6, "kv_heads": 2, "window": window, "tiles": SMALL, "programs": 14}
    check([1, 2, 15, 16, 17, 70], device=device, early=window == 17, **how)  # type: ignore[arg-type]


@on_devices
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (9, 3, 64, 64, torch.float32),
        (4, 1, 128, 16, torch.bfloat16),
        (7, 1, 64, 32, torch.float16),
        (2, 2, 128, 256, torch.bfloat16),
        (4, 2, 256, 16, torch.float16),
        (2, 1, 128, 64, torch.float32),
        (2, 1, 256, 16, torch.float32),
        (32, 1, 32, 8, torch.float32),
    ],
)
def test_shapes(device: str, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter holds bfloat16 as integers and multiplies those
    check(
        [block_size, 1, block_size + 1],
        device=device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


@on_devices
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_done_to_heads(device: str, bias: bool, norm: bool, rope: bool) -> None:
    check(
        [40, 3],
        device=device,
        heads=6,
        kv_heads=2,
        bias=bias,
        norm=norm,
        rope=rope,
        tiles=SMALL,
        programs=8,
    )


@on_devices
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(6, 2, 0), (1, 1, 40)])
@pytest.mark.parametrize("programs", [1, 5, 14, 80])
def test_pieces_are_joined_launch_after_launch(
    device: str, heads: int, kv_heads: int, window: int, programs: int
) -> None:
    """One program for all rows, shares that begin and end inside of rows, and more programs than there is work for."""
    for lengths in ([5, 170, 16, 17], [290, 1, 1], [1] * 7):
        check(
            lengths,
            device=device,
            heads=heads,
            kv_heads=kv_heads,
            bias=True,
            norm=True,
            window=window,
            tiles=SMALL,
            programs=programs,
        )


def test_one_kernel_where_each_program_has_one_row() -> None:
    fused = [tuning.fuses_attention(rows, 8, 128, 2, 132) for rows in (1, 32, 33, 34, 64, 66, 67, 256)]
    assert fused == [True, True, True, True, True, True, False, False]
    assert not tuning.fuses_attention(8, 8, 80, 2, 132), "halves of heads are powers of two"


def test_early_programs_leave_no_room_for_one_more() -> None:
    tiles, line_bytes, hopper = tuning.decode_tiles(128, 2, 64), 2 * 128 * 2, 232448
    assert [tuning.early_stages(tiles, line_bytes, programs, hopper) for programs in (2, 3, 4)] == [6, None, 3]
    assert tuning.early_stages(tiles, line_bytes, 2, 101376) is None, "so many tiles don't fit"
    wide = tuning.decode_tiles(256, 2, 32)
    assert tuning.early_stages(wide, 2 * 256 * 2, 2, hopper) == 4


@pytest.mark.parametrize(("early", "found", "stages"), [(True, 6, 6), (True, None, 3), (False, 6, 3)])
def test_early_attention_is_launched_with_as_many_stages(
    early: bool, found: int | None, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches()
    monkeypatch.setattr(fused_attention, "_fused_attention_kernel", launches)
    monkeypatch.setattr(tuning, "early_stages", lambda *_: found)
    case = paged.make([5, 9], kv_heads=2, head_dim=128, block_size=16, dtype=torch.float16, device="cpu")
    q, k, v = torch.empty(2, 8 * 128, dtype=torch.float16).split([512, 256, 256], dim=1)
    where = (case.k_cache, case.v_cache, case.block_table, case.rows, case.last)
    cuts = torch.empty(4, 8, dtype=torch.int32)
    fused_attention.attend(q, k, v, None, None, 1e-6, None, *where, scaling=1.0, cuts=cuts, early=early)
    assert [(options["num_stages"], options["EARLY"]) for options in launches.options] == [(stages, early)]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[16385], [1, 8192, 63, 64, 65, 4000, 2, 3000]])
def test_long_rows(lengths: list[int]) -> None:
    check(
        lengths,
        device="cuda",
        heads=16,
        kv_heads=8,
        head_dim=128,
        block_size=64,
        dtype=torch.bfloat16,
        norm=True,
    )
