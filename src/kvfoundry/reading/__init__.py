"""Which stored rows a decode step reads."""

from kvfoundry.reading.reader import Reader

__all__ = ["Reader"]
