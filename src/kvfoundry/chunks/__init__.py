"""Chunks: the KV of single passages, kept to be used again in other prompts."""

from kvfoundry.chunks.chunk import ChunkKV

__all__ = ["ChunkKV"]
