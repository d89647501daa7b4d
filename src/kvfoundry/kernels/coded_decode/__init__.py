"""Decode attention that reads codes: rows in a few bits first, the newest rows whole behind them, in one pass."""

from kvfoundry.kernels.coded_decode.codes import Codes

__all__ = ["Codes"]
