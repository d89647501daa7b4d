"""Blending: chunks that were computed apart become one prompt, and only some of their tokens are computed again."""

from kvfoundry.blend.blended import Blended
from kvfoundry.blend.reuse import BlendedPrompts, blend_chunks, blended_cache
from kvfoundry.blend.segments import Segments, segment
from kvfoundry.blend.select import selectors
from kvfoundry.blend.spec import Blend

__all__ = [
    "Blend",
    "Blended",
    "BlendedPrompts",
    "Segments",
    "blend_chunks",
    "blended_cache",
    "segment",
    "selectors",
]
