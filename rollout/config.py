"""`EngineConfig`: everything that is fixed when the engine is made, and nothing that is per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and switches of one engine, fixed for its life.

    Raises:
        ValueError: a value is out of its range.
    """

    max_rows: int = 256
    """Sequences that run at once."""
    max_model_len: int | None = None
    """Longest prompt plus completion, in tokens. None: what the model's positions allow."""
    block_size: int = 64
    """Positions in a block of the KV cache: a power of two from 8 to 256."""
    max_prefill_tokens: int = 8192
    """Prompt tokens computed in one step. Longer prompts go in chunks."""
    kv_cache_fraction: float = 0.5
    """Share of the GPU memory that is free when the engine is made, and when it wakes, to hold KV."""
    kv_cache_bytes: int | None = None
    """Bytes of KV cache; overrides the share. On a CPU, None means 1 GiB, or less where that holds every row."""
    kv_cache_min_bytes: int | None = None
    """Bytes of KV cache that `wake` has to get, or it raises. None: one sequence of `max_model_len`, or what there was
    at the start if that was less. What the longest waiting request needs is always asked for."""
    overlap: bool = True
    """Two slots, so that the host prepares a step while the device runs the one before. False: one slot, in turns."""
    use_graphs: bool | None = None
    """Replay decode steps, and small prefill steps of small models, as CUDA graphs. None: where there is CUDA."""
    fused_decoder: bool = True
    """Run dense Llama-like models by fused kernels. False: by the Hugging Face module's own forward, as all others."""
    dtype: torch.dtype | None = None
    """What the engine computes in. None: the learner's, but bfloat16 for a float32 learner on CUDA. A head that the
    learner alone keeps in float32 stays so."""
    eos_token_ids: tuple[int, ...] | None = None
    """Ids that end a completion. None: those of the model's generation config."""

    def __post_init__(self) -> None:
        power_of_two = self.block_size & (self.block_size - 1) == 0
        checks = (
            (self.max_rows >= 1, f"max_rows must be at least 1, not {self.max_rows}"),
            (
                power_of_two and 8 <= self.block_size <= 256,
                f"block_size must be a power of two from 8 to 256, not {self.block_size}",
            ),
            (self.max_prefill_tokens >= 1, f"max_prefill_tokens must be at least 1, not {self.max_prefill_tokens}"),
            (
                0.0 < self.kv_cache_fraction <= 1.0,
                f"kv_cache_fraction must lie in (0, 1], not {self.kv_cache_fraction}",
            ),
            (
                self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
                f"kv_cache_bytes must be positive, not {self.kv_cache_bytes}",
            ),
            (
                self.kv_cache_min_bytes is None or 0 < self.kv_cache_min_bytes <= (self.kv_cache_bytes or 1 << 63),
                f"kv_cache_min_bytes must be positive and at most kv_cache_bytes, not {self.kv_cache_min_bytes}",
            ),
            (
                self.max_model_len is None or self.max_model_len >= 2,
                f"max_model_len must be at least 2, not {self.max_model_len}",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    @property
    def num_slots(self) -> int:
        """Sets of input and output buffers: two to overlap host and device, one to take turns."""
        return 2 if self.overlap else 1

    @property
    def scratch_row(self) -> int:
        """The row that pads a batch up to its graph's size. Its block is never read for a real sequence."""
        return self.max_rows
