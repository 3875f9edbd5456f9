"""What the engine did, for whoever reports it: counts and seconds of a phase, and a timeline of host and device work.

Refuses to know the engine: plain numbers are handed in, nothing here imports torch.
"""

from rollout.observe.metrics import PhaseMetrics, RunTotals, format_summary
from rollout.observe.timeline import NullTimeline, Timeline

__all__ = ["NullTimeline", "PhaseMetrics", "RunTotals", "Timeline", "format_summary"]
