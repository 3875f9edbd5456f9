"""Learners spread over two processes, an engine on each; and one sharded learner that sends to a third process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.models import build_module, fsdp1, learner as learner_module, lora as lora_module
from rollout.weights import BroadcastReceiver, BroadcastSender, WeightExchange, broadcast, named_weights
from rollout.weights.undo import Undo
from tests.processes import Case, run
from tests.tiny_models import ragged_prompts, tiny

LEARNERS = (0, 1)
RECEIVER = 2
CONFIG: dict[str, Any] = {"block_size": 8, "max_rows": 4, "max_model_len": 64}


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name].to(tensor.dtype), rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def train(learner: Any, reference: nn.Module, rank: int | None = None) -> None:
    """Takes the same step in both; where `rank` is given, the learner's is over half of the reference's batch."""
    ids = torch.arange(3, 23).view(2, 10)
    mine = ids if rank is None else ids[rank : rank + 1]
    for model, batch in ((learner, mine), (reference, ids)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp2(model: Any) -> Any:
    mesh = DeviceMesh("cpu", list(LEARNERS))
    if dist.get_rank() in LEARNERS:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def assert_sharded(learner: nn.Module) -> None:
    for name, parameter in learner.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().numel() <= (parameter.numel() + 1) // 2 or parameter.shape[0] == 1, name


def fsdp2_on_each_rank(rank: int) -> None:
    learner, reference = fsdp2(tiny("qwen2")), tiny("qwen2")
    if rank not in LEARNERS:
        return
    engines = [build_module(learner, device="cpu", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for _ in range(2):
        train(learner, reference, rank)
        for engine in engines:
            report = WeightExchange(engine).exchange(learner)
            assert (report.shared, report.copied) == (0, len(list(reference.parameters())))
            assert report.copied_bytes == sum(p.nbytes for p in engine.parameters())
            if engine is engines[0]:
                assert_same(values(engine), values(reference))
            else:
                assert_same(values(engine), {n: t.bfloat16() for n, t in values(engines[0]).items()})
            assert_sharded(learner)


def fsdp2_is_gathered_in_bounded_chunks(rank: int) -> None:
    learner = fsdp2(tiny("llama"))
    if rank not in LEARNERS:
        return
    engine = build_module(learner, device="cpu", dtype=torch.float32)
    alive: list[int] = []
    real = torch._foreach_copy_

    def watched(targets: Any, sources: Any, non_blocking: bool = False) -> None:
        alive.append(sum(s.nbytes for s in sources))
        real(targets, sources, non_blocking=non_blocking)

    with (
        mock.patch.object(torch, "_foreach_copy_", watched),
        mock.patch.object(learner_module, "CHUNK_BYTES", 20_000),
    ):
        WeightExchange(engine).exchange(learner, Undo(lost=lambda weight: True))
    assert sum(alive) == sum(p.nbytes for p in engine.parameters())
    assert max(alive) < 20_000 + 128 * 64 * 4


def fsdp2_that_cannot_be_gathered_leaves_the_old_version(rank: int) -> None:
    learner = fsdp2(tiny("llama"))
    if rank not in LEARNERS:
        return
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    prompts = ragged_prompts((5, 9))
    with RolloutWorker(learner, EngineConfig(**CONFIG)) as worker:
        expected = worker.generate(prompts, params)
        train(learner, tiny("llama"), rank)
        real, gathered = lora_module.whole, iter(range(6))

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            if next(gathered) == 5:  # on both ranks at once, as when their group breaks
                raise OSError("the link went down")
            return real(tensor)

        with (
            mock.patch.object(learner_module, "CHUNK_BYTES", 1),
            mock.patch.object(lora_module, "whole", whole),
            pytest.raises(RuntimeError, match="old weights are whole: the link went down"),
        ):
            worker.exchange(learner)
        assert [g[0].token_ids for g in worker.generate(prompts, params)] == [g[0].token_ids for g in expected]
        assert worker.policy_version == 0
        worker.exchange(learner)
        assert [g[0].token_ids for g in worker.generate(prompts, params)] != [g[0].token_ids for g in expected]


def fsdp2_through_a_worker(rank: int) -> None:
    learner, reference = fsdp2(tiny("llama")), tiny("llama")
    if rank not in LEARNERS:
        return
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    with RolloutWorker(learner, EngineConfig(**CONFIG)) as worker:
        train(learner, reference, rank)
        worker.sleep()
        worker.exchange(learner)
        worker.wake()
        got = worker.generate(ragged_prompts((5, 9)), params)
    with RolloutWorker(reference, EngineConfig(**CONFIG)) as fresh:
        expected = fresh.generate(ragged_prompts((5, 9)), params)
    assert [g[0].token_ids for g in got] == [g[0].token_ids for g in expected]
    assert got[0][0].max_version == 1


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    learner = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return learner


def fsdp2_with_lora(rank: int) -> None:
    learner, reference = lora(tiny("llama")), lora(tiny("llama"))
    fsdp2(learner.get_base_model())
    if rank not in LEARNERS:
        return
    engine = build_module(learner, device="cpu", dtype=torch.float32)
    train(learner, reference, rank)
    WeightExchange(engine).exchange(learner)
    assert_same(values(engine), values(reference.merge_and_unload()))
    assert_sharded(learner.get_base_model())


def ddp(rank: int) -> None:
    group = dist.new_group(list(LEARNERS))
    if rank not in LEARNERS:
        return
    learner = nn.parallel.DistributedDataParallel(tiny("qwen2"), process_group=group)
    reference = tiny("qwen2")
    engine = build_module(learner, device="cpu", dtype=torch.float32)
    cast = build_module(learner, device="cpu", dtype=torch.bfloat16)
    train(learner, reference, rank)
    report = WeightExchange(engine).exchange(learner)
    assert (report.shared, report.copied) == (len(list(reference.parameters())), 0)
    assert_same(values(engine), values(reference))
    WeightExchange(cast).exchange(learner)
    assert_same(values(cast), {n: t.bfloat16() for n, t in values(engine).items()})


def wrap_fsdp1(model: Any, group: Any, use_orig_params: bool) -> Any:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way out
        return FullyShardedDataParallel(
            model,
            process_group=group,
            auto_wrap_policy=policy,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )


def fsdp1_unit_by_unit(rank: int) -> None:
    group = dist.new_group(list(LEARNERS))
    if rank not in LEARNERS:
        return
    for name, use_orig_params in (("qwen2", True), ("llama", False)):
        reference = tiny(name)
        learner = wrap_fsdp1(tiny(name), group, use_orig_params)
        engine = build_module(learner, device="cpu", dtype=torch.float32)  # before FSDP has seen a forward
        assert_same(values(engine), values(reference))
        held = [p.untyped_storage().nbytes() for p in learner.parameters()]
        for _ in range(2):
            train(learner, reference, rank)
            with mock.patch.object(fsdp1._Unit, "_gather", autospec=True, side_effect=fsdp1._Unit._gather) as gathered:
                report = WeightExchange(engine).exchange(learner)
            units = [call.args[0] for call in gathered.call_args_list]
            assert len(units) == len({id(unit) for unit in units}) == 3, "each unit once: both layers and the rest"
            assert not any(unit._kept for unit in units)
            assert (report.shared, report.copied) == (0, len(list(reference.parameters())))
            assert_same(values(engine), values(reference))
            assert [p.untyped_storage().nbytes() for p in learner.parameters()] == held
        named = dict(named_weights(learner))
        assert_same(named, dict(reference.named_parameters()))


def fsdp1_around_lora_is_refused(rank: int) -> None:
    group = dist.new_group(list(LEARNERS))
    if rank not in LEARNERS:
        return
    learner = wrap_fsdp1(lora(tiny("llama")).get_base_model(), group, True)
    with pytest.raises(ValueError, match=r"q_proj\.weight is adapted by LoRA within FSDP1.*FSDP2"):
        build_module(learner, device="cpu", dtype=torch.float32)


def fsdp2_sends_to_a_third_process(rank: int) -> None:
    learner, reference = fsdp2(tiny("qwen2", seed=5)), tiny("qwen2", seed=5)
    if rank == RECEIVER:
        exchange = WeightExchange(engine := build_module(tiny("qwen2"), device="cpu", dtype=torch.bfloat16))
        receiver = BroadcastReceiver(src=LEARNERS[1])
        exchange.exchange(receiver)
        assert_same(values(engine), values(reference))
        for breaking in LEARNERS:
            with pytest.raises(RuntimeError, match=f"rank {breaking}: OSError: the link went down"):
                exchange.exchange(receiver)
            assert exchange.intact
            assert_same(values(engine), values(reference))
        exchange.exchange(receiver)
        assert_same(values(engine), values(reference))
        return
    sender = BroadcastSender(learner, src=LEARNERS[1], bucket_bytes=10_000)
    assert sender.send().tensors == len(list(reference.parameters()))
    for breaking in LEARNERS:  # one that doesn't send must not gather alone what goes on in the next bucket
        real = broadcast._value

        def value(source: Any, breaking: int = breaking, real: Any = real) -> torch.Tensor:
            whole = real(source)
            if rank == breaking and whole.nbytes > 10_000:
                raise OSError("the link went down")
            return whole

        with mock.patch.object(broadcast, "_value", value), pytest.raises(RuntimeError, match="the link went down"):
            sender.send()
    sender.send()
    assert_sharded(learner)


class Zero3:
    """Stands in for `deepspeed.zero`: what its documentation says of a partitioned parameter and of the context."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.whole_elements: list[int] = []  # that were gathered at once, by each context

    def partition(self, model: nn.Module, rank: int) -> None:
        for index, parameter in enumerate(model.parameters()):
            padded = torch.zeros((parameter.numel() + 1) // 2 * 2)
            padded[: parameter.numel()] = parameter.detach().flatten()
            parameter.ds_id, parameter.ds_shape, parameter.ds_numel = index, parameter.shape, parameter.numel()
            parameter.ds_tensor = padded.chunk(2)[rank].clone()
            parameter.data = torch.empty(0)

    @contextmanager
    def GatheredParameters(self, params: Any, modifier_rank: int | None = None) -> Iterator[None]:
        assert modifier_rank is None
        params = [p for p in params if hasattr(p, "ds_id")]
        for parameter in params:
            parts = [torch.empty_like(parameter.ds_tensor) for _ in LEARNERS]
            dist.all_gather(parts, parameter.ds_tensor, group=self.group)
            parameter.data = torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
        self.whole_elements.append(sum(p.numel() for p in params))
        try:
            yield
        finally:
            for parameter in params:
                parameter.data.fill_(float("nan"))  # whoever kept it, sees it
                parameter.data = torch.empty(0)


def zero3(rank: int) -> None:
    group = dist.new_group(list(LEARNERS))
    if rank not in LEARNERS:
        return
    for adapt in (lambda model: model, lora):
        learner, reference = adapt(tiny("qwen2")), adapt(tiny("qwen2"))
        zero = Zero3(group)
        zero.partition(learner, rank)
        with mock.patch.dict(sys.modules, {"deepspeed": SimpleNamespace(zero=zero)}):
            engine = build_module(learner, device="cpu", dtype=torch.float32)
            with torch.no_grad():
                for parameter, other in zip(learner.parameters(), reference.parameters(), strict=True):
                    parameter.ds_tensor.mul_(1.5)
                    other.mul_(1.5)
            report = WeightExchange(engine).exchange(learner)
            cast = build_module(learner, device="cpu", dtype=torch.bfloat16)
        assert report.shared == 0
        if adapt is lora:
            reference = reference.merge_and_unload()
        assert_same(values(engine), values(reference))
        assert_same(values(cast), {n: t.bfloat16() for n, t in values(engine).items()})
        assert all(p.numel() == 0 for p in learner.parameters()), "partitioned again"
        assert max(zero.whole_elements) <= 128 * 64 + 4 * (96 + 64), "one at a time, with its adapters"


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        fsdp2_on_each_rank,
        fsdp2_is_gathered_in_bounded_chunks,
        fsdp2_that_cannot_be_gathered_leaves_the_old_version,
        fsdp2_through_a_worker,
        fsdp2_with_lora,
        ddp,
        fsdp1_unit_by_unit,
        fsdp1_around_lora_is_refused,
        zero3,
        fsdp2_sends_to_a_third_process,
    )
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run(CASES, 3, tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("case", CASES)
def test_three_processes(case: str, errors: dict[str, list[str]]) -> None:
    assert not errors[case], "\n".join(errors[case])
