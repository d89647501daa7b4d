"""How fast, and how large: latency, memory and transfer rates, each beside what the device allows."""

from kvfoundry.bench.grid import Grid, bench
from kvfoundry.bench.latency import ARMS
from kvfoundry.bench.record import Record

__all__ = ["ARMS", "Grid", "Record", "bench"]
