"""How a model is run: the engine's own module of the learner's class, and how a learner's weights are read."""

from rollout.engine.models.hf import ModelShape, build_module, capture_obstacle, model_shape
from rollout.engine.models.learner import unwrap

__all__ = ["ModelShape", "build_module", "capture_obstacle", "model_shape", "unwrap"]
