"""What a model does with its rows: which heads retrieve."""

from kvfoundry.analysis.heads import HeadScores, measure_heads

__all__ = ["HeadScores", "measure_heads"]
