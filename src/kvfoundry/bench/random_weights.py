"""Models of any config with random weights, made on the device: a step's time does not depend on what weights say."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvfoundry import compat
from kvfoundry.embedded import first_line
from kvfoundry.errors import DataError, ModelLoadError, unknown_name
from kvfoundry.models import architecture
from kvfoundry.planning.known import KNOWN, outline_of


def config_of(name: str) -> PretrainedConfig:
    """The config of a well-known model by its name, of a JSON file as config.json is, or of a folder with one.

    Raises ModelLoadError for a name that is none of them, and for a file that cannot be read.
    """
    if name in KNOWN:
        return KNOWN[name]()
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        try:
            found: PretrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # whatever a library raises on a file of the user's is an answer about that file
            raise ModelLoadError(f"config file {name!r} cannot be read: {first_line(error)}") from error
        return found
    if not path.exists():
        raise ModelLoadError(
            f"{unknown_name('config', name, KNOWN)} Otherwise give a config.json, or a folder with one."
        )
    config: PretrainedConfig = architecture(name).config
    return config


def built(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> PreTrainedModel:
    """The model with random weights, made on the device, without end tokens.

    Raises DataError where the weights are larger than what is free there.
    """
    weights = sum(parameter.numel() for parameter in outline_of(config).parameters()) * dtype.itemsize
    free = _free_bytes(device)
    if free is not None and weights > free:
        raise DataError(
            f"the weights are {weights / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}, and {device.type} has "
            f"{free / 1e9:.1f} GB; give a smaller config, or a narrower --dtype."
        )
    torch.manual_seed(seed)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model.eval()


def shallow(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same with the first layers only: as many as asked, and more where fewer than two see the whole past."""
    config = copy.deepcopy(config)
    whole = config.num_hidden_layers
    full = [number for number, (kind, _) in enumerate(compat.layer_types(config)) if kind == "full_attention"]
    depth = min(whole, max(layers, full[1] + 1 if len(full) > 1 else 0))
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == whole:  # one entry for each layer
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth
    return config


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that are free there, as far as the system says so."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
