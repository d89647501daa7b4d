"""Which tokens of reused chunks are computed again: one file per published rule."""

from kvfoundry.blend.select.register import selectors

__all__ = ["selectors"]
