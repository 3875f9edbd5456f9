"""What a step must read and compute, from a model's sizes: the share of memory bandwidth used, and the FLOP share.

Beside the idle share they say whether a busy GPU is a fast one. Pure arithmetic on numbers that are handed in: refuses
to read models, to count kernels and to measure bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

PEAKS = {  # part of the device's name: (bytes a second, dense bfloat16 operations a second), from data sheets
    "GH200 144G": (4.9e12, 989e12),
    "GH200": (4.0e12, 989e12),
    "H200": (4.8e12, 989e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100 80GB": (1.935e12, 312e12),
    "A100": (1.555e12, 312e12),
    "L40S": (0.864e12, 362e12),
}


def peak(device_name: str) -> tuple[float, float]:
    """A GPU's bandwidth and bfloat16 operations a second, as its maker gives them; (0, 0) for one not known here."""
    return next((figures for part, figures in PEAKS.items() if part in device_name), (0.0, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The sizes of a dense decoder that decide what a step costs."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    matmul_params: int
    """Weights a token is multiplied by: all but the input embedding, of which it takes a row. A tied head counts."""
    dtype_bytes: int = 2
    """Bytes of a weight."""
    wider_bytes: int = 0
    """Bytes of weights kept in a wider dtype (a float32 head), beyond `dtype_bytes` each."""
    kv_dtype_bytes: int = 2
    """Bytes of a number in the KV cache."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that each step reads."""
        return self.matmul_params * self.dtype_bytes + self.wider_bytes

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values at one position of one row, over all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes

    def decode_bytes(self, steps: int, positions: int) -> int:
        """Bytes that decode steps must read: the weights once a step, and the KV of every position attended to.

        Args:
            steps: decode steps.
            positions: KV positions that rows attended to, summed over rows and steps.
        """
        return steps * self.weight_bytes + positions * self.kv_bytes_per_position

    def flops(self, tokens: int, positions: int) -> int:
        """Operations for `tokens` that attended to `positions` in all: 2 a weight and token, 4 a head's number and
        position (a product with the key, one with the value, each a multiplication and an addition)."""
        return 2 * self.matmul_params * tokens + 4 * self.num_layers * self.heads * self.head_dim * positions


def decode_positions(prompt_tokens: int, new_tokens: int) -> int:
    """KV positions that a completion's decode steps attend to, in all.

    The prompt's last step gives the first token, so there is one decode step fewer than tokens; the i-th attends to the
    prompt and i tokens.
    """
    steps = max(0, new_tokens - 1)
    return steps * prompt_tokens + steps * (steps + 1) // 2


def phase_positions(lengths: Iterable[tuple[int, int]]) -> int:
    """`decode_positions` of every (prompt, completion), added up."""
    return sum(decode_positions(prompt, new) for prompt, new in lengths)


def bandwidth_share(read_bytes: float, seconds: float, bytes_s: float) -> float:
    """Share of the memory's bandwidth (MBU): bytes to read / (seconds x bytes a second). NaN for no time."""
    return _share(read_bytes, seconds * bytes_s)


def flop_share(flops: float, seconds: float, flops_s: float) -> float:
    """Share of the arithmetic peak (MFU): operations / (seconds x operations a second). NaN for no time."""
    return _share(flops, seconds * flops_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
