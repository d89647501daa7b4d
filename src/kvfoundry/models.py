"""Load a model and its tokenizer by one name: embedded, on the hub, a local folder or a ``.gguf`` file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from kvfoundry.embedded import EMBEDDED, embedded_models, ensure, first_line, set_special_tokens
from kvfoundry.errors import MissingExtraError, ModelLoadError, unknown_name
from kvfoundry.quiet import quiet

__all__ = ["architecture", "embedded_models", "load", "outline"]

_ATTENTION = ("eager", "flash_attention_2", "sdpa")
# How accelerate may spread a model over devices.
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def load(
    name: str | Path = "smollm2",
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    attn_implementation: str = "sdpa",
    device_map: str | Mapping[str, Any] | None = None,
    revision: str | None = None,
    tokenizer: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a decoder for inference, with its tokenizer.

    Args:
        name: an embedded model (``embedded_models()``), a local folder, a ``.gguf`` file or a hub name, looked up in
            this order. Write ``./smollm2`` for a folder that is called like an embedded model.
        device: ``"auto"`` is CUDA where there is one, else the CPU; ``"auto-map"`` is ``device_map="auto"``; any torch
            device otherwise.
        dtype: ``"auto"`` keeps the checkpoint's on an accelerator (bfloat16 for a ``.gguf`` file, which names none)
            and takes float32 on the CPU, because most CPUs compute bfloat16 more slowly than float32. Otherwise a
            torch dtype or its name.
        attn_implementation: the backend of dense attention: ``"sdpa"``, ``"eager"`` or ``"flash_attention_2"``.
        device_map: for a model that no single GPU holds, in place of ``device``. ``"auto"`` fills the GPUs evenly, then
            the CPU's memory, then the disk; ``"balanced"``, ``"balanced_low_0"`` and ``"sequential"`` are accelerate's
            too, and a mapping names the device of each module, ``{"": "cpu"}`` for all. Rows of a layer lie where the
            layer computes. Weights on the disk are read again for every forward pass.
        revision: branch, tag or commit of a hub model.
        tokenizer: False loads no tokenizer and returns None in its place.

    Returns:
        The model in evaluation mode and the tokenizer, which pads on the left (generation continues at the right
        end) and always has a pad token (its end token where the model defines none).

    Raises:
        ModelLoadError: the model cannot be found, fetched, verified or read; one sentence with cause and remedy.
        MissingExtraError: ``flash_attention_2`` without the flash-attn package.
    """
    _check_attention(attn_implementation)
    if device == "auto-map":
        device, device_map = "auto", device_map or "auto"
    places = {"": check_device(device)} if device_map is None else _device_map(device_map, device)
    numbers = _dtype(dtype, on_cpu=_only_cpu(places))
    source = _resolve(str(name), revision)
    if numbers == "auto" and "gguf_file" in source.arguments:
        numbers = torch.bfloat16

    with quiet(stderr="gguf_file" in source.arguments):
        _check_config(source)
        loaded = _tokenizer(source) if tokenizer else None
        model = _model(source, device_map=places, dtype=numbers, attn_implementation=attn_implementation)
    if loaded is not None:
        _prepare_padding(loaded, model, from_gguf="gguf_file" in source.arguments)
    return model, loaded


def outline(name: str | Path = "smollm2") -> tuple[PreTrainedModel, Any]:
    """The architecture of a model, without weights (on torch's meta device), and its tokenizer.

    For whoever asks for config and tokenizer where others do the computing. name and Raises as in `load`.
    """
    source = _resolve(str(name), None)
    from_gguf = "gguf_file" in source.arguments
    with quiet(stderr=from_gguf):
        _check_config(source)
        tokenizer = _tokenizer(source)
        model = _without_weights(source)
    _prepare_padding(tokenizer, model, from_gguf=from_gguf)
    return model, tokenizer


def architecture(name: str | Path = "smollm2") -> PreTrainedModel:
    """The architecture of a model, on torch's meta device, where neither weights nor a tokenizer need be at hand.

    name: as in `load`; also a folder with nothing but a config.json, or such a file. Raises ModelLoadError.
    """
    source = _resolve(str(name), None, weights=False)
    with quiet(stderr="gguf_file" in source.arguments):
        _check_config(source)
        return _without_weights(source)


def _without_weights(source: "_Source") -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    except Exception as error:  # as in _check_config
        raise ModelLoadError(f"cannot load {source.label}: {first_line(error)}; {source.remedy}") from error
    return model


@dataclass(frozen=True)
class _Source:
    """What from_pretrained receives, and what the user called it."""

    label: str
    location: str
    arguments: dict[str, Any]
    remedy: str
    """The end of an error sentence: what to do when reading it fails."""


def _resolve(name: str, revision: str | None, *, weights: bool = True) -> _Source:
    """weights: whether a local folder without them is refused."""
    path = Path(name).expanduser()
    if not name.strip():
        raise ModelLoadError(f"the model name is empty; give one of {', '.join(EMBEDDED)}, a folder or a hub name.")
    if name in EMBEDDED:
        local = _folder(ensure(EMBEDDED[name]), label=f"embedded model {name!r}")
    elif path.is_dir():
        local = _folder(path, label=f"model folder {name!r}", weights=weights)
    elif path.suffix == ".gguf":
        local = _gguf(path)
    elif not weights and path.name == "config.json" and path.is_file():
        local = _folder(path.parent, label=f"config file {name!r}", weights=False)
    elif path.exists():
        raise ModelLoadError(f"{name!r} is a file, but not a .gguf file; give a model folder or a .gguf file.")
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {name!r}; give an existing model folder or a hub name.")
    elif "/" not in name and get_close_matches(name, EMBEDDED, cutoff=0.75):
        # a slip of the finger, told at once: without a network the hub's client would retry for half a minute
        raise ModelLoadError(unknown_name("embedded model", name, EMBEDDED))
    else:
        remedy = f"check the name, the network and the access rights; offline there is {', '.join(EMBEDDED)}."
        return _Source(f"hub model {name!r}", name, {"revision": revision} if revision else {}, remedy)
    if revision is not None:
        raise ModelLoadError(f"revision={revision!r} is for hub models, and {name!r} is a local one; leave it out.")
    return local


def _folder(path: Path, label: str, *, weights: bool = True) -> _Source:
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{label} has no config.json; save a transformers model into it, or name another folder.")
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{label}: config.json cannot be read ({first_line(error)}); save the model again."
        ) from error
    if weights and not any(found for pattern in ("*.safetensors", "*.bin") for found in path.glob(pattern)):
        raise ModelLoadError(
            f"{label} has a config.json but no weights (*.safetensors or *.bin); copy them into it, or save it again."
        )
    return _Source(label, str(path), {"local_files_only": True}, f"its files in {path} may be damaged: replace them.")


def _gguf(path: Path) -> _Source:
    label = f"GGUF file '{path}'"
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelLoadError(f"{label} cannot be read ({error.strerror}); check the path.") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"{label} is not in GGUF format (it begins with {magic!r}); download it again.")
    arguments = {"gguf_file": path.name, "local_files_only": True}
    return _Source(
        label, str(path.parent), arguments, "the file may be cut short, or transformers cannot read its kind."
    )


def _check_config(source: _Source) -> None:
    """Find out first, and cheaply, whether the source can be reached and is a known kind of model."""
    if "gguf_file" in source.arguments:
        return  # its configuration sits in the one file that is read next anyway
    try:
        AutoConfig.from_pretrained(source.location, **source.arguments)
    except Exception as error:  # whatever a library raises on a file of the user's is an answer about that file
        raise ModelLoadError(f"cannot load {source.label}: {first_line(error)}; {source.remedy}") from error


def _model(source: _Source, **arguments: Any) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location, output_loading_info=True, **source.arguments, **arguments
        )
    except Exception as error:  # as in _check_config
        raise ModelLoadError(f"cannot load {source.label}: {first_line(error)}; {source.remedy}") from error
    model, info = loaded
    # transformers fills absent weights with random numbers and only warns; such a model would talk nonsense
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"{source.label} lacks {len(missing)} weights that its configuration asks for, first {missing[0]!r}; "
            "it is not a complete causal language model."
        )
    return model.eval()


def _tokenizer(source: _Source) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source.location, **source.arguments)
    except Exception as error:  # as in _check_config
        raise ModelLoadError(
            f"cannot load the tokenizer of {source.label}: {first_line(error)}; {source.remedy} "
            "(tokenizer=False loads the model alone)"
        ) from error


def _prepare_padding(tokenizer: Any, model: PreTrainedModel, *, from_gguf: bool) -> None:
    if from_gguf:
        set_special_tokens(tokenizer, model.config)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id  # else every generate call warns


def _check_attention(name: str) -> None:
    if name not in _ATTENTION:
        raise ModelLoadError(unknown_name("attn_implementation", name, _ATTENTION))
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        raise MissingExtraError(
            "attn_implementation='flash_attention_2' needs a CUDA GPU and the package flash-attn "
            "(pip install flash-attn); use 'sdpa' without it."
        )


def check_device(device: str | torch.device) -> torch.device:
    """The torch device that a name means; "auto" is CUDA where there is one. ModelLoadError where it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelLoadError(
            f"unknown device {device!r}; use 'auto', 'auto-map', 'cpu', 'cuda' or 'cuda:1'."
        ) from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(
            f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            "use device='cpu', or install a CUDA build of torch."
        )
    return target


def _device_map(device_map: str | Mapping[str, Any], device: str | torch.device) -> str | dict[str, Any]:
    if device != "auto":
        raise ModelLoadError(
            f"device {str(device)!r} and a device_map both say where the model goes; give one of them."
        )
    if isinstance(device_map, str):
        if device_map not in _MAPS:
            raise ModelLoadError(unknown_name("device_map", device_map, _MAPS))
        return device_map
    if not device_map:
        raise ModelLoadError("the device_map is empty; name a device for each module, or {'': 'cpu'} for all.")
    places: dict[str, Any] = {}
    for module, place in device_map.items():
        if place != "disk":
            check_device(f"cuda:{place}" if isinstance(place, int) else place)
        places[module] = place
    return places


def _only_cpu(places: str | dict[str, Any]) -> bool:
    """Whether everything is computed on the CPU."""
    if isinstance(places, str):
        return not torch.cuda.is_available()
    return all(place == "disk" or str(place) == "cpu" for place in places.values())


def _dtype(dtype: str | torch.dtype, *, on_cpu: bool) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if dtype == "auto":
        return torch.float32 if on_cpu else "auto"
    if dtype not in _DTYPES:
        raise ModelLoadError(unknown_name("dtype", str(dtype), ["auto", *_DTYPES]))
    return _DTYPES[str(dtype)]
