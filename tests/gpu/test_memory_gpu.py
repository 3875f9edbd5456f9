"""Sleep and wake on a GPU: memory really goes and comes, addresses and graphs stay, failures leave nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rollout import EngineConfig, RolloutWorker, SamplingParams
from rollout.engine.driver import Driver
from rollout.engine.models import learner as learner_module
from rollout.engine.models.learner import Source
from rollout.engine.virtual_memory import CudaRange
from rollout.weights import exchange, undo
from tests.tiny_models import ragged_prompts, tiny, tokens

pytestmark = pytest.mark.gpu

GIB = 1 << 30
KV_BYTES = 4 * GIB
CONFIG: dict[str, Any] = {"max_rows": 32, "kv_cache_bytes": KV_BYTES}
PROMPTS = ragged_prompts((5, 170, 320, 1, 64, 65))
GREEDY = SamplingParams(n=2, max_tokens=100, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def model() -> Any:
    """Small, but with a cache of 1 MiB a block in float32, so that some GiB of it are of use."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4, "num_hidden_layers": 8}
    return tiny("llama", **sizes, max_position_embeddings=16384).eval().cuda()


@pytest.fixture
def worker(model: Any) -> Iterator[RolloutWorker]:
    with RolloutWorker(model, EngineConfig(**CONFIG, dtype=torch.float32)) as worker:
        yield worker


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def all_but(size: int) -> torch.Tensor:
    """Takes the device's memory but for `size` bytes."""
    return torch.empty(free_bytes() - size, dtype=torch.uint8, device="cuda")


def addresses(worker: RolloutWorker) -> list[int]:
    engine = worker.engine
    tensors = [engine.kv, engine.runner.block_table, engine.runner.row_state, *engine.module.parameters()]
    tensors += [t for s in engine.slots for t in (s.host_in, s.device_in, s.host_out, s.device_out)]
    return [t.data_ptr() for t in tensors]


def poison(worker: RolloutWorker) -> None:
    """New memory may hold anything: what is read before it was written shows in the tokens."""
    worker.engine.kv[: worker.engine.kv_memory.blocks].fill_(float("nan"))
    torch.cuda.synchronize()


def test_the_memory_comes_back(worker: RolloutWorker) -> None:
    expected = tokens(worker.generate(PROMPTS, GREEDY))
    awake, free_awake = worker.memory_report(), free_bytes()
    assert KV_BYTES * 0.99 < awake.kv_bytes <= KV_BYTES and awake.graphs_bytes > 0
    asleep = worker.sleep()
    back = free_bytes() - free_awake
    assert back >= 0.95 * awake.held_bytes, f"{back} of {awake.held_bytes} bytes: {asleep}"
    assert awake.kv_bytes <= back < awake.kv_bytes * 1.05
    whole = torch.full((back - (64 << 20),), 7, dtype=torch.uint8, device="cuda")  # and can be used
    assert int(whole[-1]) == 7
    del whole
    worker.wake()
    assert abs(free_bytes() - free_awake) < 64 << 20
    poison(worker)
    assert tokens(worker.generate(PROMPTS, GREEDY)) == expected


def test_addresses_and_graphs_survive_twenty_phases(worker: RolloutWorker) -> None:
    expected = tokens(worker.generate(PROMPTS, GREEDY))
    engine = worker.engine
    before = engine.steps.graphs.captures, addresses(worker), id(engine.kv)
    least = engine.kv_memory.least_blocks * engine.kv_memory.block_bytes
    seen = set()
    for phase in range(20):
        worker.sleep()
        free = least * 1.2 + phase * 0.2 * GIB + (256 << 20)
        hog = all_but(int(free))
        report = worker.wake()
        seen.add(report.kv_blocks)
        poison(worker)
        assert tokens(worker.generate(PROMPTS, GREEDY)) == expected
        del hog
    assert (engine.steps.graphs.captures, addresses(worker), id(engine.kv)) == before
    assert len(seen) > 10, "block counts differ from phase to phase"
    assert worker.switches.wakes == 20


def test_requests_in_flight_survive_with_fewer_blocks(worker: RolloutWorker) -> None:
    expected = {
        (g, s): c.token_ids for g, group in enumerate(worker.generate(PROMPTS, GREEDY)) for s, c in enumerate(group)
    }
    stream = worker.stream([PROMPTS[0], *PROMPTS], [SamplingParams(max_tokens=3), *[GREEDY] * len(PROMPTS)])
    assert next(stream)[0] == 0
    for _ in range(10):
        worker._mail.deliver(worker.engine.step())
    before = worker.sleep(), worker.engine.steps.graphs.captures
    least = worker.engine.kv_memory.least_blocks * worker.engine.kv_memory.block_bytes
    hog = all_but(int(least * 1.3) + (256 << 20))
    assert worker.wake().kv_blocks < KV_BYTES // worker.engine.kv_memory.block_bytes
    poison(worker)
    assert {(g - 1, s): c.token_ids for g, s, c in stream} == expected
    assert worker.engine.steps.graphs.captures == before[1]
    del hog


def test_no_room_to_wake(worker: RolloutWorker) -> None:
    expected = tokens(worker.generate(PROMPTS, GREEDY))
    worker.sleep()
    hog = all_but(64 << 20)
    free = torch.cuda.mem_get_info()[0]
    with pytest.raises(torch.OutOfMemoryError, match=rf"{KV_BYTES} bytes are asked for, \d+ are the least"):
        worker.wake()
    assert worker.asleep and torch.cuda.mem_get_info()[0] == free
    del hog
    worker.wake()
    assert tokens(worker.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("call", ["create", "map", "allow"])
def test_a_failure_in_the_middle_of_a_wake_leaves_nothing(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    expected = tokens(worker.generate(PROMPTS, GREEDY))
    worker.sleep()
    free, calls = free_bytes(), [0]
    real: Callable[..., Any] = getattr(Driver, call)

    def breaks(self: Driver, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == (1 if call == "allow" else 3):
            raise RuntimeError("the driver is unwell")
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, call, breaks)
        with pytest.raises(RuntimeError, match="unwell"):
            worker.wake()
    assert worker.asleep and free_bytes() == free
    worker.wake()
    poison(worker)
    assert tokens(worker.generate(PROMPTS, GREEDY)) == expected


def test_own_weights_go_too(model: Any) -> None:
    config = EngineConfig(**CONFIG, dtype=torch.bfloat16)
    with RolloutWorker(model, config) as worker:
        worker.generate(PROMPTS, GREEDY)
        where, awake, free_awake = addresses(worker), worker.memory_report(), free_bytes()
        assert awake.weights_own_bytes > 0 and awake.weights_shared_bytes == 0
        asleep = worker.sleep()
        assert asleep.weights_own_bytes == 0
        assert free_bytes() - free_awake >= 0.95 * awake.held_bytes
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        worker.exchange(model)
        assert worker.memory_report().weights_own_bytes == awake.weights_own_bytes
        worker.wake()
        got = tokens(worker.generate(PROMPTS, GREEDY))
        assert addresses(worker) == where
        ours = [p.clone() for p in worker.engine.module.parameters()]
    with RolloutWorker(model, config) as fresh:
        assert all(map(torch.equal, ours, fresh.engine.module.parameters()))
        assert tokens(fresh.generate(PROMPTS, GREEDY)) == got


def test_a_thread_that_never_used_cuda_may_switch(worker: RolloutWorker) -> None:
    expected = tokens(worker.generate(PROMPTS, GREEDY))
    errors: list[BaseException] = []

    def switch() -> None:
        try:
            worker.sleep()
            worker.wake()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=switch)
    thread.start()
    thread.join()
    assert not errors
    assert tokens(worker.generate(PROMPTS, GREEDY)) == expected


def test_workers_made_and_closed_leave_their_streams_counters_alone() -> None:
    model = tiny("llama", hidden_size=256, head_dim=64).eval().cuda()
    config = EngineConfig(max_rows=2, dtype=torch.bfloat16, kv_cache_bytes=GIB)
    for round_ in range(12):
        with RolloutWorker(model, config) as worker:
            worker.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
            if round_ % 2:
                worker.sleep()
        del worker
        torch._C._cuda_clearCublasWorkspaces()  # which PyTorch keeps for each of its 32 pooled streams
        if round_ == 3:
            free = free_bytes()
    # Each compute stream keeps its attention counters, in one of PyTorch's smallest segments: 2 MiB for each of the 32
    # streams that PyTorch has.
    assert free - free_bytes() <= 8 * (2 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_range_lies_on_its_own_device() -> None:
    device = torch.device("cuda", 1)
    before = torch.cuda.mem_get_info(device)[0]
    range_ = CudaRange(device, GIB)
    range_.map(GIB)
    assert range_.tensor.device == device
    range_.tensor.fill_(3)
    assert int(range_.tensor[-1]) == 3
    assert before - torch.cuda.mem_get_info(device)[0] >= GIB
    range_.close()


def test_a_graph_plays_with_less_mapped() -> None:
    range_ = CudaRange(torch.device("cuda", 0), 4 * GIB)
    range_.map(3 * GIB)
    tensor, address = range_.tensor, range_.tensor.data_ptr()
    assert tensor.numel() == 4 * GIB
    graph = torch.cuda.CUDAGraph()
    tensor[:1024].add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tensor[:1024].add_(1)
    for mapped in (GIB, 2 * GIB, 1):
        range_.unmap()
        range_.map(mapped)
        tensor[:1024].fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        assert tensor[:1024].unique().tolist() == [6]
    assert range_.tensor is tensor and tensor.data_ptr() == address
    range_.close()


@pytest.mark.parametrize("place", ["the cache", "the device", "the host"])
def test_an_exchange_that_breaks_off_is_undone(model: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    real = exchange.sources

    def gathered(learner: Any, last: str) -> dict[str, Source]:
        """As of a sharded learner: every value is made when it is read, and that of `last` can't be."""

        def read(name: str, source: Source) -> torch.Tensor:
            if name == last:
                raise OSError("the link went down")
            return source.read().clone()

        return {n: dataclasses.replace(s, owner=None, read=partial(read, n, s)) for n, s in real(learner).items()}

    kv: Any = "recompute" if place == "the cache" else "keep"
    monkeypatch.setattr(learner_module, "CHUNK_BYTES", 1)
    if place == "the host":
        monkeypatch.setattr(undo, "device_free_bytes", lambda device: 0)
    with RolloutWorker(model, EngineConfig(**CONFIG, dtype=torch.bfloat16)) as worker:
        expected, where = tokens(worker.generate(PROMPTS, GREEDY)), addresses(worker)
        free = free_bytes()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.5)
        monkeypatch.setattr(exchange, "sources", lambda learner: gathered(learner, "lm_head.weight"))
        with pytest.raises(RuntimeError, match="old weights are whole"):
            worker.exchange(model, kv=kv)
        assert tokens(worker.generate(PROMPTS, GREEDY)) == expected
        monkeypatch.setattr(exchange, "sources", lambda learner: gathered(learner, ""))
        worker.exchange(model, kv=kv)
        assert (worker.policy_version, addresses(worker)) == (1, where)
        new = tokens(worker.generate(PROMPTS, GREEDY))
        assert abs(free_bytes() - free) < 64 << 20
    with RolloutWorker(model, EngineConfig(**CONFIG, dtype=torch.bfloat16)) as fresh:
        assert tokens(fresh.generate(PROMPTS, GREEDY)) == new != expected
