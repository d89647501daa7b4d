"""The connector's numbers through vLLM's own hooks: its log line, and its Prometheus page under `kvfoundry_`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvfoundry.integrations.vllm.stats import added, reduced

# name of a number -> (name on the page, label, what it is)
_COUNTERS = {
    "lookups": ("lookups", None, "spans of prompts that were looked up in the store"),
    "found_tokens": ("found_tokens", None, "tokens of those spans that the store has"),
    "absent_tokens": ("absent_tokens", None, "tokens of those spans that it has not"),
    "loaded_tokens": ("loaded_tokens", None, "tokens whose rows were put into vLLM's blocks"),
    "moved_tokens": ("moved_tokens", None, "tokens among them that were read at another place: approximate"),
    "recomputed_tokens": ("recomputed_tokens", None, "tokens of documents that the copy of the model computed again"),
    "loads": ("loads", None, "requests for which rows were loaded"),
    "load_seconds": ("load_seconds", None, "seconds that loads took, beside other work"),
    "saved_tokens": ("saved_tokens", None, "tokens whose rows were written to the store"),
    "hits": ("hits", "tier", "entries loaded, by tier"),
    "read_bytes": ("read_bytes", "tier", "bytes of entries read, by tier"),
    "written_bytes": ("written_bytes", "tier", "bytes of entries written, by tier"),
    "misses": ("misses", "reason", "entries that were promised and not there, by reason"),
    "dropped_tokens": ("dropped_tokens", "reason", "tokens that were not stored, by reason"),
}


@dataclass
class StoreNumbers(KVConnectorStats):
    """Numbers of one interval, from the scheduler and all workers."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return StoreNumbers(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return reduced(self.data)

    def is_empty(self) -> bool:
        return not self.data


class StoreMetrics(KVConnectorPromMetrics):
    """Counters `kvfoundry_<name>_total`, one per engine and label."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            number: self._counter_cls(
                name=f"kvfoundry_{name}", documentation=about, labelnames=[*labelnames, *([label] if label else [])]
            )
            for number, (name, label, about) in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            counter: Counter | None = self._counters.get(name)
            if counter is None:
                continue
            if isinstance(number, Mapping):
                for label, each in number.items():
                    counter.labels(*engine, label).inc(each)
            else:
                counter.labels(*engine).inc(number)
