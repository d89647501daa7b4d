"""Which requests rows are kept for, and whose they are: adapters by their files, vLLM's cache salts, no images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfoundry.errors import KVFoundryError
from kvfoundry.integrations.vllm.messages import Tenant
from kvfoundry.integrations.vllm.weights import adapter_digest


class Tenants:
    """say: takes a line for the log; every reason is said once."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._said: set[str] = set()
        self._adapters: dict[tuple[str, int, str], str] = {}

    def of(self, request: Any) -> Tenant | None:
        """Whose rows a request's are; None where token ids do not say what was read."""
        if request.mm_features or request.prompt_embeds is not None or not request.prompt_token_ids:
            self._once(
                "requests with images, sounds or embeddings are computed in full: token ids do not tell them apart"
            )
            return None
        if request.resumable:
            self._once("requests whose prompt arrives in pieces are computed in full")
            return None
        adapter = ""
        if request.lora_request is not None:
            try:
                adapter = self._adapter(request.lora_request)
            except (KVFoundryError, OSError) as error:
                self._once(f"requests of the adapter {request.lora_request.lora_name!r} are computed in full: {error}")
                return None
        return Tenant(adapter, request.cache_salt or "")

    def _adapter(self, lora: Any) -> str:
        known = (lora.lora_path, lora.lora_int_id, lora.lora_name)
        if known not in self._adapters:
            self._adapters[known] = adapter_digest(Path(lora.lora_path))
        return self._adapters[known]

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
