"""Chunks: the KV of single passages, kept to be used again in other prompts."""

from kvfoundry.chunks.chunk import ChunkKV
from kvfoundry.chunks.config import StoreConfig
from kvfoundry.chunks.identity import ChunkKey, Identity
from kvfoundry.chunks.report import Report
from kvfoundry.chunks.store import ChunkStore

__all__ = ["ChunkKV", "ChunkKey", "ChunkStore", "Identity", "Report", "StoreConfig"]
