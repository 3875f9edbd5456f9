"""Where a GPU puts a kernel's programs, as far as it lets itself be told."""

from __future__ import annotations

from functools import cache
from typing import Any

from rollout.engine.driver import call, cuda_bindings


def keep_apart(kernel: Any) -> None:
    """Has programs of a compiled Triton kernel begin on multiprocessors where no others run. Before a capture.

    The kernel is said to prefer no shared memory. How a multiprocessor's memory is shared out between that and the L1
    cache is only changed while nothing runs there, so such programs wait for an empty one. There their few loads don't
    queue behind the many of others.
    """
    _prefer_no_shared_memory(kernel.function)


@cache
def _prefer_no_shared_memory(function: int) -> None:
    cuda = cuda_bindings("a step of one row needs CUDA's function attributes")
    preference = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    call(cuda, "a kernel", "cuFuncSetAttribute", cuda.CUfunction(function), preference, 0)
