"""CUDA's driver, through cuda-bindings, for what PyTorch has no call for. Every return code is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def cuda_bindings(need: str) -> Any:
    """`cuda.bindings.driver`.

    Raises:
        RuntimeError: it isn't installed, and there is `need`.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        major = (torch.version.cuda or "13").partition(".")[0]
        raise RuntimeError(
            f"{need} through cuda-bindings, which can't be imported: pip install 'cuda-bindings=={major}.*'"
        ) from error
    return driver


def call(cuda: Any, where: str, name: str, *arguments: Any) -> Any:
    """Calls the driver. Returns its values: none, one, or a tuple.

    Args:
        cuda: `cuda_bindings`, or what stands in for them.
        where: what the call is for, named if it fails.
        name: of the function.
        arguments: of the call.

    Raises:
        torch.OutOfMemoryError: there isn't enough memory.
        RuntimeError: it failed otherwise.
    """
    code, *values = getattr(cuda, name)(*arguments)
    if code != cuda.CUresult.CUDA_SUCCESS:
        out_of_memory = code == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        kind = torch.OutOfMemoryError if out_of_memory else RuntimeError
        raise kind(f"CUDA's {name} on {where} failed: {getattr(code, 'name', code)}")
    return values[0] if len(values) == 1 else tuple(values)


class Driver:
    """The calls that a range of virtual memory on one device needs.

    Args:
        device: a CUDA device, with its index.
        bindings: `cuda.bindings.driver`, or what stands in for it.
        context: makes the device's primary context current; None: PyTorch does.

    Raises:
        RuntimeError: cuda-bindings isn't installed.
    """

    def __init__(
        self, device: torch.device, bindings: Any = None, context: AbstractContextManager[Any] | None = None
    ) -> None:
        self.device = device
        self._cuda = bindings or cuda_bindings("the KV cache needs CUDA's virtual memory")
        self._context = context
        with self.context():
            self._device = self._call("cuDeviceGet", device.index)
        where = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = self._cuda.CUmemAllocationProp()
        self._properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = where
        self._properties.location.id = int(self._device)
        self._access = self._cuda.CUmemAccessDesc()
        self._access.location.type = where
        self._access.location.id = int(self._device)
        self._access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    @contextmanager
    def context(self) -> Iterator[None]:
        """The device's context is current, and the device idle: nothing may use memory whose mapping changes."""
        if self._context is not None:
            with self._context:
                yield
            return
        torch.cuda.init()
        with torch.cuda.device(self.device):
            # NOTE: a thread that hasn't used CUDA yet has no context. The runtime makes the primary one current in its
            # first call that needs one, which choosing a device needn't be.
            torch.cuda.synchronize(self.device)
            yield

    def granularity(self) -> int:
        """Bytes that sizes and offsets are multiples of."""
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties, option))

    def free_bytes(self) -> int:
        """Memory that is free on the device."""
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def reserve(self, size: int) -> int:
        """Reserves a range of addresses. Returns its beginning."""
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free(self, address: int, size: int) -> None:
        """Gives a range of addresses up. Nothing may be mapped in it."""
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Any:
        """Takes memory, without an address yet. Returns its handle."""
        return self._call("cuMemCreate", size, self._properties, 0)

    def map(self, address: int, size: int, handle: Any) -> None:
        """Puts memory under an address."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int) -> None:
        """Lets the device read and write what is mapped there."""
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """Takes the memory of one `map` from its address."""
        self._call("cuMemUnmap", address, size)

    def release(self, handle: Any) -> None:
        """Lets go of a handle. What is mapped by it stays until it is unmapped."""
        self._call("cuMemRelease", handle)

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._cuda, str(self.device), name, *arguments)
