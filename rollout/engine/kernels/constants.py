"""Triton: constants that several kernels bake in."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which has neither inline assembly nor a GPU's stream."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""log2(e): kernels take exponentials and logarithms to base 2, which is what the hardware has."""
