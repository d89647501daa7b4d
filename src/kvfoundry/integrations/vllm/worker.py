"""The worker's side: vLLM's caches looked at once, then loads and saves as the scheduler asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvfoundry.chunks import ChunkStore, Identity
from kvfoundry.integrations.vllm.blocks import LayerBlocks
from kvfoundry.integrations.vllm.loading import Load, Loader
from kvfoundry.integrations.vllm.messages import Held, Work
from kvfoundry.integrations.vllm.moving import Mover
from kvfoundry.integrations.vllm.packing import Packing, checked_method
from kvfoundry.integrations.vllm.repair import Repairer
from kvfoundry.integrations.vllm.saving import Saver
from kvfoundry.integrations.vllm.settings import ConnectorSettings
from kvfoundry.integrations.vllm.stats import Counts, Numbers

# Seconds that a step without work waits for a load; vLLM asks again at once.
_PATIENCE = 0.02


@dataclass
class StoreWorker:
    """One worker's store, threads and counts. layers: by vLLM's names, in the order of the model.

    mover, repairer: for documents at other places, without repair and with it; both None where these are not served.
    """

    settings: ConnectorSettings
    store: ChunkStore
    identity: Identity
    layers: Mapping[str, LayerBlocks]
    block_size: int
    say: Callable[[str], None]
    mover: Mover | None = None
    repairer: Repairer | None = None

    def __post_init__(self) -> None:
        self.counts = Counts()
        first = next(iter(self.layers.values()))
        packing = Packing(
            checked_method(self.settings.method), [each.shape for each in self.layers.values()], first.cache.dtype
        )
        shared: Any = {
            "store": self.store,
            "identity": self.identity,
            "packing": packing,
            "layers": self.layers,
            "block_size": self.block_size,
            "counts": self.counts,
            "say": self.say,
        }
        self.loader = Loader(**shared, workers=self.settings.workers, mover=self.mover, repairer=self.repairer)
        self.saver = Saver(**shared, limit=self.settings.waiting_mib << 20)
        self._in_step: list[Load] = []
        self._idle = False

    def start(self, work: Work, *, idle: bool = False) -> None:
        """Begin the loads of a step. idle: the step computes nothing."""
        self._idle = idle
        by_layer = self.settings.load == "layers"
        self._in_step = [load for job in work.loads if (load := self.loader.begin(job, by_layer=by_layer)).waits]

    def wait_for(self, layer: str) -> None:
        """Return when the rows of a layer that this step reads are in place for what the device does next."""
        for load in self._in_step:
            load.waits[layer].wait()
            if load.events.get(layer) is not None:
                import torch

                torch.cuda.current_stream(self.loader.device).wait_event(load.events[layer])

    def save(self, work: Work) -> None:
        """Take the rows that this step has completed."""
        for load in self._in_step:  # a step without a forward pass has waited for no layer
            load.done.wait()
        self._in_step = []
        for job in work.saves:
            self.saver.take(job)

    def finished(self, over: set[str]) -> set[str]:
        """Requests that have been loaded. over: those that vLLM has ended."""
        for request in over:
            self.loader.cancel(request)
        if self._idle:
            self.loader.wait(_PATIENCE)
        return self.loader.finished()

    def held(self) -> Held:
        """What came into this worker's memory, and what turned out to be gone, since the last call."""
        return Held(frozenset(self.saver.new() | self.loader.new()), frozenset(self.loader.gone()))

    def numbers(self) -> Numbers:
        """Counts since the last call."""
        return self.counts.taken()

    def close(self) -> None:
        """Write what waits, end the threads, close the store."""
        self.loader.close()
        self.saver.close()
        self.store.close()
