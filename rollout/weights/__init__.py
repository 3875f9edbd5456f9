"""How new weights reach the engine: in shared storage, by an in-place copy, or by broadcast from other processes."""

from rollout.weights.broadcast import BroadcastReceiver, BroadcastReport, BroadcastSender
from rollout.weights.exchange import ExchangeReport, WeightExchange
from rollout.weights.source import named_weights

__all__ = [
    "BroadcastReceiver",
    "BroadcastReport",
    "BroadcastSender",
    "ExchangeReport",
    "WeightExchange",
    "named_weights",
]
