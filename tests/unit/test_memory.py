"""Ranges whose memory comes and goes, against a driver that keeps count; how much is mapped; and what lies where."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.config import EngineConfig
from rollout.engine import memory, virtual_memory
from rollout.engine.driver import Driver
from rollout.engine.memory import KVMemory, OwnWeights
from rollout.engine.models.hf import ModelShape
from rollout.engine.virtual_memory import CudaRange, FixedRange, HostRange, make_range, round_up

CPU = torch.device("cpu")
GRAIN = 16
BASE = 0x1000


class Code(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeCuda:
    """`cuda.bindings.driver`: writes calls down, keeps count of memory, and refuses what the real one refuses."""

    CUresult = Code
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended")

    def __init__(self, total: int = 1 << 20) -> None:
        self.total = total
        self.log: list[str] = []
        self.handles: dict[int, int] = {}  # not yet released, and their sizes
        self.made = 0
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.allowed: set[int] = set()
        self.fail: dict[str, int] = {}  # how many calls of that name go well, before one doesn't

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def _enter(self, name: str, text: str) -> Code:
        self.log.append(text)
        if name in self.fail:
            self.fail[name] -= 1
            if self.fail[name] < 0:
                del self.fail[name]
                return Code.CUDA_ERROR_INVALID_VALUE
        return Code.CUDA_SUCCESS

    def cuDeviceGet(self, index: int) -> tuple[Code, int]:
        return Code.CUDA_SUCCESS, index

    def cuMemGetInfo(self) -> tuple[Code, int, int]:
        return Code.CUDA_SUCCESS, self.total - sum(self.mapped.values()), self.total

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> tuple[Code, int]:
        assert (properties.type, properties.location.type, properties.location.id) == ("pinned", "device", 3)
        assert option == "recommended"
        return Code.CUDA_SUCCESS, GRAIN

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Code, int]:
        assert size % GRAIN == alignment == address == flags == 0
        self.reserved[BASE] = size
        return self._enter("reserve", f"reserve {size}"), BASE

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Code, int]:
        assert size % GRAIN == 0 and properties.location.id == 3
        if sum(self.mapped.values()) + size > self.total:
            self.log.append(f"no room for {size}")
            return Code.CUDA_ERROR_OUT_OF_MEMORY, 0
        code = self._enter("create", f"create {size}")
        if code is Code.CUDA_SUCCESS:
            self.made += 1
            self.handles[self.made] = size
        return code, self.made

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Code]:
        assert self.handles[handle] == size and offset == flags == 0
        assert address >= BASE and address + size <= BASE + self.reserved[BASE]
        assert all(address + size <= a or a + s <= address for a, s in self.mapped.items())
        code = self._enter("map", f"map {address - BASE}+{size}")
        if code is Code.CUDA_SUCCESS:
            self.mapped[address] = size
        return (code,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Code]:
        ((desc,), at) = access, address
        assert (desc.flags, desc.location.id, count) == ("rw", 3, 1)
        while at < address + size:
            self.allowed.add(at)
            at += self.mapped[at]
        return (self._enter("set_access", f"set_access {address - BASE}+{size}"),)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Code]:
        code = self._enter("unmap", f"unmap {address - BASE}+{size}")
        if code is Code.CUDA_SUCCESS:
            assert self.mapped.pop(address) == size, "only what was mapped as one can be unmapped"
            self.allowed.discard(address)
        return (code,)

    def cuMemRelease(self, handle: int) -> tuple[Code]:
        del self.handles[handle]
        return (self._enter("release", "release"),)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Code]:
        assert not self.mapped and self.reserved.pop(address) == size
        return (self._enter("free", f"free {size}"),)


def cuda_range(cuda: FakeCuda, size: int, chunk: int = 64) -> CudaRange:
    device = torch.device("cuda", 3)
    return CudaRange(device, size, chunk_bytes=chunk, driver=Driver(device, cuda, nullcontext()))


def test_calls_come_in_order() -> None:
    cuda = FakeCuda()
    range_ = cuda_range(cuda, 310)
    assert cuda.log == ["reserve 320"]
    range_.map(150)
    assert range_.mapped_bytes == 160
    assert cuda.allowed == set(cuda.mapped)
    range_.unmap()
    range_.unmap()
    range_.map(64)
    range_.close()
    del range_
    assert cuda.log == [
        "reserve 320",
        *("create 64", "map 0+64", "release"),
        *("create 64", "map 64+64", "release"),
        *("create 32", "map 128+32", "release"),
        "set_access 0+160",
        *("unmap 128+32", "unmap 64+64", "unmap 0+64"),
        *("create 64", "map 0+64", "release", "set_access 0+64"),
        "unmap 0+64",
        "free 320",
    ]
    assert not cuda.handles and not cuda.reserved


@pytest.mark.parametrize("call", ["create", "map", "set_access", "release"])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_failure_in_the_middle_of_a_map_leaves_nothing(call: str, nth: int) -> None:
    cuda = FakeCuda()
    range_ = cuda_range(cuda, 320)
    cuda.fail[call] = 0 if call == "set_access" else nth
    with pytest.raises(RuntimeError, match=r"cuMem\w+ on cuda:3 failed: CUDA_ERROR_INVALID_VALUE"):
        range_.map(192)
    assert not cuda.mapped and not cuda.handles and range_.mapped_bytes == 0
    range_.map(192)
    assert sum(cuda.mapped.values()) == range_.mapped_bytes == 192


def test_out_of_memory_says_the_numbers_and_leaves_nothing() -> None:
    cuda = FakeCuda(total=150)
    range_ = cuda_range(cuda, 320)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"192 bytes of GPU memory were asked for, 150 are free.*cuMemCreate"
    ):
        range_.map(192)
    assert cuda.log[-3:] == ["no room for 64", "unmap 64+64", "unmap 0+64"]
    assert not cuda.mapped and not cuda.handles
    range_.map(128)


def test_a_failing_unmap_keeps_count() -> None:
    cuda = FakeCuda()
    range_ = cuda_range(cuda, 320)
    range_.map(128)
    cuda.fail["unmap"] = 1
    with pytest.raises(RuntimeError, match="cuMemUnmap"):
        range_.unmap()
    assert range_.mapped_bytes == sum(cuda.mapped.values()) == 64
    range_.unmap()
    assert not cuda.mapped


def test_a_lost_range_gives_all_back() -> None:
    cuda = FakeCuda()
    range_ = cuda_range(cuda, 320)
    range_.map(320)
    del range_
    gc.collect()
    assert not cuda.mapped and not cuda.reserved


def test_closing_in_a_broken_context_is_no_error() -> None:
    cuda = FakeCuda()
    range_ = cuda_range(cuda, 64)
    range_.map(64)
    cuda.fail["unmap"] = 0
    range_.close()
    assert any("unmap" in call for call in cuda.log), "it was tried"


def test_sizes_are_rounded_up() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    range_ = cuda_range(FakeCuda(), 1, chunk=17)
    assert (range_.granularity, range_.reserved_bytes) == (GRAIN, GRAIN)
    range_.map(1)
    assert range_.mapped_bytes == GRAIN
    with pytest.raises(AssertionError, match="unmap before"):
        range_.map(1)


def test_without_cuda_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):  # torch may have imported them
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"pip install 'cuda-bindings==\d+\.\*'"):
        make_range(torch.device("cuda", 0), 64)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * HostRange.granularity


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")
def test_the_hosts_pages_come_and_go() -> None:
    size = 64 << 20
    range_ = make_range(CPU, size)
    assert isinstance(range_, HostRange)
    tensor, before = range_.tensor, resident_bytes()
    for _ in range(3):
        range_.map(size)
        tensor.fill_(7)
        assert resident_bytes() - before > 0.9 * size
        range_.unmap()
        assert resident_bytes() - before < 0.1 * size
        assert range_.mapped_bytes == 0
        assert range_.tensor is tensor and int(tensor[:: 1 << 20].sum()) == 0
    range_.close()


def test_where_nothing_can_be_given_back_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_memory.sys, "platform", "darwin")
    range_ = make_range(CPU, 100)
    assert isinstance(range_, FixedRange)
    tensor = range_.tensor
    range_.map(50)
    range_.unmap()
    range_.map(100)
    assert range_.tensor is tensor
    assert range_.mapped_bytes == 100, "the report doesn't claim otherwise"


# How much is mapped

SHAPE = ModelShape(num_layers=2, heads=4, kv_heads=2, head_dim=16, vocab_size=64, max_position_embeddings=256)
BLOCK = 2 * 2 * 2 * 8 * 16 * 4  # bytes of 8 positions in float32


def kv_memory(monkeypatch: pytest.MonkeyPatch, free: int = 1 << 30, max_model_len: int = 64, **config: Any) -> KVMemory:
    monkeypatch.setattr(memory, "device_free_bytes", lambda device: free)
    options = EngineConfig(block_size=8, **{"max_rows": 4, **config})
    return KVMemory(SHAPE, options, max_model_len, torch.float32, CPU)


def test_blocks_are_a_prefix_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = kv_memory(monkeypatch, free=20 * BLOCK)
    assert kv.block_bytes == BLOCK
    assert kv.blocks == 20 and kv.most_blocks == 4 * 8 + 1
    assert kv.tensor.shape == (33, 2, 2, 2, 8, 16) and kv.tensor.is_contiguous()
    assert kv.mapped_bytes == round_up(20 * BLOCK, HostRange.granularity)
    where = kv.tensor.data_ptr()
    for free, blocks in ((10, 10), (1000, 33), (9, 9)):
        kv.sleep()
        assert (kv.mapped_bytes, kv.blocks) == (0, 0)
        monkeypatch.setattr(memory, "device_free_bytes", lambda device, free=free: free * BLOCK)
        assert kv.wake(0) == kv.blocks == blocks
        assert kv.tensor.data_ptr() == where


@pytest.mark.parametrize(
    ("config", "waiting", "free", "spare", "blocks"),
    [
        ({}, 0, 9, 0, 9),  # one sequence of 64 positions, and the scratch block
        ({}, 0, 8, 0, None),
        ({}, 0, 13, 4, 9),
        ({}, 0, 12, 4, None),
        ({"kv_cache_bytes": 20 * BLOCK}, 0, 40, 0, 20),
        ({"kv_cache_bytes": 20 * BLOCK}, 0, 15, 0, 13),  # nine tenths, when not all is free
        ({"kv_cache_bytes": 20 * BLOCK}, 15, 15, 0, 15),  # but what waits is served
        ({"kv_cache_bytes": 20 * BLOCK}, 0, 8, 0, None),
        ({"kv_cache_bytes": 5 * BLOCK}, 0, 5, 0, 5),  # what was enough at the start is enough
        ({"kv_cache_min_bytes": 3 * BLOCK}, 0, 3, 0, 3),
        ({"kv_cache_min_bytes": 3 * BLOCK}, 0, 2, 0, None),
        ({"kv_cache_min_bytes": 3 * BLOCK}, 6, 5, 0, None),
        ({"kv_cache_min_bytes": 20 * BLOCK}, 0, 19, 0, None),
    ],
)
def test_as_much_as_is_free_down_to_the_least(
    monkeypatch: pytest.MonkeyPatch, config: Any, waiting: int, free: int, spare: int, blocks: int | None
) -> None:
    monkeypatch.setattr(HostRange, "granularity", GRAIN)
    kv = kv_memory(monkeypatch, **config)
    kv.sleep()
    monkeypatch.setattr(memory, "device_free_bytes", lambda device: free * BLOCK)
    if blocks is not None:
        assert kv.wake(waiting, spare_bytes=spare * BLOCK) == blocks
        return
    with pytest.raises(torch.OutOfMemoryError) as caught:
        kv.wake(waiting, spare_bytes=spare * BLOCK)
    least = max(waiting, config.get("kv_cache_min_bytes", 9 * BLOCK) // BLOCK)
    assert f"{least * BLOCK} are the least" in str(caught.value)
    assert f"{(free - spare) * BLOCK} are free" in str(caught.value)
    assert (kv.mapped_bytes, kv.blocks) == (0, 0)


@pytest.mark.parametrize(
    ("free", "config", "message"),
    [
        (50, {"kv_cache_bytes": 60 * BLOCK}, "more than the"),
        (1, {}, "two blocks of 8 positions"),
        (10, {"kv_cache_min_bytes": 12 * BLOCK}, "less than kv_cache_min_bytes"),
    ],
)
def test_a_start_without_room_is_said(
    monkeypatch: pytest.MonkeyPatch, free: int, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kv_memory(monkeypatch, free=free * BLOCK, **config)


def test_the_least_is_a_size() -> None:
    for bad in (0, -1):
        with pytest.raises(ValueError, match="kv_cache_min_bytes"):
            EngineConfig(kv_cache_min_bytes=bad)
    with pytest.raises(ValueError, match="kv_cache_min_bytes"):
        EngineConfig(kv_cache_min_bytes=100, kv_cache_bytes=99)


# Own weights

SPECS = [
    (torch.Size([3, 5]), torch.bfloat16),
    (torch.Size([7]), torch.float32),
    (torch.Size([]), torch.int64),
    (torch.Size([256, 4]), torch.float16),
]


def test_own_weights_lie_side_by_side() -> None:
    own = OwnWeights(CPU)
    assert (own.present, own.mapped_bytes, own.missing_bytes) == (True, 0, 0)
    tensors = own.allocate(SPECS)
    assert [(t.shape, t.dtype) for t in tensors] == SPECS
    start = tensors[0].data_ptr()
    assert [t.data_ptr() - start for t in tensors] == [0, 512, 1024, 1536]
    assert all(own.holds(t) for t in tensors) and not own.holds(torch.empty(1))
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [float(t.float().mean()) for t in tensors] == [0.0, 1.0, 2.0, 3.0]


def test_own_weights_go_and_come_with_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnWeights(CPU)
    tensors = own.allocate(SPECS)
    where, held = [t.data_ptr() for t in tensors], own.mapped_bytes
    own.sleep()
    own.sleep()
    assert (own.present, own.mapped_bytes, own.missing_bytes) == (False, 0, held)
    with pytest.raises(KeyError), own.filling():
        assert own.mapped_bytes == held
        raise KeyError
    assert (own.present, own.mapped_bytes) == (False, 0), "half of the weights is of no use"
    monkeypatch.setattr(memory, "device_free_bytes", lambda device: 5)
    with pytest.raises(torch.OutOfMemoryError, match=f"they take {held} bytes, and 5 are free"), own.filling():
        pytest.fail("nothing to fill")
    monkeypatch.undo()
    with own.filling():
        tensors[1].fill_(9.0)
    assert (own.present, own.mapped_bytes, own.missing_bytes) == (True, held, 0)
    assert [t.data_ptr() for t in tensors] == where and tensors[1].tolist() == [9.0] * 7


def test_nothing_of_its_own_takes_nothing() -> None:
    own = OwnWeights(CPU)
    assert own.allocate([]) == []
    own.sleep()
    assert own.present, "there is nothing to be brought back"
    with own.filling():
        pass
