"""How new weights reach the engine: in shared storage, or by an in-place copy."""

from rollout.weights.exchange import ExchangeReport, WeightExchange
from rollout.weights.source import named_weights

__all__ = ["ExchangeReport", "WeightExchange", "named_weights"]
