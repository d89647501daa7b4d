"""What the connector is told: `kv_connector_extra_config` of vLLM, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvfoundry.blend import Blend
from kvfoundry.chunks.config import StoreConfig, store_config
from kvfoundry.errors import StoreError
from kvfoundry.integrations.vllm.packing import checked_method

# Tokens that are stored as one entry: a multiple of every usual block size of vLLM.
SPAN = 256
# Documents at other places are used as they were read.
NO_REPAIR = "none"


class ConnectorSettings(BaseModel):
    """store: tiers in their short form. method: how rows are written down, a codec or `fullkv`.

    span: tokens of one entry, a multiple of vLLM's block size. namespace: entries of one are never served to another.
    load: "ahead" fetches before a request is scheduled, while others compute; "layers" fetches beside its own first
    step, layer by layer. workers: threads that load. waiting_mib: rows that may wait to be written; what comes on top
    is not stored. documents: "off", or "approximate" for documents at any place. repair: "none" uses their rows as they
    were read; a blend such as `blend(ratio=0.15, select=query_aware)` computes chosen tokens again, on a copy of the
    model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str
    method: str = "fullkv"
    span: int = Field(default=SPAN, ge=16, le=8192)
    namespace: str = ""
    load: Literal["ahead", "layers"] = "ahead"
    workers: int = Field(default=2, ge=1, le=16)
    waiting_mib: int = Field(default=1024, ge=1)
    documents: Literal["off", "approximate"] = "off"
    repair: str = NO_REPAIR

    @field_validator("store")
    @classmethod
    def _tiers(cls, store: str) -> str:
        config = store_config(store)
        if any(tier.kind == "device" for tier in config.tiers):
            raise ValueError("the device tier is vLLM's own; name host, disk, Redis or another address")
        return store

    @field_validator("method")
    @classmethod
    def _codec(cls, method: str) -> str:
        return str(checked_method(method))

    @field_validator("repair")
    @classmethod
    def _blend(cls, repair: str) -> str:
        return repair if repair == NO_REPAIR else str(Blend.parse(repair))

    @model_validator(mode="after")
    def _repaired(self) -> ConnectorSettings:
        if self.blend is not None and self.documents == "off":
            raise ValueError("repair is for documents at other places; set documents to approximate too")
        return self

    @property
    def blend(self) -> Blend | None:
        """How documents are repaired; None where they are used as they were read."""
        return None if self.repair == NO_REPAIR else Blend.parse(self.repair)

    @property
    def tiers(self) -> StoreConfig:
        """The store as it is opened in a worker."""
        return store_config(self.store)

    @property
    def shared_tiers(self) -> StoreConfig | None:
        """What of it other processes see too; None where all of it is memory of one."""
        outside = tuple(tier for tier in self.tiers.tiers if tier.kind != "host")
        return StoreConfig(tiers=outside) if outside else None


def connector_settings(given: Mapping[str, Any]) -> ConnectorSettings:
    """The settings of a mapping; StoreError says in one line what cannot be read."""
    try:
        return ConnectorSettings(**given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ").rstrip(".")
        raise StoreError(f"kv_connector_extra_config, {place}: {said}.") from None
