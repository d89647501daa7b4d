"""One folder per chunk that any tool can read: keys, values, valid mask and metadata in files of their own.

    keys.safetensors        "<layer>": [heads, tokens, head_dim], row i is token i of the passage
    values.safetensors      "<layer>": [heads, tokens, value_dim]
    valid_mask.safetensors  "<layer>": boolean [heads, tokens], False where a head has no row of a token
    metadata.json           token ids, method, dtype, start, and a checksum of each file

Rows that a method dropped are zeros; compressed rows are written as attention reads them (`ChunkKV.plain`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvfoundry.chunks.chunk import FORMAT as CHUNK_FORMAT
from kvfoundry.chunks.chunk import ChunkKV, ChunkLayer
from kvfoundry.errors import DataError, KVFoundryError
from kvfoundry.layouts import RowsView
from kvfoundry.layouts.base import position_dtype
from kvfoundry.layouts.record import Record

FORMAT = "kvfoundry-chunk-folder-1"
_KINDS = ("keys", "values", "valid_mask")


def save_folder(chunk: ChunkKV, folder: str | Path, *, identity: Mapping[str, str] | None = None) -> Path:
    """Write a plain chunk into a new or empty folder. identity: parts that are noted along (`Identity.parts`).

    Raises DataError for a folder that holds something or cannot be written, CacheStateError for compressed rows.
    """
    target = Path(folder).expanduser()
    files: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    for number, layer in enumerate(chunk.layers):
        keys, values, valid = _by_token(layer, len(chunk.token_ids))
        for kind, tensor in zip(_KINDS, (keys, values, valid), strict=True):
            files[kind][str(number)] = tensor
    packed = {f"{kind}.safetensors": save(tensors) for kind, tensors in files.items()}
    about = chunk.metadata() | {
        "format": FORMAT,
        "token_ids": chunk.token_ids.tolist(),
        "context_ids": chunk.context_ids.tolist(),
        "identity": dict(identity or {}),
        "checksums": {name: zlib.crc32(data) for name, data in packed.items()},
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise DataError(f"the folder {target} is not empty; name a new one.")
        for name, data in packed.items():
            (target / name).write_bytes(data)
        (target / "metadata.json").write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the chunk to {target} ({error.strerror}).") from error
    return target


def load_folder(folder: str | Path) -> ChunkKV:
    """The chunk of a folder that `save_folder` wrote. DataError when a file is missing, damaged or odd."""
    source = Path(folder).expanduser()
    try:
        about = json.loads((source / "metadata.json").read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise DataError(f"{source} holds the format {about['format']!r:.40}, not {FORMAT!r}.")
        tensors = {}
        for kind in _KINDS:
            data = (source / f"{kind}.safetensors").read_bytes()
            if zlib.crc32(data) != about["checksums"][f"{kind}.safetensors"]:
                raise DataError(f"{source}: the checksum of {kind}.safetensors differs; the file is damaged.")
            tensors[kind] = load(data)
        named = {name: torch.tensor(about[name], dtype=torch.long) for name in ("token_ids", "context_ids")}
        layers = []
        for number, told in enumerate(about["layers"]):
            record = _recorded(*(tensors[kind][str(number)] for kind in _KINDS))
            layers.append({"form": record.form, "heads": told["heads"]})
            named |= {f"{number}.{name}": tensor for name, tensor in record.tensors.items()}
        metadata = {"format": CHUNK_FORMAT} | {name: about[name] for name in ("method", "dtype", "start")}
        return ChunkKV.from_tensors(named, metadata | {"layers": layers})
    except KVFoundryError:
        raise
    except OSError as error:
        raise DataError(f"the chunk in {source} cannot be read ({error.strerror}).") from error
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError, RuntimeError, RecursionError) as error:
        raise DataError(f"the folder {source} is no chunk, or it is damaged ({error!r:.80}).") from error


def _by_token(layer: ChunkLayer, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = layer.rows()
    valid = rows.valid[0].cpu()
    slots = rows.head_positions[0].cpu().long().clamp(min=0)

    def placed(held: Tensor) -> Tensor:
        flat = held[0].cpu()
        target = flat.new_zeros(flat.shape[0], tokens, flat.shape[2])
        head, row = valid.nonzero(as_tuple=True)
        target[head, slots[head, row]] = flat[head, row]
        return target

    mask = torch.zeros(valid.shape[0], tokens, dtype=torch.bool)
    head, row = valid.nonzero(as_tuple=True)
    mask[head, slots[head, row]] = True
    return placed(rows.keys), placed(rows.values), mask


def _recorded(keys: Tensor, values: Tensor, mask: Tensor) -> Record:
    if keys.shape[:2] != mask.shape or values.shape[:2] != mask.shape or mask.dtype != torch.bool:
        raise ValueError("keys, values and valid mask differ in shape")
    lengths = mask.sum(dim=1)
    width = int(lengths.max())
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    present = torch.arange(width) < lengths[:, None]
    head = torch.arange(len(mask))[:, None]
    positions = order.masked_fill(~present, -1).to(position_dtype(mask.shape[1] - 1))
    if bool((positions == positions[:1]).all()):
        positions = positions[:1]
    picked = (rows[head, order] * present[..., None] for rows in (keys, values))
    key_rows, value_rows = (rows[None] for rows in picked)
    return Record.plain(RowsView(key_rows, value_rows, positions[None], lengths[None]))
