"""How a model is run: token ids in, logits out. `ModuleForward` calls the Hugging Face module, whatever it is.

`rollout.engine.models.fused.FusedDecoder` is the other one. Both have the same signature, and `choose` takes the fused
one where the model is of its kind and gives the module's own numbers.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollout.engine.attention import PagedStep
from rollout.engine.models.fused import FusedDecoder, obstacle

# ‖fused - module‖ / ‖module‖ of a probe's logits: rounding moves them far less, another architecture far more
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}


class Forward(Protocol):
    """A forward pass over a step's tokens."""

    def __call__(self, token_ids: Tensor, step: PagedStep, last: Tensor | None) -> Tensor:
        """Logits, [rows, vocabulary]: of every token, or of those at `last` (int64 [rows])."""


class ModuleForward:
    """The Hugging Face module's own forward, with paged attention."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, token_ids: Tensor, step: PagedStep, last: Tensor | None) -> Tensor:
        """Logits of every token, or of those at `last`."""
        options: dict[str, Any] = {} if last is None else {"logits_to_keep": last}
        with torch.autocast(token_ids.device.type, enabled=False):
            output = self.module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=step.position.unsqueeze(0),
                use_cache=False,
                paged=step,
                **options,
            )
        logits: Tensor = output.logits[0]
        return logits


def _masks_windows(module: nn.Module) -> bool:
    """Whether its class makes masks of sliding windows at all; a config may hold a window that nobody reads."""
    return "create_sliding_window_causal_mask" in inspect.getsource(sys.modules[type(module).__module__])


@torch.no_grad()
def choose(
    module: nn.Module, *, num_layers: int, max_positions: int, fused: bool, probe: Callable[[], PagedStep]
) -> Forward:
    """Checks by running two tokens that the model can be run, and takes the quicker way to do it.

    Args:
        module: the engine's Hugging Face module.
        num_layers: its layers.
        max_positions: longest sequence, in tokens.
        fused: whether the fused decoder may be taken.
        probe: makes a prefill step of two tokens whose keys and values nobody will read.

    Raises:
        ValueError: not every layer came through paged attention, once and without a mask, or with its window, or the
            module computes more logits than asked for.
    """
    forward = ModuleForward(module)
    step = probe()
    device = step.kv.device
    token_ids = torch.tensor([1, 2], dtype=torch.int32, device=device)
    last = torch.tensor([1], device=device)
    expected = forward(token_ids, step, last)
    missing = sorted(set(range(num_layers)) - step.windows.keys())
    if missing:
        raise ValueError(
            f"layers {missing} of {type(module).__name__} have no attention that goes through transformers' "
            "AttentionInterface (state-space, linear or custom attention?): rollout can't run this model"
        )
    config: Any = module.config
    window, by_layer = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    passed_on = by_layer or any(step.windows.values())
    if window and window < max_positions and not passed_on and _masks_windows(module):
        raise ValueError(
            f"{type(module).__name__} has a sliding window of {window} in its mask alone, which rollout doesn't run: "
            "set config.sliding_window to None, or max_model_len to no more than the window"
        )
    if expected.shape[0] != 1:
        raise ValueError(f"{type(module).__name__} ignores logits_to_keep: rollout can't run this model")
    if not fused or obstacle(module) is not None:
        return forward
    decoder = FusedDecoder(module, max_positions)
    difference = (decoder(token_ids, probe(), last).float() - expected.float()).norm() / expected.float().norm()
    if bool(difference > _TOLERANCE[step.kv.dtype]):  # the logits may be wider than what they come from
        warnings.warn(
            f"the fused decoder gives other logits than {type(module).__name__} (by {float(difference):.3g} of their "
            "norm), so the module's own forward is run, which is slower",
            stacklevel=2,
        )
        return forward
    return decoder
