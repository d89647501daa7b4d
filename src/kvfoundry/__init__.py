"""kvfoundry: the KV cache of any transformers decoder, smaller, reusable, movable and measured.

Public names only. Importing this package changes nothing anywhere and does not import torch: each name is
resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ChunkKV": "chunks.chunk",
    "ChunkStore": "chunks.store",
    "DecodeEngine": "engine",
    "Identity": "chunks.identity",
    "KVCache": "cache",
    "Method": "method",
    "MiniCachePairStore": "layouts.pair_store",
    "SharedPrompt": "together",
    "attach": "attention",
    "blend": "blend",
    "compress_by_reconstruction": "reconstruction",
    "generate": "generation",
    "generate_together": "together",
    "prefill": "generation",
    "load": "models",
    "methods": "methods",
    "read_passage": "chunks.passage",
    "KVFoundryError": "errors",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from kvfoundry import blend as blend
    from kvfoundry.attention import attach as attach
    from kvfoundry.cache import KVCache as KVCache
    from kvfoundry.chunks.chunk import ChunkKV as ChunkKV
    from kvfoundry.chunks.identity import Identity as Identity
    from kvfoundry.chunks.passage import read_passage as read_passage
    from kvfoundry.chunks.store import ChunkStore as ChunkStore
    from kvfoundry.engine import DecodeEngine as DecodeEngine
    from kvfoundry.errors import KVFoundryError as KVFoundryError
    from kvfoundry.generation import generate as generate
    from kvfoundry.generation import prefill as prefill
    from kvfoundry.layouts.pair_store import MiniCachePairStore as MiniCachePairStore
    from kvfoundry.method import Method as Method
    from kvfoundry.models import load as load
    from kvfoundry.reconstruction import compress_by_reconstruction as compress_by_reconstruction
    from kvfoundry.registry import entries
    from kvfoundry.together import SharedPrompt as SharedPrompt
    from kvfoundry.together import generate_together as generate_together

    methods = entries


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        module = import_module(f"kvfoundry.{_EXPORTS[name]}")
        # `methods` is a package that can be called (see its docstring), and `blend` a package of its own names.
        value = module if name in ("methods", "blend") else getattr(module, name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvfoundry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
