"""The contract of a codec: rows of one head in, small tensors out, and back.

Storage knows four kinds of parts, and every codec says by name which it has:

    rows    one entry per row: packed codes [row, bytes], a scale per token, ...
    tables  one entry per block of `block` consecutive rows of one head: a scale per channel, a low-rank factor, ...
    sparse  a few numbers per row with their columns, another number of them in every row
    fixed   one entry per head of every batch row, settled once from the prompt (`fit`): thresholds, channels, ...

Rows are addressed singly. Reordering, cropping, ragged heads and eviction pick entries of `rows` (and the tables that
these still refer to); they never decode and encode again. So `decode` must give back a row from its own entry, the
tables of its block and what is fixed, whatever other rows of the block are still there.

Every block is encoded from its own rows alone. That is why rows that come one at a time, in pieces or at once get
identical codes, and why padding (which is never a row) cannot touch them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor, dtype

from kvfoundry.codecs.sparse import SparseRows

if TYPE_CHECKING:
    from kvfoundry.codecs.rotation import Rotation
    from kvfoundry.layouts.base import Layout, RowsView
    from kvfoundry.rope import Rope
    from kvfoundry.selection.budgets import ModelShape

# name -> tensor. Names are the codec's own; storage treats all alike.
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Site:
    """Where a codec works. layer_idx counts the full-attention layers; rope is there for codecs that ask for it.

    head_dim: width of the rows of this side. family: the model, for messages.
    """

    layer_idx: int
    num_layers: int
    head_dim: int
    rope: Rope | None = None
    family: str = "the model"


@dataclass(frozen=True)
class Encoded:
    """What `Codec.encode` gives back.

    rows: [blocks, block, ...] each, contiguous in memory. tables: [blocks, ...] each. sparse: numbers that are kept
    exactly, of all rows one after the other. `decode` finds the numbers of a sparse part `x` among its rows as
    `x.values` and `x.columns` [*leading, n], column dim where a row has fewer than n.
    """

    rows: Parts
    tables: Parts = field(default_factory=dict)
    sparse: dict[str, SparseRows] = field(default_factory=dict)


class Codec(ABC):
    """Writes one tensor of a cache, keys or values. A frozen dataclass: equal parameters are equal codecs.

    The newest rows wait in full precision. After a call, as soon as `residual + stride` rows of a head wait, the oldest
    `stride` of them are encoded, in blocks of `block`, and so on; less than that many wait between calls. `stride` is a
    multiple of `block`. The first `first` rows of a sequence are never encoded.
    """

    @property
    def block(self) -> int:
        """Rows of one head that share their tables; 1 where every row stands alone."""
        return 1

    @property
    def residual(self) -> int:
        """Newest rows of a head that always stay in full precision."""
        return 0

    @property
    def stride(self) -> int:
        """Rows that are encoded at once; a multiple of `block`. Small strides copy the codes more often."""
        return 32

    @property
    def first(self) -> int:
        """First rows of a head that always stay in full precision."""
        return 0

    @property
    def fits(self) -> bool:
        """Whether `fit` needs the whole prompt: then nothing is encoded before the prompt has ended."""
        return False

    @property
    def window(self) -> int:
        """How many of the prompt's last queries `fit` asks for."""
        return 0

    @property
    def needs_rope(self) -> bool:
        """Whether `at` needs the RoPE of the model."""
        return False

    @property
    def sets_aside(self) -> bool:
        """Whether `encode` gives sparse numbers, so that rows take different room."""
        return False

    def fitted(self, shape: ModelShape) -> Codec:
        """The codec for this model; SpecError when it was calibrated on another. Called when a cache is built."""
        return self

    def at(self, site: Site) -> Codec:
        """The codec for one layer; raises SpecError where it cannot serve it. Called before the first token."""
        return self

    def prepared(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rows [batch, heads, rows, dim] as `fit` wants them; positions [batch, heads, rows], -1 where is none."""
        return rows

    def fit(self, rows: Tensor, valid: Tensor, query: Tensor | None) -> Parts:
        """What is settled once, from the rows that the prompt leaves after eviction: name -> [batch, heads, ...].

        rows: [batch, heads, rows, dim], zeros where valid [batch, heads, rows] is False. query: the last `window`
        queries [batch, query_heads, queries, dim], zeros in front of a shorter prompt; None when `window` is 0.
        Every batch row must be settled from its own rows alone.
        """
        return {}

    @abstractmethod
    def encode(self, rows: Tensor, positions: Tensor, fixed: Parts) -> Encoded:
        """Write down blocks. Every block by itself: the result must not depend on which others come along.

        rows: [blocks, block, dim], finite. positions: [blocks, block] token index of every row. fixed: what `fit`
        settled for the head of each block, [blocks, 1, ...].
        """

    @abstractmethod
    def decode(self, rows: Parts, tables: Parts, fixed: Parts, positions: Tensor, dtype: dtype) -> Tensor:
        """Rows [*leading, dim] in `dtype`.

        rows: [*leading, ...] each; positions: [*leading]. The leading dimensions of tables and of fixed broadcast
        against those of rows: [batch, heads, n] with tables picked for every row, or [batch, heads, blocks, block] with
        tables [batch, heads, blocks, 1]. Entries whose result is thrown away may be any stored row.
        """


class RowsCodec(ABC):
    """The codec axis of a method: how the rows of a layer are stored once they may be. Frozen, without state."""

    readable_by_pages = True

    @property
    def streams(self) -> bool:
        """Whether the rows that `store` gives can live on the host and be read piece by piece."""
        return False

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether nothing can be encoded before the prompt has ended."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Queries of the end of the prompt that `store` asks for."""

    @property
    def needs_rope(self) -> bool:
        """Whether it works with the RoPE of the model."""
        return False

    @property
    def remedy(self) -> str:
        """What to do where the codec loses too much of a model's keys: the end of a sentence."""
        return "use more bits"

    def fitted(self, shape: ModelShape) -> RowsCodec:
        """The codec for one model; SpecError when it was calibrated on another. Called when a cache is built."""
        return self

    def at(self, keys: Site, values: Site) -> RowsCodec:
        """The codec for one layer; sites differ in head_dim where keys and values do."""
        return self

    @abstractmethod
    def store(self, view: RowsView, query: Tensor | None) -> Layout:
        """The layout that holds the rows of a view from now on, what is due encoded.

        query: the last `window` queries of the prompt [batch, query_heads, window, head_dim], zeros in front of a
        shorter one; None when `window` is 0.
        """


@dataclass(frozen=True)
class KVCodec(RowsCodec):
    """Keys and values each written by a `Codec` of its own. One without loss is `Plain`.

    Both sides move on their own: keys may wait in larger blocks than values (as in KIVI's own flow).
    rotation: turns keys before they are encoded, and the queries that read them: `encode` and `fit` of the keys get
    turned rows, `decode` gives turned ones back. A codec that needs the RoPE cannot work on turned keys.
    """

    keys: Codec
    values: Codec
    rotation: Rotation | None = None

    @property
    def fits(self) -> bool:
        """Whether nothing can be encoded before the prompt has ended."""
        return self.keys.fits or self.values.fits

    @property
    def window(self) -> int:
        """Queries of the end of the prompt that one of the sides asks for."""
        return max(self.keys.window, self.values.window)

    @property
    def needs_rope(self) -> bool:
        """Whether one of the sides works with the RoPE of the model."""
        return self.keys.needs_rope or self.values.needs_rope

    @property
    def streams(self) -> bool:
        """Whether every row takes the same room on both sides."""
        return not (self.keys.sets_aside or self.values.sets_aside)

    @property
    def remedy(self) -> str:
        """More bits, or a rotation where there is none yet."""
        return "add rotate() or use more bits" if self.rotation is None else "use more bits"

    def fitted(self, shape: ModelShape) -> KVCodec:
        """The pair for one model."""
        return replace(self, keys=self.keys.fitted(shape), values=self.values.fitted(shape))

    def at(self, keys: Site, values: Site) -> KVCodec:
        """The pair for one layer; sites differ in head_dim where keys and values do."""
        return replace(self, keys=self.keys.at(keys), values=self.values.at(values))

    def store(self, view: RowsView, query: Tensor | None) -> Layout:
        from kvfoundry.layouts.coded import CodedRows

        return CodedRows.of(self, view, query)
