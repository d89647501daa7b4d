"""What a run is recorded to have been made with: versions, commit, machine."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kvfoundry
from kvfoundry.devices import input_device


def git_commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def versions() -> dict[str, str]:
    names = ("torch", "transformers")
    found = {"python": platform.python_version(), "kvfoundry": kvfoundry.__version__}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def describe(model: Any) -> dict[str, Any]:
    """The machine of a loaded model. devices: all that hold a part of it, where there are several."""
    device = input_device(model)
    placed = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(place) for place in placed.values()})
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **({"devices": devices} if len(devices) > 1 else {}),
    }
