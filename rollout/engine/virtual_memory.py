"""Ranges of addresses whose memory comes and goes, while the addresses stay: what sleep and wake stand on.

A range is reserved once, for the most that could ever be useful, and costs nothing but addresses. `map` puts memory
under its beginning, `unmap` gives all of it back. Its tensor covers the whole range and lives as long as the range, so
whatever was bound to an address (a captured graph, a parameter) stays valid; only the mapped beginning may be touched.

- `CudaRange`: CUDA's virtual memory management, through cuda-bindings.
- `HostRange`: an anonymous mapping of the host's, whose pages `madvise` gives back. It reads as zeros when mapped anew.
- `FixedRange`: where there is neither (macOS, Windows, other devices). It keeps its memory and gives nothing back.

How much to map, and what lies where, is `rollout.engine.memory`'s business.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from rollout.engine.driver import Driver

CHUNK_BYTES = 1 << 30
"""Memory mapped at once: 40 GiB in chunks of 1 GiB take 5 ms, in chunks of 256 MiB several times that."""


class MemoryRange(Protocol):
    """What the three have in common."""

    @property
    def granularity(self) -> int:
        """What sizes are rounded up to, in bytes."""

    @property
    def reserved_bytes(self) -> int:
        """Size of the range."""

    @property
    def mapped_bytes(self) -> int:
        """Memory that it holds now."""

    @property
    def tensor(self) -> Tensor:
        """The whole range, uint8 [reserved_bytes], always the same tensor. First asked for when memory is mapped."""

    def map(self, size: int) -> None:
        """Puts memory under the first `size` bytes, of undefined contents. Nothing may be mapped yet.

        Raises:
            torch.OutOfMemoryError: there isn't as much. Nothing is mapped then.
        """

    def unmap(self) -> None:
        """Gives all memory back, and the contents up. The caller sees to it that no work on it is queued."""

    def close(self) -> None:
        """Gives the memory back for good. The addresses go when the last tensor does."""


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that isn't below `size`."""
    return -(-size // multiple) * multiple


class _Reservation:
    """Addresses and the chunks mapped in them. PyTorch's tensor holds it, so it goes with the last tensor."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.address = driver.reserve(size)
        self.chunks: list[int] = []  # sizes, from the beginning on
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        # At the process's end the driver takes everything back by itself, and may be gone before us.
        weakref.finalize(self, _let_go, driver, self.address, size, self.chunks).atexit = False


def _let_go(driver: Driver, address: int, size: int, chunks: list[int]) -> None:
    # The garbage collector calls when it likes. Waiting for the device would break a capture off; addresses may leak.
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    # A context that a kernel has broken refuses every call, and nothing is left to be saved then.
    with suppress(RuntimeError), driver.context():
        _unmap_chunks(driver, address, chunks)
        driver.free(address, size)


def _unmap_chunks(driver: Driver, address: int, chunks: list[int]) -> None:
    while chunks:
        driver.unmap(address + sum(chunks[:-1]), chunks[-1])
        chunks.pop()


class CudaRange:
    """A range of a GPU's addresses, mapped in chunks. See `MemoryRange`.

    Args:
        device: the GPU, with its index.
        size: bytes, rounded up to the granularity.
        chunk_bytes: size of a chunk; the last one may be smaller.
        driver: what to call; None: CUDA.

    Raises:
        RuntimeError: cuda-bindings isn't installed, or the device has no virtual memory management.
    """

    def __init__(
        self, device: torch.device, size: int, *, chunk_bytes: int = CHUNK_BYTES, driver: Driver | None = None
    ) -> None:
        self._driver = driver or Driver(device)
        self._tensor: Tensor | None = None
        with self._driver.context():
            self.granularity = self._driver.granularity()
            self.reserved_bytes = round_up(size, self.granularity)
            self._chunk_bytes = round_up(chunk_bytes, self.granularity)
            self._reservation = _Reservation(self._driver, self.reserved_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Memory that it holds now."""
        return sum(self._reservation.chunks)

    @property
    def tensor(self) -> Tensor:
        """The whole range, uint8 [reserved_bytes]."""
        if self._tensor is None:
            # NOTE: PyTorch asks the driver which device the address is on, and only mapped ones are on any.
            assert self.mapped_bytes, "map before the tensor is made"
            with self._driver.context():
                self._tensor = torch.as_tensor(self._reservation, device=self._driver.device)
            assert self._tensor.data_ptr() == self._reservation.address, "PyTorch has copied the range"
        return self._tensor

    def map(self, size: int) -> None:
        """Puts memory under the first `size` bytes."""
        driver, address, chunks = self._driver, self._reservation.address, self._reservation.chunks
        size = round_up(size, self.granularity)
        assert not chunks, "unmap before mapping anew"
        assert 0 < size <= self.reserved_bytes
        with driver.context():
            try:
                while (mapped := sum(chunks)) < size:
                    self._map_chunk(address + mapped, min(self._chunk_bytes, size - mapped))
                driver.allow(address, size)
            except BaseException as error:
                _unmap_chunks(driver, address, chunks)
                if isinstance(error, torch.OutOfMemoryError):
                    raise torch.OutOfMemoryError(
                        f"{size} bytes of GPU memory were asked for, {driver.free_bytes()} are free: {error}"
                    ) from error
                raise

    def _map_chunk(self, address: int, size: int) -> None:
        handle = self._driver.create(size)
        try:
            self._driver.map(address, size, handle)
            self._reservation.chunks.append(size)
        finally:
            self._driver.release(handle)  # the mapping alone holds the memory from here on

    def unmap(self) -> None:
        """Gives all memory back."""
        with self._driver.context():
            _unmap_chunks(self._driver, self._reservation.address, self._reservation.chunks)

    def close(self) -> None:
        """Gives the memory back for good; a broken context is no error here."""
        self._tensor = None
        with suppress(RuntimeError):
            self.unmap()


class HostRange:
    """A range of the host's addresses, whose pages come when they are touched. See `MemoryRange`. Linux only."""

    granularity = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self.reserved_bytes = round_up(size, self.granularity)
        self.mapped_bytes = 0
        # Private: pages of a shared mapping would stay in the page cache, whatever madvise says.
        self._memory = mmap.mmap(-1, self.reserved_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def map(self, size: int) -> None:
        """Counts the first `size` bytes as mapped: the system brings pages by itself."""
        assert not self.mapped_bytes, "unmap before mapping anew"
        size = round_up(size, self.granularity)
        assert 0 < size <= self.reserved_bytes
        self.mapped_bytes = size

    def unmap(self) -> None:
        """Gives all pages back."""
        if self.mapped_bytes:
            self._memory.madvise(mmap.MADV_DONTNEED, 0, self.mapped_bytes)
        self.mapped_bytes = 0

    def close(self) -> None:
        """Gives all pages back."""
        self.unmap()


class FixedRange:
    """Plain memory of PyTorch's, taken at once and held: `unmap` gives nothing back. See `MemoryRange`."""

    granularity = 1

    def __init__(self, device: torch.device, size: int) -> None:
        self.reserved_bytes = self.mapped_bytes = size
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)

    def map(self, size: int) -> None:
        """It is there already."""
        assert 0 < size <= self.reserved_bytes

    def unmap(self) -> None:
        """It stays."""

    def close(self) -> None:
        """It goes with its last tensor."""
        self.tensor = self.tensor[:0]
        self.mapped_bytes = 0


def make_range(device: torch.device, size: int) -> MemoryRange:
    """A range of at least `size` bytes on `device`, with nothing mapped.

    Raises:
        RuntimeError: the device is a GPU, and cuda-bindings isn't installed.
    """
    if device.type == "cuda":
        return CudaRange(device, size)
    if device.type == "cpu" and sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED"):
        return HostRange(size)
    return FixedRange(device, size)
