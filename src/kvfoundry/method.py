"""A method is a recipe: one member per axis, written as a spec string.

    snapkv(budget=1024, window=32)        one published method
    h2o(budget=0.2)+protect(sinks=4)      a method with a piece that refines it

The grammar is Python's own call syntax, read with `ast`; nothing is ever evaluated.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kvfoundry.codecs.base import RowsCodec
from kvfoundry.codecs.minicache import LayerPairs
from kvfoundry.codecs.rotation import Rotation
from kvfoundry.errors import SpecError
from kvfoundry.merging import Disposal
from kvfoundry.reading import Reader
from kvfoundry.selection.budgets import HeadBudget, LayerBudget, LayerSpread, ModelShape, UniformHeads
from kvfoundry.selection.choose import Choice, TopRows
from kvfoundry.selection.evidence import Granularity, Group
from kvfoundry.selection.protect import Protect
from kvfoundry.selection.refine import Refinement
from kvfoundry.selection.schedule import Schedule
from kvfoundry.selection.scores import Score
from kvfoundry.selection.scores.reconstruction import Reconstruction
from kvfoundry.selection.units import Unit
from kvfoundry.sparse_prefill.prefill import SparsePrefill


@dataclass(frozen=True)
class Call:
    """One `name(parameter=value, ...)` of a spec, with the values as given and defaults filled in."""

    name: str
    arguments: tuple[tuple[str, Any], ...]
    defaults: tuple[tuple[str, Any], ...] = field(compare=False, repr=False, default=())

    def __str__(self) -> str:
        defaults = dict(self.defaults)
        shown = [
            f"{name}={_literal(value)}"
            for name, value in self.arguments
            if name not in defaults or not _same(value, defaults[name])
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


@dataclass(frozen=True)
class Piece:
    """What one registered name contributes: the axes it claims, None where it has no say.

    Two pieces of one recipe must not claim the same axis. `schedule`, `protect`, `granularity` and `group` of a method
    are its defaults and may be refined by the piece of that name. `layers` spreads a uniform budget of another piece
    over the layers. `rotation` turns keys for the `codec` of another piece.
    """

    score: Score | None = None
    budget: LayerBudget | None = None
    layers: LayerSpread | None = None
    heads: HeadBudget | None = None
    choose: Choice | None = None
    unit: Unit | None = None
    block: int | None = None
    refine: Refinement | None = None
    dispose: Disposal | None = None
    read: Reader | None = None
    prefill: SparsePrefill | None = None
    pairs: LayerPairs | None = None
    codec: RowsCodec | None = None
    rotation: Rotation | None = None
    protect: Protect | None = None
    schedule: Schedule | None = None
    granularity: Granularity | None = None
    group: Group | None = None
    skip_layers: int | None = None
    slot_positions: bool | None = None
    reconstructs: Reconstruction | None = None
    unread_distance: int | None = None

    def claimed(self) -> list[str]:
        """Names of the axes that this piece sets."""
        return [axis for axis in self.__dataclass_fields__ if getattr(self, axis) is not None]


@dataclass(frozen=True)
class Method:
    """A complete recipe. Frozen and without state: one object serves many models, caches and generations.

    Build it with `Method.parse`; compare, hash and print it freely: `str(method)` is a canonical spec that parses back
    to an equal method.
    """

    calls: tuple[Call, ...]
    score: Score | None = field(default=None, compare=False)
    budget: LayerBudget | None = field(default=None, compare=False)
    heads: HeadBudget = field(default=UniformHeads(), compare=False)
    choose: Choice = field(default=TopRows(), compare=False)
    unit: Unit | None = field(default=None, compare=False)
    block: int | None = field(default=None, compare=False)
    refine: Refinement | None = field(default=None, compare=False)
    dispose: Disposal | None = field(default=None, compare=False)
    read: Reader | None = field(default=None, compare=False)
    prefill: SparsePrefill | None = field(default=None, compare=False)
    pairs: LayerPairs | None = field(default=None, compare=False)
    codec: RowsCodec | None = field(default=None, compare=False)
    protect: Protect = field(default=Protect(), compare=False)
    schedule: Schedule = field(default=Schedule(), compare=False)
    granularity: Granularity = field(default="kv_head", compare=False)
    group: Group = field(default="mean", compare=False)
    skip_layers: int = field(default=0, compare=False)
    slot_positions: bool = field(default=False, compare=False)
    reconstructs: Reconstruction | None = field(default=None, compare=False)
    unread_distance: int | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, spec: str | Method, budget: int | float | None = None) -> Method:
        """The method of a spec string.

        budget: given to the piece that stores rows within one, whether the spec names a budget or not; a method that
        takes none stays as it is.
        Raises SpecError for bad syntax, an unknown name or parameter (with what exists and the nearest of it), an
        impossible value, or pieces that cannot work together.
        """
        if isinstance(spec, Method) and budget is None:
            return spec
        from kvfoundry.recipe import budgeted, build

        calls = parse_calls(str(spec) if isinstance(spec, Method) else spec)
        return build(calls if budget is None else budgeted(calls, budget))

    def __str__(self) -> str:
        return "+".join(str(call) for call in self.calls)

    @property
    def evicts(self) -> bool:
        """True when rows can be dropped."""
        return self.score is not None and self.budget is not None

    @property
    def lossy(self) -> bool:
        """True when rows that stay are not stored as they were computed: a codec rounds them, layers share them."""
        return self.codec is not None or self.pairs is not None

    @property
    def parks(self) -> bool:
        """True when dropped rows wait on the host until they are recalled."""
        return self.dispose is not None and self.dispose.parks

    @property
    def takes_budget(self) -> bool:
        """True when a budget parameter exists."""
        return any(name == "budget" for call in self.calls for name, _ in call.arguments)

    @property
    def needs_model(self) -> str | None:
        """What the method needs of the model beside the tensors of one layer, in words; None for nothing."""
        if self.reconstructs is not None:
            return "the model to repeat its context"
        if self.score is not None and self.score.needs_rope:
            return "the model's RoPE"
        if self.pairs is not None:
            return "the rows of neighbouring layers"
        if self.codec is not None and self.codec.needs_rope:
            return "the model's RoPE"
        if self.refine is not None and self.refine.needs_module:
            return "the model's output projections"
        return None

    def with_budget(self, budget: int | float) -> Method:
        """The same recipe under another budget; SpecError when none of its pieces takes one.

        Where rows are dropped and pages are read, the budget is that of the stored rows.
        """
        if not self.takes_budget:
            raise SpecError(f"{self} takes no budget.")
        from kvfoundry.recipe import budgeted, build

        return build(budgeted([(call.name, dict(call.arguments)) for call in self.calls], budget))

    def replace(self, **axes: Any) -> Method:
        """The same recipe with some axes exchanged for objects of your own; its spec string stays what it was."""
        return replace(self, **axes)

    def fitted(self, shape: ModelShape) -> Method:
        """The same recipe for one model; SpecError when it holds something that was measured on another."""
        budget = None if self.budget is None else self.budget.fitted(shape)
        codec = None if self.codec is None else self.codec.fitted(shape)
        prefill = None if self.prefill is None else self.prefill.fitted(shape)
        return replace(self, budget=budget, heads=self.heads.fitted(shape), codec=codec, prefill=prefill)

    def acts_on(self, layer_idx: int) -> bool:
        """Whether rows of this layer (counted among the full-attention layers) are ever dropped."""
        return self.evicts and layer_idx >= self.skip_layers

    def compress(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_idx: int = 0,
        num_layers: int = 1,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """What one layer keeps of a prompt.

        query [batch, query_heads, tokens, head_dim], key and value [batch, heads, tokens, dim]: as attention sees them,
        keys after RoPE. attention_mask: [batch, tokens], 0 for padding. Returns the cache layer, with .keys, .values,
        .positions ([batch, heads, rows]), .lengths ([batch, heads]) and .nbytes; `layer.step(query, key, value)` goes
        on from there in decode. Under park(), .parked has the same fields for the rows on the host, .parked_nbytes
        their bytes, and `layer.recall()` brings them back. Raises SpecError for a method that needs more of the model
        than these tensors.
        """
        if self.needs_model is not None:
            raise SpecError(f"{self} needs {self.needs_model}, not only tensors; use it through KVCache(model).")
        from kvfoundry.layer import CacheLayer

        layer = CacheLayer(self, layer_idx=layer_idx, num_layers=num_layers)
        layer.step(query, key, value, attention_mask=attention_mask)
        return layer


def _literal(value: Any) -> str:
    return repr(value)


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def parse_calls(
    spec: str, kind: str = "method", example: str = "snapkv(budget=256)"
) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of a spec, in order; SpecError for bad syntax. Names are not looked up.

    kind, example: what the spec is of, for messages.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise SpecError(f"a {kind} spec must be a non-empty string such as {example!r}.")
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError as error:
        raise SpecError(f"cannot read the {kind} spec {spec!r}: write name(parameter=value), joined by '+'.") from error
    return [_call(node, spec, kind, example) for node in _summands(tree)]


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _call(node: ast.expr, spec: str, kind: str, example: str) -> tuple[str, dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise SpecError(f"cannot read the {kind} spec {spec!r}: write name(parameter=value), joined by '+'.")
    if node.args:
        raise SpecError(f"{node.func.id}: parameters are named, as in {example}, not so in {spec!r}.")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise SpecError(f"{node.func.id}: each parameter is given once and by name, in {spec!r}.")
        arguments[keyword.arg] = _value(keyword.value, node.func.id, keyword.arg)
    return node.func.id, arguments


def _value(node: ast.expr, name: str, parameter: str) -> Any:
    if isinstance(node, ast.Name):  # pooling=max reads as well as pooling="max"
        return float("nan") if node.id.lower() == "nan" else node.id
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise SpecError(f"{name}: the value of {parameter} must be a number, a word or a quoted string.") from error
    return _frozen(value)


def _frozen(value: Any) -> Any:
    """Lists as tuples at every depth: arguments are hashed."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value
