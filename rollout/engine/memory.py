"""The KV cache's memory: how many blocks fit, and the one tensor that holds them.

The cache is block-major, [blocks, layers, 2, kv heads, block size, head dim], so that any number of blocks is a prefix
of it. It refuses to say who uses which block: that is `rollout.engine.kv_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.models.hf import ModelShape

CPU_CACHE_BYTES = 1 << 30
"""What a cache on a CPU may take unless told otherwise."""


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return shape.num_layers * 2 * shape.kv_heads * block_size * shape.head_dim * dtype.itemsize


def count_blocks(shape: ModelShape, config: EngineConfig, max_model_len: int, dtype: torch.dtype, free: int) -> int:
    """Blocks that the cache gets, the scratch block included.

    Args:
        shape: of the model.
        config: how much to take.
        max_model_len: longest sequence, in tokens. More blocks than every row at that length are of no use.
        dtype: of keys and values.
        free: bytes of device memory that can be had, without a share for anything else.

    Raises:
        ValueError: not even one sequence's block fits.
    """
    block_bytes = bytes_per_block(shape, config.block_size, dtype)
    wanted = config.kv_cache_bytes if config.kv_cache_bytes is not None else int(free * config.kv_cache_fraction)
    if wanted > free:
        raise ValueError(
            f"kv_cache_bytes={wanted} is more than the {free} bytes of device memory that are free: lower it, or free "
            "memory before the engine is made"
        )
    useful = config.max_rows * -(-max_model_len // config.block_size) + 1
    blocks = min(wanted // block_bytes, useful)
    if blocks < 2:
        raise ValueError(
            f"the KV cache may take {wanted} bytes, but two blocks of {config.block_size} positions take "
            f"{2 * block_bytes}: raise EngineConfig.kv_cache_fraction or kv_cache_bytes, or lower block_size"
        )
    return blocks


def free_bytes(device: torch.device, config: EngineConfig) -> int:
    """Bytes that a cache on `device` may choose from."""
    if device.type != "cuda":
        limit = CPU_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
        return int(limit / config.kv_cache_fraction) if config.kv_cache_bytes is None else limit
    free, _ = torch.cuda.mem_get_info(device)
    # what PyTorch's allocator holds and nobody uses can be had as well
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allocate(shape: ModelShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The cache, [blocks, layers, 2, kv heads, block size, head dim]."""
    size = (blocks, shape.num_layers, 2, shape.kv_heads, block_size, shape.head_dim)
    return torch.empty(size, dtype=dtype, device=device)
