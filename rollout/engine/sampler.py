"""The sampler: from logits and a row's parameters to a token, its logprob and the kept mass, inside the graph.

It reads what the device keeps of each row and writes a slot's outputs; the arithmetic is in `rollout.engine.kernels`.
The logprob is that of the sampled token under the full temperature-scaled distribution, which is what trainers
recompute; where a filter narrows the choice, the mass it kept goes with it, for it biases importance ratios.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.engine import kernels


def sample_into(out: Tensor, logits: Tensor, state: Tensor, position: Tensor, *, filtered: bool) -> None:
    """Samples one token a row.

    Args:
        out: int32 [3, rows], written: token id, logprob and kept mass, the latter two as the bits of a float32.
        logits: [rows, vocabulary].
        state: int32 [fields, rows], the rows' parameters in the order of `ROW_STATE_FIELDS`.
        position: int32 [rows], where the sampled token will stand: it keys the random numbers.
        filtered: whether top-k, top-p and min-p are looked at.
    """
    temperature, key0, key1, top_k, top_p, min_p = state.unbind(0)
    floats = out.view(torch.float32)
    if filtered:
        token, logprob, kept_mass = kernels.sample_filtered(
            logits,
            key0,
            key1,
            position,
            temperature.view(torch.float32),
            top_k,
            top_p.view(torch.float32),
            min_p.view(torch.float32),
        )
        out[0].copy_(token)
        floats[1].copy_(logprob)
        floats[2].copy_(kept_mass)
    else:
        kernels.sample(logits, key0, key1, position, temperature.view(torch.float32), out=(out[0], floats[1]))
