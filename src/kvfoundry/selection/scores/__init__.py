"""One file per score. A score ranks rows, higher stays; budget, protection and gather are not its business."""

from kvfoundry.selection.scores.base import Score

__all__ = ["Score"]
