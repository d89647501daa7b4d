"""What each pattern reads, against sums and rules written out."""

import pytest
import torch
from methods.support import LargestTensor

from kvfoundry.errors import SpecError
from kvfoundry.kernels.attention import naive as dense
from kvfoundry.kernels.sparse_prefill import Tiles
from kvfoundry.sparse_prefill.a_shape import AShape
from kvfoundry.sparse_prefill.block_sparse import BlockSparse
from kvfoundry.sparse_prefill.patterns import block_distances
from kvfoundry.sparse_prefill.prefill import index_of
from kvfoundry.sparse_prefill.vertical_slash import VerticalSlash, newest_attention

from .support import pointing, seen_by, sight_of

UNEVEN = dict(lengths=[[70, 64], [60, 51], [9, 9]], counts=[50, 33, 4])


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_newest_queries_attention_is_summed_by_row_and_by_distance(softcap, with_sinks):
    sinks = torch.linspace(-1, 2, 4) if with_sinks else None
    sight = sight_of(**UNEVEN, softcap=softcap, sinks=sinks)
    verticals, slashes = newest_attention(sight, 7)
    for row, (lengths, count) in enumerate(zip(UNEVEN["lengths"], UNEVEN["counts"], strict=True)):
        for head in range(4):
            by_row, by_distance = torch.zeros(verticals.shape[-1]), torch.zeros(verticals.shape[-1])
            for place in range(max(0, count - 7), count):
                own = lengths[head // 2] - count + place
                logits = sight.query[row, head, place] @ sight.key[row, head // 2, : own + 1].T * 0.25
                logits = logits if softcap is None else (logits / softcap).tanh() * softcap
                weights = (logits if sinks is None else torch.cat([logits, sinks[head : head + 1]])).softmax(-1)
                for slot in range(own + 1):
                    by_row[slot] += weights[slot]
                    by_distance[own - slot] += weights[slot]
            assert torch.allclose(verticals[row, head], by_row, atol=1e-5)
            assert torch.allclose(slashes[row, head], by_distance, atol=1e-5)


@pytest.mark.parametrize(("tile", "block"), [(4, 4), (8, 4), (8, 2), (4, 1)])
def test_a_block_holds_the_distances_between_its_rows_and_the_queries_of_the_tile(tile, block):
    tiles = Tiles.of(torch.tensor([[32]]), torch.tensor([32]), tile, block, "cpu")
    values = torch.rand(32, generator=torch.Generator().manual_seed(0))
    found = block_distances(values, tiles)
    for distance in range(32 // block):
        top = 32 // block - 1  # of the last tile
        queries, rows = range(32 - tile, 32), range((top - distance) * block, (top - distance + 1) * block)
        held = [float(values[query - row]) for query in queries for row in rows if query >= row]
        assert float(found[distance]) == pytest.approx(max(held))


def test_vertical_slash_finds_the_rows_and_lines_that_are_there():
    sight = pointing(256, columns=[40, 131], offsets=[77, 160])
    [seen] = seen_by(sight, VerticalSlash(vertical=2, slash=20, window=16, sinks=0, recent=1))[0]
    for query in range(256):
        for row in [column for column in (40, 131) if column <= query] + [query - 77, query - 160, query]:
            assert row < 0 or bool(seen[query, row])
    index = index_of(sight, (VerticalSlash(vertical=2, slash=20, window=16, sinks=0, recent=1),))
    assert int(index.computed) < 0.35 * index.causal


@pytest.mark.parametrize("rule", ["blocks", "offsets"])
def test_what_is_always_read_is_read_and_the_work_is_bounded(rule):
    sight = sight_of(rows=200)
    pattern = VerticalSlash(vertical=9, slash=20, window=5, sinks=6, recent=7, rule=rule)
    seen = seen_by(sight, *[pattern] * 4)[0]
    query, row = torch.arange(200)[:, None], torch.arange(200)
    always = (row <= query) & ((row < 6) | (query - row < 7))
    assert bool(seen[:, always].all()) and not bool(seen[:, row > query].any())
    index = index_of(sight, (pattern,) * 4)
    if rule == "blocks":
        # 20 / 4 blocks side by side, 2 of the tile itself, and 9 single rows in 3 tiles of 4
        assert int((index.counts + -(-index.column_counts // 4)).max()) <= 5 + 2 + 3
        assert pattern.blocks(sight.tiles) == 7
    else:
        _, slashes = newest_attention(sight, 5)
        scores = torch.where(torch.arange(200) < 7, torch.inf, slashes[0, :, :200])
        lines = (query - row == scores.topk(20).indices[:, :, None, None]).any(dim=1)
        assert bool(seen[lines].all())


def test_a_shape_reads_the_first_rows_and_the_newest():
    seen = seen_by(sight_of(), *[AShape(first=5, local=11)] * 3, AShape(first=0, local=1))[0]
    query, row = torch.arange(96)[:, None], torch.arange(96)
    causal = row <= query
    assert bool(seen[:3, causal & ((row < 5) | (query - row < 11))].all())
    # blocks of 4 from a tile of 8: nothing is further away than the window, a tile and a block
    assert not bool(seen[:3, causal & (row >= 5) & (query - row >= 11 + 8 + 4)].any())
    assert bool(seen[3, query[:, 0], row].all()) and not bool(seen[3, query - row >= 8].any())


@pytest.mark.parametrize("lengths", [None, [[90, 90]]])
def test_block_sparse_reads_the_blocks_that_agree_in_the_mean(lengths):
    sight = sight_of(lengths=lengths, counts=[90] if lengths else None)
    rows = 90 if lengths else 96
    seen = seen_by(sight, *[BlockSparse(5)] * 4)[0]
    for head in range(4):
        for tile in range(0, rows, 8):
            mean = sight.query[0, head, tile : tile + 8].mean(dim=0)
            scores = [
                float(sight.key[0, head // 2, start : start + 4].mean(dim=0) @ mean) for start in range(0, tile, 4)
            ]
            best = sorted(range(len(scores)), key=lambda block: -scores[block])[:3]
            expected = {row for block in best for row in range(4 * block, 4 * block + 4)}
            for query in range(tile, min(tile + 8, rows)):
                assert set(seen[head, query].nonzero()[:, 0].tolist()) == expected | set(range(tile, query + 1))


@pytest.mark.parametrize(
    "pattern",
    [VerticalSlash(4, 500, 4), VerticalSlash(1, 500, 4, rule="offsets"), AShape(0, 96), BlockSparse(24)],
    ids=lambda pattern: type(pattern).__name__,
)
def test_a_pattern_as_wide_as_the_text_reads_everything(pattern):
    sight = sight_of()
    assert pattern.whole(sight.tiles)
    index = index_of(sight, (pattern,) * 4)
    assert int(index.computed) == index.causal == 4 * sum(2 * tile for tile in range(1, 13))
    assert torch.equal(seen_by(sight, *[pattern] * 4)[0, 1], torch.ones(96, 96, dtype=torch.bool).tril())


PATTERNS = (VerticalSlash(4, 3, 4, 2, 3), AShape(3, 9), BlockSparse(3), VerticalSlash(2, 9, 4, 2, 3))


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_row_reads_what_it_reads_alone(seed):
    lengths = [40, *torch.randint(1, 40, (2,), generator=torch.Generator().manual_seed(seed)).tolist()]
    sight = sight_of(lengths=[[length] * 2 for length in lengths], counts=lengths, tile=4, block=2, seed=seed)
    together = seen_by(sight, *PATTERNS)
    for row, length in enumerate(lengths):
        tiles = Tiles.of(torch.tensor([[length] * 2]), torch.tensor([length]), 4, 2, "cpu")
        alone = type(sight)(
            sight.query[row : row + 1, :, :length], sight.key[row : row + 1, :, :length], tiles, sight.scaling
        )
        assert torch.equal(together[row, :, :length, :length], seen_by(alone, *PATTERNS)[0])
        assert not bool(together[row, :, length:].any())


@pytest.mark.parametrize("limit", [1, 2000, 1 << 24])
def test_an_estimate_in_pieces_is_the_same(limit, monkeypatch):
    whole = seen_by(sight_of(**UNEVEN), *PATTERNS)
    monkeypatch.setattr(dense, "_BLOCK_ELEMENTS", limit)
    assert torch.equal(seen_by(sight_of(**UNEVEN), *PATTERNS), whole)


def test_the_memory_of_an_estimate_is_linear_in_the_text(monkeypatch):
    monkeypatch.setattr(dense, "_BLOCK_ELEMENTS", 1 << 12)
    largest = []
    for rows in (1024, 4096):
        sight = sight_of(rows=rows, tile=16, block=8)
        with LargestTensor() as meter:
            index_of(sight, PATTERNS)
        largest.append(meter.numel / sight.key.numel())
    assert largest[1] <= 1.1 * largest[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AShape(-1, 4), "first must be a whole number"),
        (lambda: AShape(0, 0), "local must be a whole number of at least 1"),
        (lambda: BlockSparse(0), "blocks must be"),
        (lambda: VerticalSlash(vertical=-1), "vertical must be"),
        (lambda: VerticalSlash(recent=0), "recent must be"),
        (lambda: VerticalSlash(rule="lines"), "rule must be one of"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(make, words):
    with pytest.raises(SpecError, match=words):
        make()
