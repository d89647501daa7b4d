"""Find and load recorded cases: `<area>[/<source>]/<method>/case.json` with `tensors.safetensors` beside it."""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

_BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[3] / "shared" / "oracles"

Key = tuple[str, ...]


def oracle_root() -> Path:
    named = os.environ.get("KVFOUNDRY_ORACLES")
    return Path(named).expanduser().resolve() if named else _BESIDE_THE_REPOSITORY


@dataclass(frozen=True)
class Case:
    """One recorded case. `key` is (area, source, method) or (area, method), as the folders say."""

    key: Key
    folder: Path
    case_id: str
    entry: dict[str, Any]

    @property
    def file(self) -> dict[str, Any]:
        return _read(self.folder / "case.json")

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.entry["params"])

    def tensor(self, name: str) -> Tensor | None:
        """A recorded tensor of this case, None where it was not recorded."""
        stored = self.entry["tensors"].get(name)
        if isinstance(stored, dict):  # shape and type are listed there; the tensor's name follows from the case's
            stored = f"{self.case_id}/{name}"
        return None if stored is None else _tensors(self.folder)[stored].clone()

    def inputs(self) -> dict[str, Tensor] | None:
        """The input tensors q, k, v by name, one batch element where the case takes one; None for position methods."""
        if self.entry.get("input") is None:
            return None
        names = self.file["inputs"][self.entry["input"]]["tensors"]
        loaded = {name: _tensors(self.folder)[stored].clone() for name, stored in names.items()}
        element = self.entry.get("batch_element")
        return loaded if element is None else {name: t[element : element + 1] for name, t in loaded.items()}

    def tolerance(self, name: str) -> dict[str, float]:
        """Recorded rtol and atol of one kind of tensor; exact where the recording says so or gives none."""
        own = self.entry.get("tolerance", {})
        if f"{name}_atol" in own:
            return {"rtol": 0.0, "atol": float(own[f"{name}_atol"])}
        recorded = self.file.get("tolerance", {}).get(name)
        if not isinstance(recorded, dict):
            return {"rtol": 0.0, "atol": 0.0}
        return {"rtol": float(recorded["rtol"]), "atol": float(recorded["atol"])}


def find_cases(root: Path) -> list[Case]:
    """Every case below the root in a stable order; a file without a list of cases counts as one case."""
    found = []
    for path in sorted(root.rglob("case.json")):
        key = path.parent.relative_to(root).parts
        entries = _read(path).get("cases")
        if not isinstance(entries, list) or not entries:
            entries = [{"id": "whole file"}]
        for number, entry in enumerate(entries):
            found.append(Case(key, path.parent, str(entry.get("id", entry.get("name", number))), entry))
    return found


@cache
def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@cache
def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "tensors.safetensors")
