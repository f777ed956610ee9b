"""Options and decisions. Public names of ``graph_passes.scheduling.schedule``."""

from graph_passes.scheduling.schedule import Options, apply, decide, pose, quick

__all__ = ["Options", "apply", "decide", "pose", "quick"]
