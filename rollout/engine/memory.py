"""What lies in the engine's ranges of addresses, and how much of them is mapped: `KVMemory` and `OwnWeights`.

The cache is block-major, [blocks, layers, 2, kv heads, block size, head dim], so that any number of blocks is a prefix
of it, and of its range. Its tensor has the shape of the most blocks that could ever be of use; only the first
`KVMemory.blocks` are there, and only the allocator has to know. It refuses to say who uses which block: that is
`rollout.engine.kv_cache`. How memory comes and goes under an address is `rollout.engine.virtual_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from rollout.config import EngineConfig
from rollout.engine.models.hf import ModelShape
from rollout.engine.models.learner import weights
from rollout.engine.virtual_memory import MemoryRange, make_range, round_up

CPU_CACHE_BYTES = 1 << 30
"""What a cache on a CPU may take unless told otherwise."""
SHARE_WHEN_SHORT = 0.9
"""Of the free memory, where `kv_cache_bytes` is more than that: the rest is for a prefill's activations."""
ALIGNMENT = 512
"""Bytes that a weight's address is a multiple of, as with PyTorch's own allocator."""


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return shape.num_layers * 2 * shape.kv_heads * block_size * shape.head_dim * dtype.itemsize


def device_free_bytes(device: torch.device) -> int:
    """Memory that nobody holds on `device`. On a CPU: what Linux calls available; elsewhere a petabyte, unasked."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 1 << 50


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on `device` once PyTorch has given back what it only keeps at hand."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return device_free_bytes(device)


def used_bytes(device: torch.device) -> int:
    """Memory of a GPU that somebody holds, PyTorch's reserve not counted. 0 on other devices."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


class KVMemory:
    """The KV cache's memory: made once, then given back and taken again, as much as is free.

    Args:
        shape: of the model.
        config: how much to take.
        max_model_len: longest sequence, in tokens. More blocks than every row at that length are of no use.
        dtype: of keys and values.
        device: where they lie.

    Raises:
        ValueError: more is asked for than is free, or not even one sequence's block fits.
    """

    def __init__(
        self, shape: ModelShape, config: EngineConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.config = config
        self.block_bytes = bytes_per_block(shape, config.block_size, dtype)
        free = free_bytes(device)
        row_blocks = -(-max_model_len // config.block_size)
        self.most_blocks = min(config.max_rows * row_blocks + 1, self._limit() // self.block_bytes)
        """Blocks that could ever be of use, the scratch block included."""
        self.blocks = min(self._asked(free) // self.block_bytes, self.most_blocks)
        """Blocks that are there, the scratch block included."""
        self._check_first(free)
        self._first_blocks = self.blocks
        least = row_blocks + 1
        if config.kv_cache_min_bytes is not None:
            least = -(-config.kv_cache_min_bytes // self.block_bytes)
        # what could run at the start can always run again
        self.least_blocks = max(2, min(least, self.blocks))
        """Blocks that `wake` has to get, whoever waits."""
        self._range: MemoryRange = make_range(device, self.most_blocks * self.block_bytes)
        self._range.map(self.blocks * self.block_bytes)
        size = (self.most_blocks, shape.num_layers, 2, shape.kv_heads, config.block_size, shape.head_dim)
        whole = self._range.tensor[: self.most_blocks * self.block_bytes]
        self.tensor: Tensor = whole.view(dtype).view(size)
        """The cache, [most blocks, layers, 2, kv heads, block size, head dim]; its first `blocks` may be touched."""

    def _limit(self) -> int:
        """Bytes beyond which no range need reach."""
        if self.config.kv_cache_bytes is not None:
            return self.config.kv_cache_bytes
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return CPU_CACHE_BYTES

    def _asked(self, free: int) -> int:
        """Bytes that the configuration asks for when `free` are free."""
        if self.config.kv_cache_bytes is not None:
            return self.config.kv_cache_bytes
        return int(free * self.config.kv_cache_fraction) if self.device.type == "cuda" else min(CPU_CACHE_BYTES, free)

    def _check_first(self, free: int) -> None:
        asked = self._asked(free)
        if asked > free:
            raise ValueError(
                f"kv_cache_bytes={asked} is more than the {free} bytes of device memory that are free: lower it, or "
                "free memory before the engine is made"
            )
        if self.blocks < 2:
            raise ValueError(
                f"the KV cache may take {asked} bytes, but two blocks of {self.config.block_size} positions take "
                f"{2 * self.block_bytes}: raise EngineConfig.kv_cache_fraction or kv_cache_bytes, or lower block_size"
            )
        least = self.config.kv_cache_min_bytes or 0
        if self.blocks * self.block_bytes < least and self.blocks < self.most_blocks:
            raise ValueError(
                f"the KV cache may take {asked} bytes of the {free} that are free, less than kv_cache_min_bytes={least}"
                ": raise EngineConfig.kv_cache_fraction or free memory before the engine is made"
            )

    @property
    def mapped_bytes(self) -> int:
        """Memory that the cache holds now."""
        return self._range.mapped_bytes

    @property
    def bytes(self) -> Tensor:
        """The memory that is mapped, uint8 [mapped bytes]. Who writes to it overwrites the cache."""
        return self._range.tensor[: self._range.mapped_bytes]

    def sleep(self) -> None:
        """Gives all memory back. Nothing that reads or writes the cache may be queued."""
        self._range.unmap()
        self.blocks = 0

    def wake(self, waiting_blocks: int, *, spare_bytes: int = 0) -> int:
        """Takes what the configuration asks for of what is free now, and no less than at the start if that is free;
        else less, down to a minimum.

        Args:
            waiting_blocks: what those who wait need at the least, the scratch block included.
            spare_bytes: to be left free.

        Returns:
            Blocks that are there now, the scratch block included.

        Raises:
            torch.OutOfMemoryError: the minimum isn't free. Nothing has changed.
        """
        least = min(max(self.least_blocks, waiting_blocks), self.most_blocks)
        # NOTE: what PyTorch keeps at hand is the learner's activations, as a rule. Taking them from it costs more than
        # mapping does, now and when the learner allocates them anew: so only if there is no other way.
        free = max(0, device_free_bytes(self.device) - spare_bytes)
        blocks = min(max(self._asked(free) // self.block_bytes, self._first_blocks, least), self.most_blocks)
        if self._size(blocks) <= free:
            return self._take(blocks)
        free = max(0, free_bytes(self.device) - spare_bytes)
        asked = self._asked(free)
        offered = asked if asked <= free else int(free * SHARE_WHEN_SHORT)
        blocks = min(max(offered // self.block_bytes, least), self.most_blocks)
        if self._size(blocks) > free:
            raise torch.OutOfMemoryError(
                f"the KV cache can't be mapped: {asked} bytes are asked for, {least * self.block_bytes} are the least "
                f"that the engine can work with, and {free} are free"
                f"{f' beside {spare_bytes} for weights' if spare_bytes else ''}. The engine stays asleep: free memory "
                "and wake it again (the least is EngineConfig.kv_cache_min_bytes, or one sequence of max_model_len, "
                "and what the longest waiting request needs)"
            )
        return self._take(blocks)

    def _take(self, blocks: int) -> int:
        self._range.map(blocks * self.block_bytes)
        self.blocks = blocks
        return blocks

    def _size(self, blocks: int) -> int:
        """Memory that so many blocks take, in bytes."""
        return round_up(blocks * self.block_bytes, self._range.granularity)

    def close(self) -> None:
        """Gives the memory back for good."""
        self._range.close()
        self.blocks = 0


class OwnWeights:
    """Memory of the weights that the engine doesn't share with the learner, all in one range."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.present = True
        """Whether the weights are there: False from `sleep` until an exchange has filled them again."""
        self._range: MemoryRange | None = None

    def allocate(self, specs: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Tensors of these shapes and dtypes, of undefined contents, side by side in the order given. Called once."""
        assert self._range is None, "the engine's weights are laid out once"
        sizes = [round_up(prod(shape) * dtype.itemsize, ALIGNMENT) for shape, dtype in specs]
        if not sum(sizes):
            return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in specs]
        self._range = make_range(self.device, sum(sizes))
        self._range.map(sum(sizes))
        tensors, start = [], 0
        for (shape, dtype), size in zip(specs, sizes, strict=True):
            end = start + prod(shape) * dtype.itemsize
            tensors.append(self._range.tensor[start:end].view(dtype).view(shape))
            start += size
        return tensors

    @property
    def mapped_bytes(self) -> int:
        """Memory that they hold now."""
        return 0 if self._range is None else self._range.mapped_bytes

    @property
    def missing_bytes(self) -> int:
        """Memory that the next exchange will take."""
        return 0 if self._range is None or self.present else self._range.reserved_bytes

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies here."""
        if self._range is None:
            return False
        start = self._range.tensor.data_ptr()
        return start <= tensor.data_ptr() < start + self._range.reserved_bytes

    def sleep(self) -> None:
        """Gives the memory back, and the weights up. Nothing that reads them may be queued."""
        if self._range is not None and self.present:
            self._range.unmap()
            self.present = False

    @contextmanager
    def filling(self) -> Iterator[None]:
        """For the time of an exchange: takes the memory again if it was given back, and keeps it if all goes well.

        Raises:
            torch.OutOfMemoryError: it isn't free. Nothing has changed.
        """
        if self.present:
            yield
            return
        assert self._range is not None
        needed = self._range.reserved_bytes
        if needed > device_free_bytes(self.device) and needed > (free := free_bytes(self.device)):
            raise torch.OutOfMemoryError(
                f"the engine's own weights can't be mapped: they take {needed} bytes, and {free} are free. "
                "Free memory and exchange again; before wake(), the KV cache takes none"
            )
        self._range.map(needed)
        try:
            yield
        except BaseException:
            self._range.unmap()  # half of the weights is of no use
            raise
        self.present = True

    def close(self) -> None:
        """Gives the memory back for good."""
        if self._range is not None:
            self._range.close()


def weight_bytes(module: nn.Module, own: OwnWeights) -> tuple[int, int]:
    """Bytes of the module's weights that are the engine's own, and of those that it shares with the learner."""
    shared_names = module.__dict__.get("_rollout_origins", {})
    own_bytes, shared_bytes = own.mapped_bytes, 0
    for name, tensor in weights(module).items():
        if name in shared_names:
            shared_bytes += tensor.nbytes
        elif not own.holds(tensor):  # the learner has moved away from it, and left it to the engine
            own_bytes += tensor.nbytes
    return own_bytes, shared_bytes
