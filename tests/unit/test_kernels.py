"""The Triton kernels against the reference on float64 inputs.

They run for real where there is a CUDA device, and in Triton's interpreter elsewhere (see conftest.py), with shapes
cut down to what an interpreter can do. Sizes that only a GPU can do are marked so.
"""

import pytest
import torch
from torch import Tensor

from rollout.engine import kernels, reference
from rollout.engine.kernels import tuning
from rollout.engine.kernels.tuning import Tiles
from tests import paged
from tests.devices import in_interpreter, on_devices

pytest.importorskip("triton")
from rollout.engine.kernels import decode, few_attention, kv_write, pieces, prefill, sampling, shares, step_start

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, where unsigned integers wrap
# Absolute, for values of about 1. The products are of 16-bit numbers, the sums in float32; outputs are rounded.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LENGTHS = [1, 15, 16, 17, 70]


def _dot_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """float16 for bfloat16 in the interpreter, which holds bfloat16 as integers and multiplies those."""
    return torch.float16 if device == "cpu" and dtype == torch.bfloat16 else dtype


def _cuts(case: paged.Paged, window: int = 0, **choices: object) -> Tensor:
    return shares.decode_cuts(case.rows, case.last, case.k_cache, window=window, **choices)


def _check_decode(
    case: paged.Paged,
    heads: int,
    *,
    tiles: Tiles | None = None,
    cuts: Tensor | None = None,
    few: bool = False,
    **options: float,
) -> Tensor:
    head_dim = case.kv.shape[-1]
    query = paged.queries(len(case.lengths), heads, head_dim, case.kv, transposed=True)
    out = (few_attention if few else decode).paged_decode(
        query,
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.rows,
        case.last,
        scaling=0.3,
        tiles=tiles,
        cuts=cuts,
        **options,
    )
    assert out.dtype == query.dtype
    assert out.is_contiguous()
    exact = case.double()
    expected = reference.paged_decode(
        query.double(),
        exact.k_cache,
        exact.v_cache,
        exact.block_table,
        exact.rows,
        exact.last,
        scaling=0.3,
        **options,
    )
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[query.dtype], rtol=0)
    return out


few_or_many = pytest.mark.parametrize("few", [False, True], ids=["", "few"])


@on_devices
@pytest.mark.parametrize("window", [1, 2, 17, 100])
def test_decode_windows_of_few_rows(device: str, window: int) -> None:
    case = paged.make(LENGTHS, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device=device)
    tiles = Tiles(16, 16, 4, 2, 1)
    for programs in (2, 14, 40):
        cuts = _cuts(case, window, tiles=tiles, programs=programs, least_tokens=16)
        _check_decode(case, 6, window=window, tiles=tiles, cuts=cuts, few=True)


@on_devices
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (0, 5.0), (1, 0.0), (17, 5.0), (100, 0.0)])
def test_decode_windows_and_softcap(device: str, window: int, softcap: float) -> None:
    case = paged.make(LENGTHS, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device=device)
    tiles = Tiles(16, 16, 4, 2, 1)
    cuts = _cuts(case, window, tiles=tiles, programs=14, least_tokens=16)
    _check_decode(case, 6, window=window, softcap=softcap, tiles=tiles, cuts=cuts)


@on_devices
@few_or_many
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (9, 3, 64, 64, torch.float32),
        (4, 1, 128, 16, torch.bfloat16),
        (7, 1, 80, 32, torch.float16),
        (2, 2, 96, 256, torch.bfloat16),
        (16, 1, 192, 64, torch.bfloat16),
        (4, 2, 256, 16, torch.float16),
        (32, 1, 32, 8, torch.float32),
        (48, 4, 16, 16, torch.float32),
    ],
)
def test_decode_shapes(
    device: str, few: bool, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    dtype = _dot_dtype(dtype, device)
    case = paged.make(
        [block_size, 1, block_size + 1], kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
        device=device,
    )  # fmt: skip
    _check_decode(case, heads, few=few)


@on_devices
@few_or_many
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(6, 2, 0), (1, 1, 40)])
def test_decode_joins_pieces_launch_after_launch(
    device: str, few: bool, heads: int, kv_heads: int, window: int
) -> None:
    """One program for all rows, shares that begin and end inside of rows, and more programs than there is work for."""
    tiles = Tiles(16, 16, 4, 2, 1)
    for lengths in ([5, 170, 16, 17], [290, 1, 1], [1] * 7):
        case = paged.make(lengths, kv_heads=kv_heads, head_dim=16, block_size=16, dtype=torch.float32, device=device)
        for programs in (1, 5, 14, 80):
            cuts = _cuts(case, window, tiles=tiles, programs=programs, least_tokens=16)
            _check_decode(case, heads, window=window, tiles=tiles, cuts=cuts, few=few)
            assert not any(bool(counters.any()) for made in pieces._made.values() for counters in made)


@on_devices
@pytest.mark.parametrize("window", [0, 1, 33])
@pytest.mark.parametrize(
    "lengths", [[1], [800], [64, 50] * 3, [5, 170, 16, 17, 1, 1], [290, 1, 1], [432, 800], [448, 800]]
)
def test_shares_are_equal_and_miss_nothing(device: str, lengths: list[int], window: int) -> None:
    case = paged.make(lengths, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, device=device)
    seen = [min(length, window or length) for length in lengths]
    first = [(length - s) // 16 for length, s in zip(lengths, seen, strict=True)]
    tiles = [(length - 1) // 16 + 1 - low for length, low in zip(lengths, first, strict=True)]
    line = [(row, tile) for row, count in enumerate(tiles) for tile in range(count)]
    rows_are_whole = []
    for programs, least_tokens in ((2, 16), (6, 16), (14, 16), (62, 16), (62, 64)):
        cuts = _cuts(case, window, tiles=Tiles(16, 16, 4, 2, 1), programs=programs, least_tokens=least_tokens).tolist()
        shares, share_tiles = len(cuts), cuts[0][3]
        assert shares == programs // 2
        at = 0
        for row, tile, count, every, position, sequence, in_row, _ in cuts:
            assert at == len(line) if count == 0 else (row, tile) == line[at]
            assert count == 0 or (every, position, sequence) == (share_tiles, lengths[row] - 1, row)
            if count > 0 and len(lengths) == 1:
                assert in_row == -(-len(line) // share_tiles)
            at += count
        assert at == len(line)
        counts = [cut[2] for cut in cuts]
        if any(cut[1] for cut in cuts):
            least = max(-(-len(line) // shares), least_tokens // 16)
            own = [n for n in range(least, least + least // 24 + 1) if sum(-(-t // n) for t in tiles) <= shares]
            assert share_tiles == (own[0] if own else least)
            if own:
                assert all(tile + count <= tiles[row] for row, tile, count, *_ in cuts if count)
            else:
                assert all(count == share_tiles for count in counts[: len(line) // share_tiles])
        rows_are_whole.append(all(cut[1] == 0 for cut in cuts) and counts.count(0) <= shares // 10)
    if lengths == [64, 50] * 3:
        assert rows_are_whole == [True, True, False, False, False]


@on_devices
def test_counters_grow_without_moving_those_in_use(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_made", {})
    monkeypatch.setattr(pieces, "_LEAST_COUNTERS", 4)
    few = pieces.counters(torch.device(device), 3)
    assert pieces.counters(torch.device(device), 4) is few
    many = pieces.counters(torch.device(device), 5)
    assert len(many) == 5
    assert pieces.counters(torch.device(device), 2) is many
    assert any(few is made for (made, _) in pieces._made.values())  # graphs may hold its address


@on_devices
def test_a_row_alone_differs_from_one_among_others_by_rounding_at_most(device: str) -> None:
    tiles = Tiles(16, 16, 4, 2, 1)
    case = paged.make(LENGTHS, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=device)
    together = _check_decode(case, 3, tiles=tiles, cuts=_cuts(case, tiles=tiles, programs=3, least_tokens=16))
    query = paged.queries(len(LENGTHS), 3, 16, case.kv)
    for row in range(len(LENGTHS)):
        alone = decode.paged_decode(
            query[row : row + 1], case.k_cache, case.v_cache, case.block_table, case.rows[row : row + 1],
            case.last[row : row + 1], scaling=0.3, tiles=tiles,
        )  # fmt: skip
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=0)


@on_devices
def test_decode_padding_rows(device: str) -> None:
    case = paged.make(LENGTHS, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=device)
    query = paged.queries(4, 2, 16, case.kv)
    token_row = torch.tensor([4, 5, 5, 0], dtype=torch.int32, device=device)  # row 5 is the scratch row
    position = torch.tensor([40, 0, 0, 0], dtype=torch.int32, device=device)
    args = (case.k_cache, case.v_cache, case.block_table, token_row, position)
    out = decode.paged_decode(query, *args, scaling=1.0)
    torch.testing.assert_close(out, reference.paged_decode(query, *args, scaling=1.0), atol=1e-5, rtol=0)
    assert torch.allclose(out[1:3], torch.tensor(0.5, device=device))


def test_large_batches_take_all_programs_and_small_ones_join_fewer_pieces() -> None:
    def at_once(rows: int, itemsize: int = 2, *, few: bool = False) -> int:
        tiles = tuning.decode_tiles(128, itemsize, rows, few=few)
        return tuning.decode_programs(rows * 8, tiles, 132, few=few) // 132

    assert [at_once(rows) for rows in (1, 16, 32, 64, 1024)] == [2, 2, 2, 4, 4]
    assert [at_once(rows, 4) for rows in (1, 1024)] == [2, 2], "no more run at once"
    assert [at_once(rows, few=True) for rows in (2, 8)] == [4, 4], "the kernel for few rows holds less in flight"


def test_one_row_is_left_to_fewer_programs_of_more_warps() -> None:
    one, two = (tuning.decode_tiles(128, 2, rows, few=True) for rows in (1, 2))
    assert (one.block_n, one.warps, one.programs_per_sm) == (64, 4, 2)
    assert (two.block_n, two.warps, two.programs_per_sm) == (32, 2, 4)
    assert tuning.decode_tiles(128, 2, 1) == tuning.decode_tiles(128, 2, 64), "elsewhere they are the same"
    assert tuning.decode_tiles(256, 2, 1, few=True).block_n == 16, "or tiles wouldn't fit into registers"


@on_devices
@pytest.mark.parametrize(
    ("window", "softcap", "dtype", "head_dim", "tiles"),
    [
        (0, 0.0, torch.float32, 16, Tiles(16, 16, 4, 2)),
        (1, 0.0, torch.float32, 16, Tiles(32, 16, 4, 2)),
        (9, 5.0, torch.float32, 16, Tiles(16, 32, 4, 2)),
        (100, 0.0, torch.bfloat16, 80, None),
        (0, 5.0, torch.float16, 64, Tiles(16, 16, 4, 2)),
    ],
)
def test_prefill(
    device: str, window: int, softcap: float, dtype: torch.dtype, head_dim: int, tiles: Tiles | None
) -> None:
    dtype = _dot_dtype(dtype, device)
    case = paged.make(LENGTHS, kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype, device=device)
    rows, starts = [4, 1, 0, 3], [33, 0, 0, 16]  # a later chunk starts where the one before ended
    counts = [case.lengths[row] - start for row, start in zip(rows, starts, strict=True)]
    position = torch.cat([torch.arange(start, case.lengths[row]) for row, start in zip(rows, starts, strict=True)])
    seq_row = torch.tensor(rows, dtype=torch.int32, device=device)
    query_start = torch.tensor([0, *counts], device=device).cumsum(0).int()
    query = paged.queries(len(position), 3, head_dim, case.kv, transposed=True)
    args = (case.block_table, seq_row, query_start, position.int().to(device))
    options = {"scaling": 0.3, "window": window, "softcap": softcap, "max_query_len": max(counts)}
    out = prefill.paged_prefill(query, case.k_cache, case.v_cache, *args, **options, tiles=tiles)
    exact = case.double()
    expected = reference.paged_prefill(query.double(), exact.k_cache, exact.v_cache, *args, **options)
    assert out.dtype == query.dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@on_devices
@pytest.mark.parametrize(("kv_heads", "head_dim", "dtype"), [(3, 80, torch.bfloat16), (1, 16, torch.float32)])
def test_write_kv(device: str, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    case = paged.make([9, 33], kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype, device=device)
    token_row = torch.tensor([1] * 33 + [0] * 9, dtype=torch.int32, device=device)
    position = torch.cat([torch.arange(33), torch.arange(9)]).int().to(device)
    key, value = torch.cat([case.dense[1], case.dense[0]], dim=1)
    key = key.transpose(0, 1).contiguous().transpose(0, 1)
    empty = torch.full_like(case.kv, float("nan"))
    kv_write.write_kv(key, value, empty[:, 1, 0], empty[:, 1, 1], case.block_table, token_row, position)
    case.kv[0] = float("nan")
    assert torch.equal(empty.nan_to_num(9.0), case.kv.nan_to_num(9.0))


@on_devices
def test_start_decode(device: str) -> None:
    def of(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    previous = of(70, 71, 72, 73, 74)
    row, position, new_block = of(1, 0, 3, 2), of(16, 40, 31, 32), of(9, -1, -1, 8)
    row_state = torch.arange(8, dtype=torch.int32, device=device).view(2, 4) * 10
    args = (of(0, 41, 0, 43), of(2, -1, 0, -1), previous, row, position, new_block)
    tables = [torch.full((4, 5), 6, dtype=torch.int32, device=device) for _ in range(2)]
    for start, table in zip((step_start.start_decode, reference.start_decode), tables, strict=True):
        ids, state, sampled_at = start(*args, table, row_state, 16)
        assert ids.tolist() == [72, 41, 70, 43]
        assert state.tolist() == [[10, 0, 30, 20], [50, 40, 70, 60]]
        assert sampled_at.tolist() == [17, 41, 32, 33]
        assert (table != 6).nonzero().tolist() == [[1, 1], [2, 2]]
        assert [int(table[1, 1]), int(table[2, 2])] == [9, 8]


def _sampling_inputs(rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    key0, key1 = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).int()
    position = torch.randint(0, 20_000, (rows,), generator=generator).int()
    heat = torch.rand(rows, generator=generator) + 0.5
    heat[:: max(1, rows // 3)] = 0.0
    return tuple(tensor.to(device) for tensor in (logits, key0, key1, position, heat))


def _check_sample(inputs: tuple[Tensor, ...]) -> None:
    token, logprob = sampling.sample(*inputs)
    expected_token, expected_logprob = reference.sample(inputs[0].double(), *inputs[1:])
    assert token.dtype == torch.int32
    # Noise is the same but for the rounding of logarithms, so another token means that two were within 1e-4.
    logits, _, _, _, heat = inputs
    differs = (token != expected_token).nonzero()[:, 0]
    noise = reference.gumbel_noise(
        *inputs[1:4], torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device), dtype=torch.float64
    )
    noisy = reference.scale_logits(logits.double(), heat) + noise * (heat > 0)[:, None]
    for row in differs.tolist():
        assert abs(float(noisy[row, int(token[row])] - noisy[row, int(expected_token[row])])) < 1e-4
    same = token == expected_token
    torch.testing.assert_close(logprob[same], expected_logprob[same], atol=2e-5, rtol=0, equal_nan=True)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(6, 5003), (1, 49152)])
def test_sample(device: str, rows: int, vocab: int, dtype: torch.dtype) -> None:
    _check_sample(_sampling_inputs(rows, vocab, dtype, device))


@on_devices
def test_sample_rows_without_a_distribution(device: str) -> None:
    inputs = _sampling_inputs(7, 3000, torch.float32, device)
    logits = inputs[0]
    logits[1, 2500] = float("nan")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[4, 7] = float("inf")
    logits[5] = float("-inf")
    logits[5, 2999] = 3.0
    token, logprob = sampling.sample(*inputs)
    assert logprob.isnan().tolist() == [False, True, True, True, True, False, False]
    assert token[1:6].tolist() == [0, 0, 0, 0, 2999]
    assert abs(float(logprob[5])) < 1e-6
    _check_sample(inputs)


@in_interpreter
def test_each_program_of_the_sampler_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(tuning, "may_start_early", lambda _: True)
    monkeypatch.setattr(sampling, "launch_next", lambda: calls.append("launch next"))
    monkeypatch.setattr(sampling, "wait", lambda: calls.append("wait"))
    inputs = _sampling_inputs(2, 3000, torch.float32, "cpu")
    _check_sample(inputs)
    chunks = -(-3000 // tuning.sample_block(2, 3000, tuning.sm_count(inputs[0].device)))
    assert calls == 2 * chunks * ["launch next", "wait"] + 2 * ["wait"]


def test_the_cpu_engine_does_not_run_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a CPU tensor went to Triton")

    for module, name in ((decode, "paged_decode"), (sampling, "sample"), (kv_write, "write_kv")):
        monkeypatch.setattr(module, name, fail)
    inputs = _sampling_inputs(2, 10, torch.float32, "cpu")
    for out, expected in zip(kernels.sample(*inputs), reference.sample(*inputs), strict=True):
        assert torch.equal(out, expected)


# --- sizes for a GPU alone


# NOTE: a combination of dtype, head_dim and window is a kernel to compile, which takes longer than the test.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "window", "dtype"),
    [
        ([20_000], 0, torch.bfloat16),
        ([16_384, *range(1, 256)], 0, torch.bfloat16),
        ([511, 512, 513, 2047, 2048, 2049, 4096], 0, torch.bfloat16),
        ([511, 512, 513, 2047, 2048, 2049, 16_384], 3000, torch.bfloat16),
        ([511, 512, 513, 2047, 2048, 2049, 4096], 0, torch.float32),
    ],
)
def test_decode_long(lengths: list[int], window: int, dtype: torch.dtype) -> None:
    case = paged.make(lengths, kv_heads=2, head_dim=128, block_size=64, dtype=dtype, device="cuda")
    _check_decode(case, 8, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)],
)
def test_decode_many_rows(head_dim: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(1, 400, (1024,), generator=torch.Generator().manual_seed(0)).tolist()
    case = paged.make(lengths, kv_heads=1, head_dim=head_dim, block_size=32, dtype=dtype, device="cuda")
    _check_decode(case, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (192, torch.bfloat16), (64, torch.float32)],
)
def test_prefill_long(head_dim: int, dtype: torch.dtype) -> None:
    case = paged.make([3000, 129, 128, 1], kv_heads=2, head_dim=head_dim, block_size=64, dtype=dtype, device="cuda")
    query_start = torch.tensor([0, 3000, 3129, 3257, 3258], dtype=torch.int32, device="cuda")
    position = torch.cat([torch.arange(length) for length in case.lengths]).int().cuda()
    query = paged.queries(3258, 6, head_dim, case.kv)
    args = (case.block_table, case.rows, query_start, position)
    out = prefill.paged_prefill(query, case.k_cache, case.v_cache, *args, scaling=0.1, max_query_len=3000)
    exact = case.double()
    expected = reference.paged_prefill(
        query.double(), exact.k_cache, exact.v_cache, *args, scaling=0.1, max_query_len=3000
    )
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    blocks, block_size = 2200, 64
    kv = torch.empty(blocks, 64, 2, 2, block_size, 64, dtype=torch.bfloat16, device="cuda")  # 2.3e9 elements
    assert kv.numel() > 2**31
    k_cache, v_cache = kv[:, 63, 0], kv[:, 63, 1]
    block_table = torch.tensor([[blocks - 1, blocks - 2]], dtype=torch.int32, device="cuda")
    row = torch.zeros(100, dtype=torch.int32, device="cuda")
    position = torch.arange(100, dtype=torch.int32, device="cuda")
    key, value = torch.randn(2, 100, 2, 64, dtype=torch.bfloat16, device="cuda")
    kernels.write_kv(key, value, k_cache, v_cache, block_table, row, position)
    query = torch.randn(100, 4, 64, dtype=torch.bfloat16, device="cuda")
    query_start = torch.tensor([0, 100], dtype=torch.int32, device="cuda")
    whole = kernels.paged_prefill(
        query, k_cache, v_cache, block_table, row[:1], query_start, position, scaling=0.1, max_query_len=100
    )
    last = kernels.paged_decode(query[-1:], k_cache, v_cache, block_table, row[:1], position[-1:], scaling=0.1)
    expected = paged.attend(query[-1], torch.stack([key, value]), scaling=0.1, window=0, softcap=0.0)
    for out in (whole[-1], last[0]):
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(256, 151_936), (1, 262_144), (32, 128_256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sample_large(rows: int, vocab: int, dtype: torch.dtype) -> None:
    _check_sample(_sampling_inputs(rows, vocab, dtype, "cuda"))


@pytest.mark.gpu
def test_a_graph_replays_at_other_lengths_and_logits() -> None:
    case = paged.make([900, 40], kv_heads=2, head_dim=64, block_size=64, dtype=torch.bfloat16, device="cuda")
    query = paged.queries(2, 4, 64, case.kv)
    position = torch.zeros(2, dtype=torch.int32, device="cuda")
    inputs = _sampling_inputs(2, 5000, torch.bfloat16, "cuda")
    off = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.ones(2).cuda(), torch.zeros(2).cuda()
    args = (query, case.k_cache, case.v_cache, case.block_table, case.rows, position)

    def step() -> tuple[Tensor, ...]:
        attended = kernels.paged_decode(*args, scaling=0.2)
        return attended, *kernels.sample(*inputs), *kernels.sample_filtered(*inputs, *off)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = step()
    position.copy_(case.last)
    inputs[0].copy_(inputs[0].flip(1))
    graph.replay()
    torch.cuda.synchronize()
    for replayed, eager in zip(outputs, step(), strict=True):
        assert torch.equal(replayed, eager)
