"""Each kernel's contract in plain PyTorch: KV writes, paged attention, keyed sampling.

Owns the meaning of the kernels: the Triton ones are tested against these functions, on float64 inputs too. The CPU
engine runs them for real, so they are vectorised and gather no more of the cache than the longest row needs, which
they learn by reading lengths on the host. Refuses CUDA graphs for that reason.
"""

from __future__ import annotations

import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine import carry_over

_MUL_1 = 0x7FEB352D
_MUL_2 = 0x846CA68B - 2**32  # as int32
_MUL_3 = 0x9E3779B1 - 2**32  # as int32
_GOLDEN = 0x9E3779B9 - 2**32  # as int32


def start_decode(
    token_ids: Tensor,
    carry: Tensor,
    previous_tokens: Tensor,
    token_row: Tensor,
    position: Tensor,
    new_block: Tensor,
    block_table: Tensor,
    row_state: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a decode step does before its model: carry tokens over, enter new blocks, look up what the sampler needs.

    token_ids: int32 [rows], 0 where a token is carried; carry: int32 [rows], index into previous_tokens or -1;
    previous_tokens: int32 [max_rows], what the step before sampled; token_row, position: int32 [rows]; new_block: int32
    [rows], the block that the position begins or -1; block_table: int32 [max_rows + 1, blocks_per_row], written;
    row_state: int32 [fields, max_rows + 1].
    Returns the input ids, int32 [rows], the rows' state, int32 [fields, rows], and the positions of the tokens that
    will be sampled, int32 [rows].
    """
    grows = new_block >= 0
    block_table[token_row[grows].long(), (position[grows] // block_size).long()] = new_block[grows]
    ids = carry_over.apply(token_ids, carry, previous_tokens)
    return ids, row_state.index_select(1, token_row), position + 1


def write_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    token_row: Tensor,
    position: Tensor,
) -> None:
    """Write each token's key and value into its place in the cache.

    key, value: [tokens, kv_heads, head_dim]; k_cache, v_cache: [blocks, kv_heads, block_size, head_dim];
    block_table: int32 [rows, blocks_per_row]; token_row, position: int32 [tokens].
    """
    block_size = k_cache.shape[2]
    blocks = block_table[token_row.long(), (position // block_size).long()].long()  # [tokens]
    offsets = (position % block_size).long()  # [tokens]
    k_cache[blocks, :, offsets] = key.to(k_cache.dtype)
    v_cache[blocks, :, offsets] = value.to(v_cache.dtype)


def paged_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    token_row: Tensor,
    position: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of one query a row over positions 0..position (the last `window` of them if window > 0).

    query: [rows, heads, head_dim]; caches: [blocks, kv_heads, block_size, head_dim]; block_table: int32
    [sequence rows, blocks_per_row]; token_row, position: int32 [rows]. Returns [rows, heads, head_dim], contiguous.
    """
    rows, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    dtype = _compute_dtype(query)
    last = position.long()  # [rows]
    first = (last - window + 1).clamp_min(0) if window else torch.zeros_like(last)
    first_block = first // block_size
    blocks_per_row = int((last // block_size - first_block).max()) + 1
    index = first_block[:, None] + torch.arange(blocks_per_row, device=query.device)  # [rows, blocks_per_row]
    table = block_table[token_row.long()]
    blocks = table.gather(1, index.clamp_max(table.shape[1] - 1)).long()
    blocks.masked_fill_(index > (last // block_size)[:, None], 0)  # entries past a row's end mean nothing

    # Keys and values stay in blocks: joining a row's blocks would copy all of them once more.
    group = heads // kv_heads
    queries = query.reshape(rows, 1, kv_heads, group, head_dim).to(dtype)
    keys = _gather(k_cache, blocks, dtype)  # [rows, blocks_per_row, kv_heads, block_size, head_dim]
    scores = queries @ keys.mT * scaling  # [rows, blocks_per_row, kv_heads, group, block_size]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    where = index[:, :, None] * block_size + torch.arange(block_size, device=query.device)
    seen = (where <= last[:, None, None]) & (where >= first[:, None, None])  # [rows, blocks_per_row, block_size]
    scores.masked_fill_(~seen[:, :, None, None], float("-inf"))
    joined = scores.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, group, -1).softmax(-1)
    weights = joined.reshape(rows, kv_heads, group, blocks_per_row, block_size).permute(0, 3, 1, 2, 4)

    values = _gather(v_cache, blocks, dtype)  # NOTE: overwrites keys
    # What is not seen may be anything, NaN too, and 0 * NaN is NaN. Rows end in different blocks, but none before
    # `whole`, so only the blocks from there on are cleared.
    whole = int((last // block_size - first_block).min())
    values[:, whole:].masked_fill_(~seen[:, whole:, None, :, None], 0.0)
    return (weights @ values).sum(1).reshape(rows, heads, head_dim).to(query.dtype)


def paged_prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_row: Tensor,
    query_start: Tensor,
    position: Tensor,
    *,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    max_query_len: int,
) -> Tensor:
    """Causal attention of ragged chunks of prompts over the cache, which already holds their own keys and values.

    query: [tokens, heads, head_dim]; sequence s owns tokens query_start[s]..query_start[s+1]-1 (int32 [seqs + 1]) of
    row seq_row[s] (int32 [seqs]); token t stands at position[t] (int32 [tokens]). max_query_len bounds a sequence's
    tokens. Returns [tokens, heads, head_dim], contiguous.
    """
    _, heads, head_dim = query.shape
    kv_heads, block_size = k_cache.shape[1:3]
    dtype = _compute_dtype(query)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_start.tolist()
    for row, start, end in zip(seq_row.tolist(), starts, starts[1:], strict=False):
        if start == end:
            continue
        assert end - start <= max_query_len
        at = position[start:end].long()  # [queries]
        low, high = int(at.min()), int(at.max()) + 1
        first_block = max(0, low - window + 1) // block_size if window else 0
        blocks = block_table[row, first_block : (high + block_size - 1) // block_size].long()
        base = first_block * block_size
        keys = k_cache.index_select(0, blocks).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, : high - base]
        values = v_cache.index_select(0, blocks).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, : high - base]
        where = base + torch.arange(high - base, device=query.device)  # [keys]
        seen = where <= at[:, None]  # [queries, keys]
        if window:
            seen &= where > at[:, None] - window
        queries = query[start:end].transpose(0, 1).to(dtype)  # [heads, queries, head_dim]
        if softcap:
            grouped = queries.reshape(kv_heads, heads // kv_heads, end - start, head_dim)
            scores = softcap * torch.tanh(grouped @ keys[:, None].mT.to(dtype) * (scaling / softcap))
            scores.masked_fill_(~seen, float("-inf"))
            result = (scores.softmax(-1) @ values[:, None].to(dtype)).reshape(heads, end - start, head_dim)
        else:
            result = F.scaled_dot_product_attention(
                queries[None],
                keys[None].to(dtype),
                values[None].to(dtype),
                attn_mask=seen,
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )[0]
        out[start:end] = result.transpose(0, 1).to(query.dtype)
    return out


def sample(logits: Tensor, key0: Tensor, key1: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token a row by Gumbel-max under keyed noise, and its logprob under the full scaled distribution.

    logits: [rows, vocab]; key0, key1, position: int32 [rows]; temperature: float32 [rows], 0 meaning greedy (the
    logprob is then taken at temperature 1). Returns token int32 [rows] and logprob float32 [rows]. A row with a NaN,
    a +inf or no finite logit gets token 0 and logprob NaN.
    """
    scaled = scale_logits(logits, temperature)
    noisy = scaled
    if logits.is_cuda or bool((temperature > 0).any()):
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        noise = gumbel_noise(key0, key1, position, ids, dtype=scaled.dtype)
        noisy = scaled + torch.where(temperature[:, None] > 0, noise, 0.0)
    token = noisy.argmax(-1)
    logprob = scaled.gather(1, token[:, None])[:, 0] - scaled.logsumexp(-1)
    return torch.where(logprob.isnan(), 0, token).int(), logprob.float()


def scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over temperature, at 1 where it is 0, in float32 (float64 stays). [rows, vocab]"""
    divisor = torch.where(temperature > 0, temperature, 1.0)
    return logits.to(_compute_dtype(logits)) / divisor[:, None]


def gumbel_noise(
    key0: Tensor, key1: Tensor, position: Tensor, ids: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Gumbel(0, 1) noise that is a pure function of (key0, key1, position, vocabulary id).

    key0, key1, position: int32 [rows]; ids: int32 [vocab] or [rows, n]. Returns [rows, vocab or n] of `dtype`.
    Integer arithmetic wraps modulo 2**32, so every device makes the same bits; only the logarithms differ in rounding.
    """
    first = _mix32(key0 ^ _mix32(position + _GOLDEN))  # [rows]
    second = _mix32(key1 + first)
    # Three multiplications, since noise of ids a fixed distance apart would be seen to be related after two.
    bits = (ids ^ first[:, None]).mul_(_MUL_1)
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(second[:, None])
    bits *= _MUL_2
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _MUL_3
    uniform = (bits.view(torch.uint32).to(torch.float32) + 0.5) * 2.0**-32
    return uniform.to(dtype).neg_().log1p_().neg_().log_().neg_()


def _gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of a cache, [*blocks.shape, kv_heads, block_size, head_dim], in this thread's workspace."""
    # NOTE: on the CPU, cache[blocks] copies element by element (20 times slower), and a fresh tensor of this size is
    # new memory from the kernel each time, whose page faults cost more than the copy. So: one workspace, grown only.
    shape = (blocks.numel(), *cache.shape[1:])
    if cache.is_cuda:
        gathered = cache.index_select(0, blocks.flatten())
    else:
        gathered = _workspace(math.prod(shape), cache.dtype).view(shape)
        torch.index_select(cache, 0, blocks.flatten(), out=gathered)
    return gathered.view(*blocks.shape, *cache.shape[1:]).to(dtype)


_threads = threading.local()


def _workspace(numel: int, dtype: torch.dtype) -> Tensor:
    buffers: dict[torch.dtype, Tensor] = _threads.__dict__.setdefault("buffers", {})
    if dtype not in buffers or buffers[dtype].numel() < numel:
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written outside it
            buffers[dtype] = torch.empty(numel, dtype=dtype)
    return buffers[dtype][:numel]


def _mix32(x: Tensor) -> Tensor:
    """The lowbias32 finaliser on int32 tensors; the masks make arithmetic shifts logical. Writes over its argument."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _MUL_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _MUL_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
