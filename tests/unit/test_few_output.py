"""One row's attention whose pieces are joined by the output product, against float64."""

import pytest
import torch

from rollout.engine import reference
from rollout.engine.kernels import tuning
from rollout.engine.kernels.tuning import Tiles
from tests import paged
from tests.devices import on_devices

pytest.importorskip("triton")
from rollout.engine.kernels import few_attention, few_output, layer_ops, shares

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, of minus infinity
# Relative to the largest result. What a row attended to is rounded before it is multiplied.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@on_devices
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "outputs", "length", "window", "programs", "dtype"),
    [
        (4, 2, 64, 100, 200, 0, 14, torch.float32),
        (9, 3, 64, 96, 130, 0, 27, torch.float16),  # the last program has one head of four
        (16, 8, 128, 130, 70, 0, 264, torch.float16),  # more programs than there is work for
        (4, 4, 256, 16, 37, 0, 8, torch.float32),
        (16, 2, 32, 129, 300, 33, 40, torch.float32),
        (2, 1, 128, 40, 1, 0, 4, torch.float32),
        (2, 1, 128, 40, 1017, 0, 64, torch.float32),  # as many pieces as are joined
        (2, 1, 128, 40, 1017, 0, 1, torch.float32),  # a single one
    ],
)
def test_pieces_are_joined_by_the_product(
    device: str, heads: int, kv_heads: int, head_dim: int, outputs: int, length: int, window: int, programs: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    case = paged.make([length], kv_heads=kv_heads, head_dim=head_dim, block_size=32, dtype=dtype, device=device)
    query = 3.0 * paged.queries(1, heads, head_dim, case.kv)  # pieces whose weights differ
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(outputs, heads * head_dim, generator=generator).to(device, dtype)
    tiles = Tiles(16, 16, 4, 2, 1)
    cuts = shares.decode_cuts(
        case.rows, case.last, case.k_cache, window=window, few=True, tiles=tiles, programs=programs, least_tokens=16
    )
    where = (case.k_cache, case.v_cache, case.block_table, case.rows, case.last)
    pieces = few_output.empty_pieces(heads, head_dim, cuts)
    pieces.values.fill_(float("nan"))
    pieces.lse.fill_(float("nan"))
    few_attention.paged_decode(query, *where, scaling=0.3, window=window, cuts=cuts, tiles=tiles, pieces=pieces)
    parts = few_output.join_linear(pieces, weight)
    assert parts.shape == (-(-heads * head_dim // 256), 1, outputs)
    assert parts.dtype == torch.float32
    exact = case.double()
    attended = reference.paged_decode(
        query.double(), exact.k_cache, exact.v_cache, *where[2:], scaling=0.3, window=window
    )
    expected = attended.flatten(1) @ weight.double().T
    off = (parts.double().sum(0) - expected).abs().max() / expected.abs().max()
    assert off < TOLERANCE[dtype]


def test_pieces_are_joined_by_the_product_where_it_can_take_them() -> None:
    def joins(rows: int, kv_heads: int, head_dim: int) -> bool:
        programs = tuning.decode_programs(
            rows * kv_heads, tuning.decode_tiles(head_dim, 2, rows, few=True), 132, few=True
        )
        return tuning.joins_in_product(rows, programs // kv_heads, head_dim)

    assert [joins(1, kv_heads, 128) for kv_heads in (2, 4, 5, 8, 16)] == [False, False, True, True, True]
    assert [joins(1, 16, head_dim) for head_dim in (32, 64, 80, 96, 256)] == [True, True, False, False, True]
    assert not joins(2, 8, 128), "of several rows a program may have two pieces"


@on_devices
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("lengths", [[70], [70, 33]])
def test_attention_and_its_product_of_few_rows(
    device: str, lengths: list[int], joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def join_linear(*args: object) -> torch.Tensor:
        calls.append("pieces")
        return own(*args)

    own = few_output.join_linear
    monkeypatch.setattr(few_output, "join_linear", join_linear)
    if not joined:
        monkeypatch.setattr(tuning, "JOINED_PIECES", 0)
    case = paged.make(lengths, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32, device=device)
    query = paged.queries(len(lengths), 4, 64, case.kv)
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(2)).to(device)
    where = (case.k_cache, case.v_cache, case.block_table, case.rows, case.last)
    # few programs, as of many kv heads
    cuts = shares.decode_cuts(case.rows, case.last, case.k_cache, few=True, programs=20)
    y = layer_ops.attend_and_project(query, *where, scaling=0.3, window=0, cuts=cuts, weight=weight)
    assert calls == (["pieces"] if joined and len(lengths) == 1 else [])
    expected = reference.paged_decode(query, *where, scaling=0.3).flatten(1) @ weight.T
    torch.testing.assert_close(y.sum(0), expected, atol=1e-4, rtol=0)
