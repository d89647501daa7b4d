"""MInference: the attention of a prompt, without most of its work."""

from kvfoundry.checks import choice
from kvfoundry.errors import SpecError
from kvfoundry.method import Piece
from kvfoundry.registry import register
from kvfoundry.sparse_prefill.a_shape import AShape
from kvfoundry.sparse_prefill.block_sparse import BlockSparse
from kvfoundry.sparse_prefill.prefill import SparsePrefill
from kvfoundry.sparse_prefill.table import PatternTable
from kvfoundry.sparse_prefill.vertical_slash import VerticalSlash


@register(
    paper="MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention, "
    "arXiv 2407.02490",
    axes={"prefill": "per head: single rows and slash lines, first rows and a window, or the best blocks"},
    evicts=False,
)
def minference(
    patterns: str = "",
    pattern: str = "vertical_slash",
    vertical: int = 1000,
    slash: int = 6096,
    window: int = 64,
    sinks: int = 30,
    recent: int = 100,
    rule: str = "blocks",
    first: int = 1024,
    local: int = 4096,
    blocks: int = 100,
    tile: int = 128,
    block: int = 64,
) -> Piece:
    """Compute, in the prompt, only the attention that a head's pattern expects to matter; decode reads every row.

    patterns: a file of `kvfoundry calibrate --for minference`, searched on this very model, or one that the authors
    published for it; it names a pattern for every head. Without one all heads follow `pattern`:

    - "vertical_slash": the `vertical` rows and `slash` distances that get most attention from the last `window` queries
      of the prompt, found anew in every layer and for every head; the first `sinks` rows and the nearest `recent`
      distances are among them. The defaults are those of the authors' code for a model without a table.
    - "a_shape": the first `first` rows and the newest `local`.
    - "block_sparse": for every tile of queries the `blocks` blocks whose mean key agrees most with its mean query.

    Rows are read in blocks of `block` by tiles of `tile` queries (64 by 64 in the paper). rule: what `slash` counts:
    "blocks" bounds the work, "offsets" is the paper's count of lines (see `VerticalSlash`). In a prompt that comes in
    pieces every piece chooses by its own queries. Nothing is dropped: all rows are stored, and methods that drop some
    do so after they were read. Where the pattern covers every row the result is that of dense attention, computed as
    such. `cache.prefill_share` says how much was computed.
    """
    choice("pattern", pattern, ("vertical_slash", "a_shape", "block_sparse"))
    found = VerticalSlash(vertical, slash, window, sinks, recent, rule)  # type: ignore[arg-type]
    known = {"vertical_slash": found, "a_shape": AShape(first, local), "block_sparse": BlockSparse(blocks)}
    if not isinstance(patterns, str):
        raise SpecError(f"patterns must be the path of a JSON file, got {patterns!r}.")
    table = PatternTable.read(patterns, found) if patterns else None
    return Piece(prefill=SparsePrefill(known[pattern], table, tile, block))
