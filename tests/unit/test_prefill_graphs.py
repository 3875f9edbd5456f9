"""Prefill steps padded to the size of a graph: which sizes there are, what padding is, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout import Completion, EngineConfig, RolloutWorker, SamplingParams
from rollout.engine import graphs
from rollout.engine.batch import ROW_STATE_FIELDS, Batch, Prefill, PrefillSize, pad_prefill
from rollout.engine.graphs import GraphKey, prefill_sizes, smallest
from rollout.engine.slots import Slot
from rollout.engine.streams import InlineStreams
from tests import paged
from tests.devices import on_devices
from tests.fakes import noted_replays
from tests.tiny_models import peaked, ragged_prompts, tokens

SCRATCH = 9
FIELDS = len(ROW_STATE_FIELDS)
PROMPTS = ragged_prompts((5, 17, 32, 1, 16, 41))
SAMPLED = SamplingParams(n=3, max_tokens=12, seed=11)


def batch() -> Batch:
    """Three tokens of row 4 from position 8 on, two of row 6."""
    return Batch(
        rows=np.array([4, 6], np.int32),
        epochs=np.array([1, 1], np.int32),
        token_ids=np.array([50, 51, 52, 60, 61], np.int32),
        position=np.array([8, 9, 10, 0, 1], np.int32),
        token_row=np.array([4, 4, 4, 6, 6], np.int32),
        carry=np.empty(0, np.int32),
        new_block=np.empty(0, np.int32),
        prefill=Prefill(
            query_start=np.array([0, 3, 5], np.int32),
            tables=np.array([[11, 12], [13, 0]], np.int32),
            row_state=np.arange(1, 1 + 2 * FIELDS, dtype=np.int32).reshape(2, FIELDS),
            complete=np.array([True, True]),
        ),
    )


def test_padding_by_hand() -> None:
    padded = pad_prefill(batch(), PrefillSize(tokens=8, rows=3, blocks=4), SCRATCH)
    assert padded.prefill is not None
    assert padded.rows.tolist() == [4, 6, SCRATCH, SCRATCH]
    assert padded.token_ids.tolist() == [50, 51, 52, 60, 61, 0, 0, 0]
    assert padded.position.tolist() == [8, 9, 10, 0, 1, 0, 0, 0]
    assert padded.token_row.tolist() == [4, 4, 4, 6, 6, SCRATCH, SCRATCH, SCRATCH]
    assert padded.prefill.query_start.tolist() == [0, 3, 5, 5, 8], "the row that lacks has no token, the last one all"
    assert padded.prefill.tables.tolist() == [[11, 12, 0, 0], [13, 0, 0, 0], [0, 0, 0, 0]]
    assert padded.prefill.row_state[:2].tolist() == batch().prefill.row_state.tolist()  # type: ignore[union-attr]
    assert not padded.prefill.row_state[2].any()


def test_a_full_batch_has_an_empty_sequence_of_padding() -> None:
    padded = pad_prefill(batch(), PrefillSize(tokens=5, rows=2, blocks=2), SCRATCH)
    assert padded.prefill is not None
    assert padded.rows.tolist() == [4, 6, SCRATCH]
    assert padded.token_ids.tolist() == batch().token_ids.tolist()
    assert padded.prefill.query_start.tolist() == [0, 3, 5, 5]


def test_sizes_go_as_far_as_they_pay() -> None:
    config = EngineConfig(max_rows=64, block_size=64)
    sizes = prefill_sizes(config, 135_000_000, max_blocks=128)
    assert sizes == [(256, 31, 64), (512, 63, 64), (1024, 64, 64), (2048, 64, 64)]
    assert [size.tokens for size in prefill_sizes(config, 1_700_000_000, max_blocks=128)] == [256, 512]
    assert prefill_sizes(config, 8_000_000_000, max_blocks=128) == []
    short = EngineConfig(max_rows=64, block_size=64, max_prefill_tokens=1000)
    assert [size.tokens for size in prefill_sizes(short, 1000, max_blocks=20)] == [256, 512]
    assert prefill_sizes(short, 1000, max_blocks=20)[0].blocks == 20


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([(5, 2, 2), (8, 3, 4)], 0),
        ([(4, 2, 2), (8, 3, 4)], 1),  # too many tokens
        ([(8, 1, 2), (8, 3, 4)], 1),  # too many rows
        ([(8, 3, 1), (8, 3, 4)], 1),  # too many blocks
        ([(4, 9, 9)], None),
        ([], None),
    ],
)
def test_the_smallest_that_holds_a_batch(sizes: list[tuple[int, int, int]], chosen: int | None) -> None:
    offered = [PrefillSize(*size) for size in sizes]
    assert smallest(offered, batch()) == (None if chosen is None else offered[chosen])


def test_a_size_has_its_addresses() -> None:
    size = PrefillSize(tokens=16, rows=SCRATCH, blocks=3)
    slot = Slot(
        0,
        max_rows=SCRATCH,
        max_prefill_tokens=16,
        max_blocks=3,
        device=torch.device("cpu"),
        streams=InlineStreams(),
    )
    captured = slot.pad_device_prefill(size)
    assert slot.filled <= slot.host_in.numel()
    assert slot.device_in[: slot.filled].tolist() == slot.host_in[: slot.filled].tolist()
    replayed = slot.fill_prefill(batch(), size)
    names = ("token_ids", "position", "token_row", "query_start", "seq_row", "row_state", "tables")
    for name in names:
        one, other = getattr(captured, name), getattr(replayed, name)
        assert (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride()), name
    assert captured.max_query_len == replayed.max_query_len == 16
    assert (captured.rows, captured.seq_row.shape[0]) == (SCRATCH, SCRATCH + 1)
    slot.copy_in()
    assert replayed.token_ids[:5].tolist() == [50, 51, 52, 60, 61]
    assert replayed.tables[0].tolist() == [11, 12, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter
@on_devices
def test_the_kernel_takes_padding(device: str) -> None:
    pytest.importorskip("triton")
    from rollout.engine.kernels.prefill import paged_prefill

    case = paged.make([70, 17], kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32, device=device)
    query = paged.queries(64, 3, 16, case.kv)
    position = [*range(33, 70), *range(17), *[0] * 10]  # a later chunk of row 0, the whole of row 1, padding

    def attend(tokens: int, rows: list[int], starts: list[int], longest: int) -> torch.Tensor:
        seq_row, query_start, at = (
            torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, starts, position[:tokens])
        )
        caches = (case.k_cache, case.v_cache, case.block_table)
        return paged_prefill(query[:tokens], *caches, seq_row, query_start, at, scaling=0.3, max_query_len=longest)

    plain = attend(54, [0, 1], [0, 37, 54], 37)
    padded = attend(64, [0, 1, 2, 2, 2], [0, 37, 54, 54, 54, 64], 64)
    assert torch.equal(padded[:54], plain)
    assert (padded[54:] == 0.5).all(), "padding sees the scratch row's first position alone"


def logprobs(groups: list[list[Completion]]) -> torch.Tensor:
    return torch.tensor([value for group in groups for completion in group for value in completion.logprobs])


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return peaked()


def run(model: Any, params: SamplingParams, **config: Any) -> tuple[list[list[Completion]], list[GraphKey], int]:
    """The completions, the keys of the prefill graphs replayed, and the number of prefill steps."""
    sizes: dict[str, Any] = {"block_size": 8, "max_rows": 24}
    with RolloutWorker(model, EngineConfig(**{**sizes, **config})) as worker:
        engine = worker.engine
        engine.kv.fill_(float("nan"))  # what nobody has written must not be read
        replayed = noted_replays(engine.steps.graphs)
        groups = worker.generate(PROMPTS, params)
        engine.scheduler.check_conservation()
        steps = worker.metrics.prefill_steps
    return groups, [key for key in replayed if key.prefill is not None], steps


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "module"])
@pytest.mark.parametrize(
    ("config", "params"),
    [
        ({}, SAMPLED),
        ({"overlap": False}, SAMPLED),
        ({"max_rows": 5}, SAMPLED),
        ({"max_prefill_tokens": 24}, SAMPLED),
        ({"kv_cache_bytes": 25 * 2 * 2 * 2 * 8 * 16 * 4}, SAMPLED),
        ({}, SamplingParams(n=2, max_tokens=8, seed=2, top_k=5, top_p=0.9)),
    ],
    ids=["overlap", "in-turns", "5-rows", "chunked", "little-memory", "filtered"],
)
def test_a_padded_prefill_is_the_eager_one(
    model: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], params: SamplingParams, fused: bool
) -> None:
    monkeypatch.setattr(graphs, "PREFILL_TOKENS", (24, 64, 512))  # of 2, 7 and all rows
    expected, none, steps = run(model, params, use_graphs=False, fused_decoder=fused, **config)
    assert not none
    groups, replayed, same_steps = run(model, params, use_graphs=True, fused_decoder=fused, **config)
    assert 0 < len(replayed) <= same_steps == steps
    assert all(key.filtered == params.filtered for key in replayed)
    assert tokens(groups) == tokens(expected)
    torch.testing.assert_close(logprobs(groups), logprobs(expected), atol=1e-5, rtol=0.0)


def test_what_fits_no_graph_runs_eagerly(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PREFILL_TOKENS", (24,))
    _, replayed, steps = run(model, SAMPLED, use_graphs=True, max_rows=8)
    assert 0 < len(replayed) < steps
    assert {key.rows for key in replayed} == {2}
