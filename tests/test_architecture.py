"""The architecture page names rooms that exist, and every room is on it; imports run downwards."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvfoundry"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = re.findall(r"^\| `(src/kvfoundry/[\w./]+)` \|", PAGE, re.MULTILINE)

# Small helpers that no reader looks for by name.
MINOR = {
    "__init__",
    "errors",
    "checks",
    "recipe",
    "registry",
    "slots",
    "rope_layout",
    "embedded",
    "wheels",
    "quiet",
    "columns",
    "tensor_refusal",
    "travelling",
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_named_room_exists(room: str) -> None:
    assert (ROOT / room).exists()


def test_every_room_is_named() -> None:
    named = {Path(room).stem for room in ROOMS}
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert present - MINOR <= named


def imports_of(path: Path) -> set[str]:
    """Rooms of kvfoundry that a file imports when it is loaded."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvfoundry"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("kvfoundry.")}
    return found


def test_only_the_command_imports_the_pipeline() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("rag", "cli"):
            assert "rag" not in imports_of(path), path


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("kernels", {"layouts", "selection", "cache", "layer", "method", "methods", "evaluate", "cli"}),
        ("layouts", {"selection", "cache", "layer", "method", "methods", "evaluate", "cli"}),
        ("codecs", {"layouts", "selection", "cache", "layer", "method", "methods", "evaluate", "cli"}),
        ("merging", {"cache", "layer", "method", "methods", "evaluate", "cli"}),
        ("selection", {"cache", "layer", "methods", "evaluate", "cli", "generation"}),
        ("methods", {"cache", "layer", "attention", "evaluate", "cli", "generation"}),
        ("bench", {"integrations", "rag", "demo", "cli"}),
    ],
)
def test_a_room_imports_only_from_below(room: str, forbidden: set[str]) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        assert not imports_of(path) & forbidden, path.name
