"""The reference against dense attention, exact integer arithmetic, and statistics."""

import math

import pytest
import torch
from torch import Tensor

from rollout.engine import kernels, reference
from tests import paged

LENGTHS = [1, 7, 8, 9, 40, 23]  # around the block boundary, one long among short


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 1, 5, 8, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 16), (7, 1, 32)])
def test_decode_equals_dense_attention(heads: int, kv_heads: int, head_dim: int, window: int, softcap: float) -> None:
    case = paged.make(LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=8)
    query = paged.queries(len(LENGTHS), heads, head_dim, case.kv, transposed=True)
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    out = kernels.paged_decode(query, case.k_cache, case.v_cache, case.block_table, case.rows, case.last, **options)
    expected = [paged.attend(q, pair, **options) for q, pair in zip(query, case.dense, strict=True)]
    torch.testing.assert_close(out, torch.stack(expected))
    assert out.is_contiguous()


def test_decode_with_padding_rows_and_any_order() -> None:
    case = paged.make(LENGTHS, kv_heads=1, head_dim=16, block_size=8)
    query = paged.queries(5, 2, 16, case.kv)
    token_row = torch.tensor([3, 0, 6, 6, 4], dtype=torch.int32)  # row 6 is the scratch row
    position = torch.tensor([8, 0, 0, 0, 20], dtype=torch.int32)  # row 4 stands before its end
    out = kernels.paged_decode(query, case.k_cache, case.v_cache, case.block_table, token_row, position, scaling=1.0)
    for i in (0, 1, 4):
        pair = case.dense[int(token_row[i])][:, : int(position[i]) + 1]
        torch.testing.assert_close(out[i], paged.attend(query[i], pair, scaling=1.0, window=0, softcap=0.0))
    assert torch.equal(out[2], torch.full_like(out[2], 0.5))


def test_decode_works_inside_and_outside_inference_mode() -> None:
    case = paged.make(LENGTHS, kv_heads=1, head_dim=16, block_size=8, dtype=torch.float16)  # a dtype of its own
    query = paged.queries(len(LENGTHS), 2, 16, case.kv)
    args = (query, case.k_cache, case.v_cache, case.block_table, case.rows, case.last)
    with torch.inference_mode():
        inside = reference.paged_decode(*args, scaling=1.0)
    assert torch.equal(reference.paged_decode(*args, scaling=1.0), inside)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 1, 6, 100])
def test_prefill_equals_dense_attention(window: int, softcap: float) -> None:
    case = paged.make(LENGTHS, kv_heads=2, head_dim=16, block_size=8)
    starts = [0, 3, 0, 8, 17, 0]  # a later chunk of a prompt starts where the one before ended
    rows = [4, 1, 0, 3, 5, 2]
    _check_prefill(case, rows, [starts[row] for row in rows], window, softcap)


def _check_prefill(case: paged.Paged, rows: list[int], starts: list[int], window: int, softcap: float) -> None:
    options = {"scaling": 0.3, "window": window, "softcap": softcap}
    position = torch.cat([torch.arange(start, case.lengths[row]) for row, start in zip(rows, starts, strict=True)])
    counts = [case.lengths[row] - start for row, start in zip(rows, starts, strict=True)]
    query_start = torch.tensor([0, *counts]).cumsum(0).int()
    query = paged.queries(len(position), 6, 16, case.kv, transposed=True)
    out = kernels.paged_prefill(
        query,
        case.k_cache,
        case.v_cache,
        case.block_table,
        torch.tensor(rows, dtype=torch.int32),
        query_start,
        position.int(),
        max_query_len=max(counts),
        **options,
    )
    owner = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    for i, (row, at) in enumerate(zip(owner, position.tolist(), strict=True)):
        torch.testing.assert_close(out[i], paged.attend(query[i], case.dense[row][:, : at + 1], **options))


def test_write_kv_writes_its_slots_and_no_others() -> None:
    case = paged.make([10, 20], kv_heads=2, head_dim=16, block_size=8)
    empty = torch.full_like(case.kv, float("nan"))
    token_row = torch.tensor([1] * 20 + [0] * 10, dtype=torch.int32)
    position = torch.cat([torch.arange(20), torch.arange(10)]).int()
    key, value = torch.cat([case.dense[1], case.dense[0]], dim=1)
    heads_first = key.transpose(0, 1).contiguous()[None]  # [1, kv_heads, tokens, head_dim], as attention layers give it
    kernels.write_kv(
        heads_first.transpose(1, 2)[0], value, empty[:, 1, 0], empty[:, 1, 1], case.block_table, token_row, position
    )
    case.kv[0] = float("nan")  # the scratch block was not asked for
    assert torch.equal(empty.nan_to_num(9.0), case.kv.nan_to_num(9.0))


# --- sampling


def _keys(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key0, key1 = torch.randint(-(2**31), 2**31, (2, rows), generator=generator).int()
    return key0, key1


def _chi_squared(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_noise_is_the_documented_function() -> None:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    key0, key1 = _keys(5)
    position = torch.tensor([0, 1, 2**31 - 1, 77, 16384], dtype=torch.int32)
    ids = torch.tensor([0, 1, 5, 151935, 262143], dtype=torch.int32)
    noise = reference.gumbel_noise(key0, key1, position, ids, dtype=torch.float64)
    for row in range(5):
        a = mix(int(key0[row]) % 2**32 ^ mix((int(position[row]) + 0x9E3779B9) % 2**32))
        b = mix((int(key1[row]) + a) % 2**32)
        for i, v in enumerate(ids.tolist()):
            x = ((v ^ a) * 0x7FEB352D) % 2**32
            x = ((x ^ (x >> 15) ^ b) * 0x846CA68B) % 2**32
            x = ((x ^ (x >> 15)) * 0x9E3779B1) % 2**32
            u = (x + 0.5) * 2.0**-32
            assert float(noise[row, i]) == pytest.approx(-math.log(-math.log1p(-u)), abs=1e-5)


@pytest.mark.parametrize("varies", ["keys", "position", "key0", "key1"])
def test_draws_follow_softmax_and_are_independent(varies: str) -> None:
    draws, vocab = 20_000, 8
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    heat = 0.7
    one = torch.full((draws,), 12345, dtype=torch.int32)
    count = torch.arange(draws, dtype=torch.int32)
    key0, key1 = _keys(draws)
    key0, key1, position = {
        "keys": (key0, key1, one),
        "position": (one, one, count),
        "key0": (count, one, one),
        "key1": (one, count, one),
    }[varies]
    token, logprob = kernels.sample(logits.expand(draws, vocab), key0, key1, position, torch.full((draws,), heat))
    expected = (logits.double() / heat).softmax(-1)
    torch.testing.assert_close(logprob.double(), expected.log()[token.long()], atol=1e-5, rtol=0)
    # 1e-6 quantiles of chi-squared: 40.5 at 7 degrees of freedom, 127 at 63
    assert _chi_squared(token.long().bincount(minlength=vocab), expected * draws) < 40.5
    pairs = (token[:-1].long() * vocab + token[1:]).bincount(minlength=vocab * vocab)
    frequency = token.long().bincount(minlength=vocab) / draws
    assert _chi_squared(pairs, torch.outer(frequency, frequency).flatten() * (draws - 1)) < 127


@pytest.mark.parametrize("varies", ["position", "key0", "key1", "ids"])
def test_noise_of_neighbours_is_independent(varies: str) -> None:
    """Of keys and positions one apart, and of ids a few apart: no correlation, and no pattern in pairs of values."""
    # Enough to see what two multiplications instead of three would leave of ids that are three apart.
    rows, vocab, bins = (64, 131_072, 256) if varies == "ids" else (65, 32_768, 64)
    one = torch.full((rows,), 12345, dtype=torch.int32)
    count = torch.arange(rows, dtype=torch.int32)
    keys = [count if name == varies else one for name in ("key0", "key1", "position")]
    if varies == "ids":
        keys = [*_keys(rows), one]
    noise = reference.gumbel_noise(*keys, torch.arange(vocab, dtype=torch.int32), dtype=torch.float64)
    uniform = -torch.expm1(-torch.exp(-noise))  # [rows, vocab]
    place = (uniform * bins).long().clamp_max(bins - 1)
    assert abs(float(uniform.mean()) - 0.5) < 5 * (12 * uniform.numel()) ** -0.5
    lags = (1, 2, 3, 1024) if varies == "ids" else (1, 2)
    for lag in lags:
        if varies == "ids":
            first, second, u, v = place[:, :-lag], place[:, lag:], uniform[:, :-lag], uniform[:, lag:]
        else:
            first, second, u, v = place[:-lag], place[lag:], uniform[:-lag], uniform[lag:]
        correlation = 12 * ((u - 0.5) * (v - 0.5)).mean()
        assert abs(float(correlation)) < 5 * u.numel() ** -0.5
        counts = (first * bins + second).flatten().bincount(minlength=bins * bins)
        freedom = bins * bins - 1
        assert abs(_chi_squared(counts, torch.tensor(u.numel() / bins**2)) - freedom) < 5 * math.sqrt(2 * freedom)
    if varies != "ids":  # where the largest noise is, which is what decides draws
        largest = noise.argmax(-1)
        assert (largest[1:] != largest[:-1]).all()


def test_a_draw_depends_on_its_keys_and_position_alone() -> None:
    rows, vocab = 64, 1000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    key0, key1 = _keys(rows)
    position = torch.arange(rows, dtype=torch.int32)
    args = (logits, key0, key1, position, torch.ones(rows))
    token, logprob = kernels.sample(*args)
    order = torch.randperm(rows)[:40]
    again, logprob_again = kernels.sample(*(arg[order] for arg in args))
    assert torch.equal(again, token[order])
    assert torch.equal(logprob_again, logprob[order])
    for changed in range(1, 4):
        other = [arg + 1 if i == changed else arg for i, arg in enumerate(args)]
        assert (kernels.sample(*other)[0] != token).float().mean() > 0.8
    assert torch.equal(key0, _keys(rows)[0])  # the noise mixes copies


def test_temperature_zero_is_greedy_at_temperature_one() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).half()
    key0, key1 = _keys(2)
    token, logprob = kernels.sample(logits, key0, key1, key0, torch.tensor([0.0, 1e-4]))
    assert torch.equal(token, logits.argmax(-1).int())
    assert float(logprob[0]) == pytest.approx(float(logits[0].float().log_softmax(-1).max()), abs=1e-6)
    assert token.dtype == torch.int32
    assert logprob.dtype == torch.float32


def _broken_rows() -> Tensor:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 30] = float("nan")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[4, 7] = float("inf")
    logits[5] = float("-inf")
    logits[5, 49] = 3.0  # a mask that leaves one token is no fault
    return logits


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rows_without_a_distribution_say_so(heat: float) -> None:
    logits = _broken_rows()
    key0, key1 = _keys(6)
    temperature = torch.full((6,), heat)
    off = (torch.zeros(6, dtype=torch.int32), torch.ones(6), torch.zeros(6))
    plain = kernels.sample(logits, key0, key1, key0, temperature)
    filtered = kernels.sample_filtered(logits, key0, key1, key0, temperature, *off)
    for token, logprob in (plain, filtered[:2]):
        assert logprob.isnan().tolist() == [False, True, True, True, True, False]
        assert token[1:].tolist() == [0, 0, 0, 0, 49]
        assert float(logprob[5]) == 0.0


# --- filters


def _kept(scaled: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """One row's candidates, filter after filter, by the definitions."""
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    if top_k:
        order = [i for i in order if scaled[i] >= scaled[order[min(top_k, len(order)) - 1]]]
    if top_p < 1.0:
        weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
        whole, mass, nucleus = sum(weight.values()), 0.0, []
        for i in order:
            if nucleus and mass / whole >= top_p:
                break
            nucleus.append(i)
            mass += weight[i]
        order = nucleus
    return {i for i in order if math.exp(scaled[i] - scaled[order[0]]) >= min_p}


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (1000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.3, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.0, 0.0),
    (0, 1.0, 0.2),
    (0, 1.0, 1.0),
    (20, 0.8, 0.0),
    (20, 0.95, 0.3),
]


def test_filters_keep_what_their_definitions_keep() -> None:
    draws, vocab = 400, 40
    rows = len(FILTERS) * draws
    top_k, top_p, min_p = (torch.tensor(column).repeat_interleave(draws) for column in zip(*FILTERS, strict=True))
    logits = (torch.randn(len(FILTERS), vocab, generator=torch.Generator().manual_seed(5)) * 2).repeat_interleave(
        draws, 0
    )
    key0, key1 = _keys(rows)
    heat = torch.full((rows,), 0.8)
    token, logprob, mass = kernels.sample_filtered(
        logits, key0, key1, torch.zeros_like(key0), heat, top_k.int(), top_p, min_p
    )
    for nth, options in enumerate(FILTERS):
        scaled = logits[nth * draws].double() / 0.8
        full = scaled.softmax(-1)
        kept = sorted(_kept(scaled.tolist(), *options))
        mine = token[nth * draws : (nth + 1) * draws].long()
        assert set(mine.tolist()) <= set(kept)
        assert float(mass[nth * draws]) == pytest.approx(float(full[kept].sum()), abs=1e-5)
        torch.testing.assert_close(
            logprob[nth * draws : (nth + 1) * draws].double(), full.log()[mine], atol=1e-5, rtol=0
        )
        # The draw among the kept is fair: 1e-6 quantile of chi-squared, by Wilson and Hilferty.
        share = full[kept] / full[kept].sum()
        big = share * draws > 5
        if int(big.sum()) > 1:
            counts = torch.tensor([int((mine == i).sum()) for i in kept])[big]
            freedom = int(big.sum())
            limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
            assert _chi_squared(counts, share[big] * draws) < limit
    assert torch.equal(mass[:draws], torch.ones(draws))


def test_filters_that_are_off_change_nothing() -> None:
    rows, vocab = 50, 3000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
    key0, key1 = _keys(rows)
    heat = torch.rand(rows, generator=torch.Generator().manual_seed(1)).where(torch.arange(rows) > 3, 0.0)
    plain = kernels.sample(logits, key0, key1, key0, heat)
    off = (torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows))
    token, logprob, mass = kernels.sample_filtered(logits, key0, key1, key0, heat, *off)
    assert torch.equal(token, plain[0])
    torch.testing.assert_close(logprob, plain[1], atol=2e-6, rtol=0)
    assert torch.equal(mass, torch.ones(rows))


def test_top_k_keeps_ties_with_the_kth() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    key0, key1 = _keys(1)
    options = (torch.tensor([1], dtype=torch.int32), torch.ones(1), torch.zeros(1))
    mass = kernels.sample_filtered(logits, key0, key1, key0, torch.ones(1), *options)[2]
    assert float(mass) == pytest.approx(float(logits.softmax(-1)[0, 1:3].sum()), abs=1e-6)
