"""rollout: completions for policy-gradient trainers, a phase of them at a time, as fast as the GPU's memory allows."""

from rollout.config import EngineConfig
from rollout.types import Completion, MemoryReport, NonFiniteLogitsError, Request, SamplingParams, VersionRun
from rollout.worker import RolloutWorker

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "EngineConfig",
    "MemoryReport",
    "NonFiniteLogitsError",
    "Request",
    "RolloutWorker",
    "SamplingParams",
    "VersionRun",
]
