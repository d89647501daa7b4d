"""Decoding near the limit of memory: static rows, one recorded step, a host that follows behind."""

from kvfoundry.engine.engine import DecodeEngine

__all__ = ["DecodeEngine"]
