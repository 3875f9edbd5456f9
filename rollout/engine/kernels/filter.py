"""Sampling under top-k, top-p and min-p, in plain PyTorch.

Owns the filters. One sort a row puts every decision in sorted space, so shapes are static and nothing is read on the
host: it runs inside CUDA graphs and on the CPU alike. Refuses to be fast: a run without filters uses `sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.engine.reference import gumbel_noise, scale_logits


def sample_filtered(
    logits: Tensor,
    key0: Tensor,
    key1: Tensor,
    position: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token a row among the candidates that the filters keep.

    logits: [rows, vocab]; key0, key1, position: int32 [rows]; temperature: float32 [rows] (0: greedy); top_k: int32
    [rows] (0: off); top_p: float32 [rows] (1: off); min_p: float32 [rows] (0: off). The filters follow the temperature
    and one another in Hugging Face's order: top-k (ties with the k-th kept), top-p on what top-k left, min-p relative
    to the most probable token. The most probable token always stays.

    Returns token int32 [rows]; logprob float32 [rows] under the FULL scaled distribution; kept_mass float32 [rows],
    the full probability of the candidates (exactly 1 where nothing was dropped). A row with a NaN, a +inf or no finite
    logit gets token 0, logprob NaN and kept_mass NaN.
    """
    scaled, ids = scale_logits(logits, temperature).sort(dim=-1, descending=True, stable=True)  # [rows, vocab]
    vocab = scaled.shape[1]
    normaliser = scaled.logsumexp(-1, keepdim=True)  # [rows, 1]
    full = (scaled - normaliser).exp()

    kth = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab).long() - 1
    keep = scaled >= scaled.gather(1, kth[:, None])
    probability = torch.where(keep, full, 0.0)
    probability = probability / probability.sum(-1, keepdim=True)
    mass_before = probability.cumsum(-1) - probability
    # NOTE: a cumulative sum can round past 1, so 1.0 must be an explicit "off" and not the comparison's luck.
    keep &= (top_p >= 1.0)[:, None] | (mass_before < top_p[:, None])
    keep &= full >= min_p[:, None] * full[:, :1]
    keep[:, 0] = True

    noise = gumbel_noise(key0, key1, position, ids.int(), dtype=scaled.dtype)
    noisy = scaled + torch.where(temperature[:, None] > 0, noise, 0.0)
    choice = torch.where(keep, noisy, float("-inf")).argmax(-1, keepdim=True)  # [rows, 1]
    logprob = (scaled.gather(1, choice) - normaliser)[:, 0]
    token = torch.where(logprob.isnan(), 0, ids.gather(1, choice)[:, 0]).int()
    kept_mass = torch.where(keep, full, 0.0).sum(-1).clamp_max(1.0)
    kept_mass = torch.where(keep.all(-1) & ~logprob.isnan(), 1.0, kept_mass)
    return token, logprob.float(), kept_mass.float()
