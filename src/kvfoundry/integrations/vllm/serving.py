"""The command line that serves a model with the store behind it, ready to be run."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from kvfoundry.integrations.vllm import CONNECTOR, MODULE_PATH
from kvfoundry.integrations.vllm.settings import ConnectorSettings


@dataclass(frozen=True)
class Serving:
    """A server to be. windows: whether the model has sliding-window layers, whose blocks vLLM must then keep whole."""

    model: str
    settings: ConnectorSettings
    windows: bool = False

    @property
    def transfer_config(self) -> dict[str, Any]:
        """What `--kv-transfer-config` takes. Settings at their defaults are left out."""
        settings = self.settings.model_dump(exclude_defaults=True)
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE_PATH,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }

    @property
    def arguments(self) -> list[str]:
        """The command, word by word."""
        words = ["vllm", "serve", self.model, "--kv-transfer-config", json.dumps(self.transfer_config)]
        return words + (["--disable-hybrid-kv-cache-manager"] if self.windows else [])

    @property
    def command(self) -> str:
        """The command, for a shell."""
        return shlex.join(self.arguments)
