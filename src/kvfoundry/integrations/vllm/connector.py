"""The connector that vLLM loads by `kv_connector` and `kv_connector_module_path`: its public interface, and no more.

vLLM makes one of these in the scheduler and one in every worker. What each does lies in `plan.py` and `worker.py`; here
vLLM's calls are handed on. Whatever is not served leaves one line in the log, and requests are computed in full.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvfoundry.chunks import ChunkStore, Identity
from kvfoundry.chunks.search import asked
from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import LayerBlocks
from kvfoundry.integrations.vllm.documents import Documents
from kvfoundry.integrations.vllm.identity import served_identity, shard_name
from kvfoundry.integrations.vllm.messages import Held, Prompt, Span, Work, WorkerCard
from kvfoundry.integrations.vllm.metrics import StoreMetrics, StoreNumbers
from kvfoundry.integrations.vllm.moving import Mover
from kvfoundry.integrations.vllm.opening import check_groups, check_parallel, opened_layers
from kvfoundry.integrations.vllm.plan import Planner
from kvfoundry.integrations.vllm.repair import Repairer
from kvfoundry.integrations.vllm.settings import ConnectorSettings, connector_settings
from kvfoundry.integrations.vllm.stats import Counts
from kvfoundry.integrations.vllm.tenants import Tenants
from kvfoundry.integrations.vllm.weights import checkpoint_folder
from kvfoundry.integrations.vllm.worker import StoreWorker

logger = init_logger("vllm.kvfoundry")

# Names of entries in the memory of workers that the scheduler remembers.
_REMEMBERED = 1 << 18
# A name that no entry has.
_NOBODY = "0" * 64


@dataclass
class StepWork(KVConnectorMetadata):
    """From the scheduler to the workers, every step."""

    work: Work


@dataclass
class Introduction(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, when it starts."""

    card: WorkerCard


@dataclass
class StepNews(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, every step that has any."""

    held: Held

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return StepNews(self.held.joined(other.held))


def say(line: str) -> None:
    """One line in vLLM's log."""
    logger.warning("kvfoundry: %s", line)


def away(store: ChunkStore) -> list[str]:
    """A line for every tier that does not answer."""
    return [
        f"a tier is away, and requests are computed until it is back: {tier.counters.problems[-1]}"
        for tier in store.tiers
        if asked(tier, partial(tier.holds, _NOBODY), otherwise=True) and tier.counters.problems
    ]


class KVFoundryConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module, and docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.settings: ConnectorSettings = connector_settings(self._kv_transfer_config.kv_connector_extra_config)
        self.block_size = vllm_config.cache_config.block_size
        self.refusal = self._refusal()
        self._loads, self._saves = self._kv_transfer_config.is_kv_consumer, self._kv_transfer_config.is_kv_producer
        self.counts = Counts()
        if role == KVConnectorRole.SCHEDULER:
            if self._kv_transfer_config.kv_load_failure_policy != "recompute":
                say("requests whose entries get lost will fail; set kv_load_failure_policy to recompute")
            self._shards: list[Identity] = []
            self._held: OrderedDict[str, None] = OrderedDict()
            self._tenants = Tenants(say)
            self._said: set[str] = set()
            self.store = self._shared_store()
            repairs = self.settings.blend is not None
            caching = bool(vllm_config.cache_config.enable_prefix_caching)
            self._documents = Documents(self.settings.documents == "approximate", caching, say, repairs)
            self.planner = Planner(
                self.settings.span,
                self.block_size,
                self._holds,
                self._tenants.of,
                self._documents.spans,
                repairs,
            )
        else:
            self.worker: StoreWorker | None = None
            self._card = WorkerCard(refusal=self.refusal)

    def _shared_store(self) -> ChunkStore | None:
        """What the scheduler looks into; where it cannot be opened the workers' cards say so too."""
        if self.refusal or self.settings.shared_tiers is None:
            return None
        try:
            return ChunkStore(self.settings.shared_tiers)
        except KVFoundryError as error:
            self._once(f"serving without the store: {error}")
            return None

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(line)

    def _refusal(self) -> str:
        """Why this model cannot be served; empty when it can."""
        if self.settings.span % self.block_size:
            return f"span={self.settings.span} is no multiple of vLLM's block size {self.block_size}."
        try:
            check_parallel(self._vllm_config.parallel_config)
            check_groups(self._kv_cache_config)
        except KVFoundryError as error:
            return str(error)
        return ""

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self.refusal:
            try:
                self._open_worker(kv_caches)
            except KVFoundryError as error:
                self._card = WorkerCard(refusal=str(error))

    def _open_worker(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._vllm_config
        found = get_layers_from_vllm_config(config, AttentionLayerBase, list(kv_caches))
        backends = {name: layer.get_attn_backend().get_name() for name, layer in found.items()}
        layers = opened_layers(kv_caches, self._kv_cache_config, backends)
        tensor, pipeline = get_tp_group(), get_pp_group()
        shard = shard_name(tensor.rank_in_group, tensor.world_size, pipeline.rank_in_group, pipeline.world_size)
        identity = served_identity(config, self.settings, shard)
        store = ChunkStore(self.settings.tiers)
        notes = away(store)
        places: dict[str, Any] = {}
        try:
            places = self._places(layers, tensor.world_size, pipeline.world_size)
        except KVFoundryError as error:
            notes.append(f"documents are not served at other places: {error}")
        self.worker = StoreWorker(self.settings, store, identity, layers, self.block_size, say, **places)
        self._card = WorkerCard(identity, notes=tuple(notes))
        logger.info("kvfoundry: %d layers of %s behind %s", len(layers), shard, self.settings.store)

    def _places(self, layers: dict[str, LayerBlocks], parts: int, stages: int) -> dict[str, Any]:
        """What puts documents at other places, by the worker's names for it; UnsupportedModelError where it cannot."""
        if self.settings.documents == "off":
            return {}
        model, blend = self._vllm_config.model_config, self.settings.blend
        if stages > 1:  # the first layer, by which moved keys are checked, is not there in every worker
            raise UnsupportedModelError("its layers are spread over workers.")
        if blend is None:
            return {"mover": Mover.of(model.hf_text_config, model.dtype)}
        if parts > 1:
            raise UnsupportedModelError("its heads are spread over workers, and documents are repaired on one.")
        if model.quantization is not None:
            raise UnsupportedModelError("its weights are quantized, and documents are repaired on plain ones.")
        folder = checkpoint_folder(model.model, model.revision, self._vllm_config.load_config.download_dir)
        device = next(iter(layers.values())).cache.device
        return {"repairer": Repairer.of(folder, model.hf_config, model.dtype, device, blend)}

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Introduction(self._card)

    def _work(self) -> Work:
        metadata = self._connector_metadata
        return metadata.work if isinstance(metadata, StepWork) else Work()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.start(self._work(), idle=getattr(forward_context, "attn_metadata", None) is None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.worker is not None:
            self.worker.wait_for(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are taken when all layers are computed, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.save(self._work())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self.worker.finished(finished_req_ids) or None) if self.worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.loader.bad_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        held = self.worker.held() if self.worker is not None else Held()
        return StepNews(held) if held.new or held.gone else None

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        cards = [each.card for each in metadata.values()]
        for card in cards:
            for line in (*([f"serving without the store: {card.refusal}"] if card.refusal else ()), *card.notes):
                self._once(line)
        self._shards = [card.identity for card in cards if card.identity is not None]
        if len(self._shards) < len(cards):
            self._shards = []  # rows of one worker alone are of no use

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): each for rank, each in metadata.items()})

    def _holds(self, prompt: Prompt, span: Span) -> bool:
        """Whether every worker's part of a span is somewhere."""
        keys = prompt.keys(self._shards, span)
        there = bool(keys) and all(
            key.id in self._held or (self.store is not None and self.store.contains(key)) for key in keys
        )
        self.counts.looked_up(span.stop - span.start, there=there)
        return there

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._shards or not self._loads:
            return 0, False
        matched = self.planner.matched(request, num_computed_tokens)
        return matched, matched > 0 and self.settings.load == "ahead"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work = self.planner.step(scheduler_output)
        return StepWork(work if self._saves else replace(work, saves=()))

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self.planner.failed(connector_output.invalid_block_ids)
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, StepNews):
            for name in news.held.gone:
                self._held.pop(name, None)
            for name in news.held.new:
                self._held[name] = None
            while len(self._held) > _REMEMBERED:
                self._held.popitem(last=False)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        moved = self.planner.finished(request.request_id)
        told = {"approximate_tokens": moved, "repair": self.settings.repair}
        return False, {"kvfoundry": told} if moved else None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # Both sides.

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a miss later on, nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layers"

    def get_kv_connector_stats(self) -> Any:
        counts = self.counts if self._role == KVConnectorRole.SCHEDULER or self.worker is None else self.worker.counts
        numbers = counts.taken()
        return StoreNumbers(data=numbers) if numbers else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return StoreNumbers(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        worker, store = getattr(self, "worker", None), getattr(self, "store", None)
        if worker is not None:
            worker.close()
        if store is not None:
            store.close()
