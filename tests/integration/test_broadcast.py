"""Weights broadcast from a learner's process to one with an engine: whole and equal, or an error on both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.models import build_module
from rollout.engine.models.learner import Source
from rollout.weights import BroadcastReceiver, BroadcastSender, WeightExchange, broadcast
from rollout.weights.undo import Undo
from tests.processes import Case, run
from tests.tiny_models import ARCHITECTURES, fingerprint, ragged_prompts, tiny

SENDER = 0
CONFIG: dict[str, Any] = {"block_size": 8, "max_rows": 4, "max_model_len": 64}
PROMPTS = ragged_prompts((5, 12, 3))
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name


def transfer(rank: int, learner: Any, exchange: WeightExchange | None, **options: Any) -> Any:
    """One broadcast; the sender gives its report, the receiver its own."""
    if rank == SENDER:
        return BroadcastSender(learner, None, SENDER, **options).send()
    assert exchange is not None
    return exchange.exchange(BroadcastReceiver(None, SENDER))


# Every process makes the same models by their seeds, so the receiver knows what has to arrive.


def equal_weights(rank: int, name: str, dtype: torch.dtype, bucket_bytes: int) -> None:
    learner = tiny(name, seed=5)
    engine = build_module(tiny(name), device="cpu", dtype=dtype)
    exchange, where, before = WeightExchange(engine), addresses(engine), fingerprint(learner)
    report = transfer(rank, learner, exchange, bucket_bytes=bucket_bytes)
    own_bytes = sum(p.numel() * dtype.itemsize for p in learner.parameters())
    if rank == SENDER:
        assert fingerprint(learner) == before
        assert report.sent_bytes == own_bytes, "converted before it is sent"
        assert report.tensors == len(list(learner.parameters()))
        if bucket_bytes > own_bytes * 2:
            assert report.buckets == 1
        else:  # rows stay whole
            assert report.buckets > min(own_bytes // bucket_bytes, len(learner.lm_head.weight))
    else:
        assert_same(values(engine), values(learner))
        assert addresses(engine) == where and exchange.intact
        assert (report.shared, report.copied, report.copied_bytes) == (0, report.copied, own_bytes)


def float32_to_bfloat16(rank: int) -> None:
    for name in ARCHITECTURES:
        equal_weights(rank, name, torch.bfloat16, 1 << 20)


def every_tensor_keeps_its_dtype(rank: int) -> None:
    learner = tiny("llama", seed=5)
    learner.model.to(torch.bfloat16)  # all but the head
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16)
    engine.lm_head.float()
    report = transfer(rank, learner, WeightExchange(engine), bucket_bytes=10_000)
    if rank == SENDER:
        assert report.sent_bytes == sum(p.nbytes for p in learner.parameters())
    else:
        assert engine.lm_head.weight.dtype == torch.float32  # type: ignore[union-attr]
        assert_same(values(engine), values(learner))


def same_dtype(rank: int) -> None:
    equal_weights(rank, "llama", torch.float32, 1 << 20)


def small_buckets_cut_tensors_between_rows(rank: int) -> None:
    for bucket_bytes in (10_000, 1_000, 1):
        equal_weights(rank, "qwen2", torch.bfloat16, bucket_bytes)


def buckets_are_bounded(rank: int) -> None:
    sizes: list[int] = []
    real = dist.broadcast

    def watched(tensor: torch.Tensor, **options: Any) -> None:
        sizes.append(tensor.nbytes)
        real(tensor, **options)

    with mock.patch.object(dist, "broadcast", watched):
        equal_weights(rank, "llama", torch.float32, 10_000)
    assert len(sizes) > 10 and max(sizes) <= 10_000 + 16


def one_pass_packs_a_bucket_and_converts_in_it(rank: int) -> None:
    passes: list[list[tuple[torch.dtype, torch.dtype]]] = []
    sent: list[int] = []
    pack, pass_on = torch._foreach_copy_, dist.broadcast

    def packed(targets: Any, values: Any, non_blocking: bool = False) -> None:
        passes.append([(t.dtype, v.dtype) for t, v in zip(targets, values, strict=True)])
        pack(targets, values, non_blocking=non_blocking)

    def passed(tensor: torch.Tensor, **options: Any) -> None:
        sent.append(tensor.nbytes)
        pass_on(tensor, **options)

    with mock.patch.object(torch, "_foreach_copy_", packed), mock.patch.object(dist, "broadcast", passed):
        learner = tiny("llama", seed=5)
        engine = build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16)
        passes.clear()
        report = transfer(rank, learner, WeightExchange(engine), bucket_bytes=50_000)
    if rank == SENDER:
        assert len(passes) == report.buckets == len(sent) > 2
        assert {pair for one in passes for pair in one} == {(torch.bfloat16, torch.float32)}
        assert report.sent_bytes == sum(p.numel() * 2 for p in learner.parameters())
        assert report.sent_bytes <= sum(sent) < report.sent_bytes + 16 * (len(sent) + report.tensors)
    else:
        assert {pair for one in passes for pair in one} == {(torch.bfloat16, torch.bfloat16)}


def wider_engine_gets_the_learners_dtype(rank: int) -> None:
    learner = tiny("llama", seed=5).to(torch.bfloat16)
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.float32)
    report = transfer(rank, learner, WeightExchange(engine))
    if rank == SENDER:
        assert report.sent_bytes == sum(p.nbytes for p in learner.parameters())
    else:
        assert_same(values(engine), values(learner))


def tied_embeddings(rank: int) -> None:
    learner = tiny("qwen2", seed=5)
    engine = build_module(tiny("qwen2"), device="cpu", dtype=torch.bfloat16)
    report = transfer(rank, learner, WeightExchange(engine))
    if rank == SENDER:
        assert report.tensors == len(list(learner.parameters())) == len(learner.state_dict()) - 1
    else:
        assert engine.lm_head.weight is engine.model.embed_tokens.weight  # type: ignore[union-attr]
        assert torch.equal(engine.lm_head.weight, learner.lm_head.weight.bfloat16())  # type: ignore[union-attr]


def strided_engine_and_buffers(rank: int) -> None:
    learner, other = tiny("llama", seed=5), tiny("llama")
    other.lm_head.weight.data = other.lm_head.weight.detach().T.contiguous().T
    engine = build_module(other, device="cpu", dtype=torch.float32)
    engine.model.register_buffer("steps", torch.tensor(3))  # type: ignore[union-attr]
    learner.model.register_buffer("steps", torch.tensor(4))
    assert not engine.lm_head.weight.is_contiguous()  # type: ignore[union-attr]
    transfer(rank, learner, WeightExchange(engine), bucket_bytes=3_000)
    if rank != SENDER:
        assert_same(values(engine), values(learner))
        assert int(engine.model.steps) == 4  # type: ignore[union-attr, arg-type]


def lora_is_merged(rank: int) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    learner = peft.get_peft_model(tiny("llama", seed=5), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    expected = build_module(learner, device="cpu", dtype=torch.float32)
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.float32)
    transfer(rank, learner, WeightExchange(engine), bucket_bytes=10_000)
    if rank != SENDER:
        assert_same(values(engine), values(expected))


def other_tensors_raise_on_both(rank: int) -> None:
    for fault in ("missing", "extra", "misshapen", "untied", "kind"):
        name = "qwen2" if fault == "untied" else "llama"
        learner = tiny(name, seed=5)
        mlp = learner.model.layers[1].mlp
        what = r"model\.layers\.1\.mlp\.up_proj\.weight"
        if fault == "missing":
            mlp.up_proj = nn.Identity()
        elif fault == "extra":
            mlp.added = nn.Linear(2, 2, bias=False)
            what = r"model\.layers\.1\.mlp\.added\.weight"
        elif fault == "misshapen":
            mlp.up_proj = nn.Linear(64, 95, bias=False)
        elif fault == "kind":
            mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.to(torch.int32), requires_grad=False)
        else:
            learner.lm_head.weight = nn.Parameter(learner.lm_head.weight.detach().clone())
            what = r"extra: lm_head\.weight"
        engine = build_module(tiny(name), device="cpu", dtype=torch.bfloat16)
        exchange, old = WeightExchange(engine), values(engine)
        with (
            mock.patch.object(dist, "broadcast", side_effect=AssertionError("bytes were sent")),
            pytest.raises(ValueError, match=rf"rank 1: .*{what}.*Nothing was written"),
        ):
            transfer(rank, learner, exchange)
        assert_same(values(engine), old)
        assert exchange.intact


def breaking(name: str) -> Any:
    """Reading the tensor `name` fails."""
    real = broadcast._value

    def value(source: Source, broken: Source) -> torch.Tensor:
        if source is broken:
            raise OSError("a shard is gone")
        return real(source)

    def find(learner: nn.Module) -> dict[str, Source]:
        named = real_sources(learner)
        patched.side_effect = lambda source: value(source, named[name])
        return named

    real_sources = broadcast.sources
    patched = mock.Mock()
    return mock.patch.multiple(broadcast, sources=find, _value=patched)


def error_half_way_is_undone_and_the_next_arrives(rank: int) -> None:
    learner = tiny("llama", seed=5)
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16)
    exchange, old = WeightExchange(engine), values(engine)
    embedding = engine.model.embed_tokens.weight  # type: ignore[union-attr]
    version = embedding._version
    with breaking("model.layers.1.mlp.up_proj.weight"), pytest.raises(RuntimeError, match="a shard is gone") as caught:
        transfer(rank, learner, exchange, bucket_bytes=10_000)
    if rank == SENDER:
        assert isinstance(caught.value.__cause__, OSError)
    else:
        assert "the old weights are whole" in str(caught.value)
        assert embedding._version > version + 1, "it was written, and put back"
    assert exchange.intact
    assert_same(values(engine), old)
    transfer(rank, learner, exchange, bucket_bytes=10_000)
    if rank != SENDER:
        assert exchange.intact
        assert_same(values(engine), values(learner))


def error_before_the_first_bucket_leaves_the_old(rank: int) -> None:
    learner = tiny("llama", seed=5)
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16)
    exchange, old = WeightExchange(engine), values(engine)
    with breaking("lm_head.weight"), pytest.raises(RuntimeError, match="a shard is gone"):
        transfer(rank, learner, exchange)  # all fits into one
    assert exchange.intact
    assert_same(values(engine), old)


def error_on_the_receiver_reaches_the_sender(rank: int) -> None:
    learner = tiny("llama", seed=5)
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16)
    exchange, old = WeightExchange(engine), values(engine)
    calls = 0

    def copy(pairs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("the copy failed")
        real(pairs)

    real = broadcast.copy_pairs
    patch = mock.patch.object(broadcast, "copy_pairs", copy if rank != SENDER else real)
    with patch, pytest.raises(RuntimeError, match="rank 1: OSError: the copy failed"):
        transfer(rank, learner, exchange, bucket_bytes=10_000)
    assert rank == SENDER or calls == 3
    assert exchange.intact
    assert_same(values(engine), old)
    transfer(rank, learner, exchange)
    assert exchange.intact


def no_room_for_the_old_weights(rank: int) -> None:
    learner = tiny("llama", seed=5)
    engine = build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16)
    exchange, old = WeightExchange(engine), values(engine)
    full = mock.patch.object(Undo, "_room", side_effect=MemoryError("the host is full"))
    with full, pytest.raises(RuntimeError, match="rank 1: MemoryError: the host is full"):
        transfer(rank, learner, exchange, bucket_bytes=10_000)
    assert exchange.intact
    assert_same(values(engine), old)


def no_room_for_a_bucket(rank: int) -> None:
    learner = tiny("llama", seed=5)
    exchange = WeightExchange(build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16))
    full = mock.PropertyMock(side_effect=torch.OutOfMemoryError("full"))
    out = mock.patch.object(broadcast.Plan, "bucket_bytes", full)
    with out if rank != SENDER else mock.MagicMock(), pytest.raises(RuntimeError, match=r"rank 1: .*full"):
        transfer(rank, learner, exchange)
    assert exchange.intact


def learner_that_cannot_be_read(rank: int) -> None:
    learner = tiny("llama")
    exchange = WeightExchange(build_module(tiny("llama"), device="cpu", dtype=torch.bfloat16))
    next(learner.parameters()).ds_id = 1
    with pytest.raises(ValueError if rank == SENDER else RuntimeError, match="ZeRO-3"):
        transfer(rank, learner, exchange)
    assert exchange.intact


def roles_that_do_not_fit(rank: int) -> None:
    learner = tiny("llama")
    exchange = WeightExchange(build_module(tiny("llama"), device="cpu", dtype=torch.float32))
    with pytest.raises(ValueError, match="no rank of the group that sends"):
        BroadcastSender(learner, src=1).send() if rank == 0 else exchange.exchange(BroadcastReceiver(src=1))
    with pytest.raises(ValueError, match="don't agree on src"):
        BroadcastSender(learner, src=0).send() if rank == 0 else exchange.exchange(BroadcastReceiver(src=1))
    with pytest.raises(ValueError, match="no rank of the group receives"):
        BroadcastSender(learner).send()
    with pytest.raises(ValueError, match="bucket_bytes"):
        BroadcastSender(learner, bucket_bytes=0)
    group = dist.new_group([1])
    if rank == 0:
        with pytest.raises(ValueError, match="no member"):
            BroadcastSender(learner, group)


def through_a_worker(rank: int) -> None:
    learner = tiny("llama", seed=5)
    sender = BroadcastSender(learner, bucket_bytes=10_000)
    receiver = BroadcastReceiver()
    if rank == SENDER:
        sender.send()
        for _ in range(2):
            with breaking("lm_head.weight"), pytest.raises(RuntimeError, match="shard"):
                sender.send()
        BroadcastSender(tiny("llama", seed=6), bucket_bytes=10_000).send()
        with pytest.raises(RuntimeError, match="rank 1: RuntimeError: this RolloutWorker is closed"):
            sender.send()
        return
    config = EngineConfig(**CONFIG, dtype=torch.bfloat16)
    with RolloutWorker(learner, config) as fresh:
        ((expected,), *_) = expecteds = fresh.generate(PROMPTS, GREEDY)
    with RolloutWorker(tiny("llama"), config) as worker:
        old = worker.generate(PROMPTS, GREEDY)
        assert old[0][0].token_ids != expected.token_ids
        where = addresses(worker.engine.module)
        worker.sleep()
        assert worker.exchange(receiver).copied > 0
        worker.wake()
        assert worker.policy_version == 1 and addresses(worker.engine.module) == where
        got = worker.generate(PROMPTS, GREEDY)
        assert [g[0].token_ids for g in got] == [g[0].token_ids for g in expecteds]
        assert [g[0].logprobs for g in got] == [g[0].logprobs for g in expecteds]
        assert got[0][0].max_version == got[0][0].min_version == 1
        with pytest.raises(RuntimeError, match="shard"):
            worker.exchange(receiver)
        assert worker.policy_version == 1 and not worker.needs_exchange
        got = worker.generate(PROMPTS, GREEDY)
        assert [g[0].token_ids for g in got] == [g[0].token_ids for g in expecteds]
        worker.sleep()
        with pytest.raises(RuntimeError, match="shard"):
            worker.exchange(receiver)
        worker.wake()
        assert worker.policy_version == 1 and worker.needs_exchange, "sleep gave the old weights up"
        with pytest.raises(RuntimeError, match=r"exchange\(\) before generating"):
            worker.generate(PROMPTS, GREEDY)
        worker.exchange(receiver)
        assert worker.policy_version == 2 and not worker.needs_exchange
        got = worker.generate(PROMPTS, GREEDY)
    with RolloutWorker(tiny("llama", seed=6), config) as fresh:
        assert [g[0].token_ids for g in got] == [g[0].token_ids for g in fresh.generate(PROMPTS, GREEDY)]
    with pytest.raises(RuntimeError, match="closed"):
        worker.exchange(receiver)


def requests_in_flight_go_on(rank: int) -> None:
    learner = tiny("llama", seed=5)
    if rank == SENDER:
        BroadcastSender(learner).send()
        return
    with RolloutWorker(tiny("llama"), EngineConfig(**CONFIG)) as worker:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        stream = worker.stream(PROMPTS[:2], [params, SamplingParams(max_tokens=6, ignore_eos=True)])
        assert next(stream)[0] == 1
        with worker.paused():
            worker.exchange(BroadcastReceiver())
        ((_, _, completion),) = stream
        old, new = completion.versions
        assert (old.version, new.version, old.tokens + new.tokens) == (0, 1, 20)
    with RolloutWorker(learner, EngineConfig(**CONFIG)) as fresh:
        prefix = PROMPTS[0] + completion.token_ids[: old.tokens]
        ((rest,),) = fresh.generate([prefix], SamplingParams(max_tokens=new.tokens, temperature=0.0, ignore_eos=True))
    assert completion.token_ids[old.tokens :] == rest.token_ids


def a_model_left_behind_is_not_shared_any_more(rank: int) -> None:
    learner, model = tiny("llama", seed=5), tiny("llama")
    engine = build_module(model, device="cpu", dtype=torch.float32)
    exchange = WeightExchange(engine)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert exchange.broken_ties() == ["lm_head.weight"]
    transfer(rank, learner, exchange)
    if rank != SENDER:
        assert exchange.broken_ties() == [] and exchange.shares
        assert torch.equal(model.model.norm.weight, learner.model.norm.weight), "the storage is one"
        assert not torch.equal(model.lm_head.weight, learner.lm_head.weight)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        float32_to_bfloat16,
        every_tensor_keeps_its_dtype,
        same_dtype,
        small_buckets_cut_tensors_between_rows,
        buckets_are_bounded,
        one_pass_packs_a_bucket_and_converts_in_it,
        wider_engine_gets_the_learners_dtype,
        tied_embeddings,
        strided_engine_and_buffers,
        lora_is_merged,
        other_tensors_raise_on_both,
        error_half_way_is_undone_and_the_next_arrives,
        error_before_the_first_bucket_leaves_the_old,
        error_on_the_receiver_reaches_the_sender,
        no_room_for_the_old_weights,
        no_room_for_a_bucket,
        learner_that_cannot_be_read,
        roles_that_do_not_fit,
        through_a_worker,
        requests_in_flight_go_on,
        a_model_left_behind_is_not_shared_any_more,
    )
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run(CASES, 2, tmp_path_factory.mktemp("broadcast"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, errors: dict[str, list[str]]) -> None:
    assert not errors[case], "\n".join(errors[case])


def dies_or_goes_on(rank: int, folder: str) -> None:
    """The sender's process ends in the third bucket, and the receiver writes down that the old version serves on."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    if rank == SENDER:
        real, calls = dist.broadcast, iter(range(3))

        def last_breath(tensor: torch.Tensor, **options: Any) -> None:
            if next(calls) == 2:
                os._exit(0)
            real(tensor, **options)

        with mock.patch.object(dist, "broadcast", last_breath):
            BroadcastSender(tiny("llama", seed=5), bucket_bytes=10_000).send()
    with RolloutWorker(tiny("llama"), EngineConfig(**CONFIG)) as worker:
        before = worker.generate(PROMPTS, GREEDY)
        with pytest.raises(RuntimeError, match="old weights are whole"):
            worker.exchange(BroadcastReceiver())
        assert worker.policy_version == 0 and not worker.needs_exchange
        after = worker.generate(PROMPTS, GREEDY)
    assert [g[0].token_ids for g in after] == [g[0].token_ids for g in before]
    Path(folder, "went on").touch()


def test_a_sender_that_dies_leaves_the_old_version_serving(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(dies_or_goes_on, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "went on").exists()
