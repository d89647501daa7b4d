"""Every retriever against numbers made by hand, their combinations, and specs that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from kvfoundry.errors import MissingExtraError, SpecError
from kvfoundry.evaluate.tasks.ragqa_data import Passage
from kvfoundry.rag import extra
from kvfoundry.rag.collection import Collection
from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder
from kvfoundry.rag.retrievers import DEFAULT, Question, Retriever, retriever_pieces
from kvfoundry.rag.retrievers import maxsim as maxsim_file
from kvfoundry.rag.retrievers.fusion import Ranks, ZScore, standardised
from kvfoundry.rag.retrievers.rerank import Rerank
from kvfoundry.rag.retrievers.titles import FollowTitles, Titles
from kvfoundry.rag.vectors.int8 import Rows

from .support import TOWNS

ALL = frozenset({"pooled", "tokens"})


@pytest.fixture
def towns(encoder: MeanPooledEncoder) -> Collection:
    vectors = list(encoder.passages(list(TOWNS.values()), ALL))
    return Collection(
        list(TOWNS),
        list(TOWNS.values()),
        Rows.of(torch.stack([each.pooled for each in vectors if each.pooled is not None]), rounded=False),
        Rows.of(torch.cat([each.tokens for each in vectors if each.tokens is not None]), rounded=True),
        torch.tensor([len(each.tokens) for each in vectors if each.tokens is not None], dtype=torch.int32),
    )


def words_only(*passages: Passage) -> Collection:
    return Collection([f"p{i}" for i in range(len(passages))], passages)


def ids(spec: str, question: str, collection: Collection, encoder: MeanPooledEncoder | None = None) -> list[str]:
    recipe = Retriever.parse(spec)
    return [hit.id for hit in recipe.search(Question(question, encoder, recipe.needs), collection, len(collection))]


# --- bm25 ---


def test_bm25_is_the_published_formula() -> None:
    pytest.importorskip("bm25s")
    collection = words_only(Passage("", "red red kite"), Passage("", "red fox"), Passage("", "the green stone wall"))
    scores = Retriever.parse("bm25(k1=1.5, b=0.75)").scores(Question("red kites"), collection, collection.rows())
    lengths, mean = (3, 2, 3), 8 / 3  # "the" does not count

    def part(count: int, having: int, length: int) -> float:
        idf = math.log(1 + (3 - having + 0.5) / (having + 0.5))
        return idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * length / mean))

    expected = [part(2, 2, lengths[0]) + part(1, 1, lengths[0]), part(1, 2, lengths[1]), 0.0]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_bm25_reads_titles_and_survives_questions_and_passages_without_words(towns: Collection) -> None:
    pytest.importorskip("bm25s")
    assert ids("bm25", "Where is Oskholm?", towns)[0] == "p2"
    assert ids("bm25", "zebra?", towns) == list(TOWNS), "nothing in common: the order of the candidates"
    assert ids("bm25", "???", towns) == list(TOWNS)
    empty = words_only(Passage("", "..."), Passage("", "the of"))
    assert ids("bm25", "anything", empty) == ["p0", "p1"]


def test_rare_words_count_by_the_whole_index_also_among_few(towns: Collection) -> None:
    pytest.importorskip("bm25s")
    question, recipe = Question("Where do seals rest?"), Retriever.parse("bm25")
    everything = recipe.scores(question, towns, towns.rows())
    some = towns.rows(["p3", "p2"])
    assert torch.equal(recipe.scores(question, towns, some), everything[some])


def test_bm25_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch, towns: Collection) -> None:
    monkeypatch.setattr(extra, "is_installed", lambda module: False)
    with pytest.raises(MissingExtraError, match=r"bm25s.*pip install 'kvfoundry\[rag\]'"):
        ids("bm25", "seals", towns)


# --- vectors ---


def test_dense_is_the_cosine(towns: Collection, encoder: MeanPooledEncoder) -> None:
    question = Question("Where do seals rest?", encoder, ALL)
    assert towns.pooled is not None
    expected = towns.pooled.floats() @ question.pooled
    recipe = Retriever.parse("dense")
    torch.testing.assert_close(recipe.scores(question, towns, towns.rows()), expected)
    some = towns.rows(["p3", "p1"])
    torch.testing.assert_close(recipe.scores(question, towns, some), expected[some])


@pytest.mark.parametrize("at_once", [1, 5, 1 << 15])
def test_maxsim_is_a_plain_loop(
    at_once: int, towns: Collection, encoder: MeanPooledEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maxsim_file, "_AT_ONCE", at_once)
    question = Question("Where do seals rest on the island?", encoder, ALL)
    assert towns.tokens is not None and towns.lengths is not None
    pieces = towns.tokens.floats().split(towns.lengths.tolist())
    for rows in (towns.rows(), towns.rows(["p3", "p1"]), towns.rows(["p2"])):
        expected = [sum(max(float(a @ b) for b in pieces[int(row)]) for a in question.tokens) for row in rows]
        found = Retriever.parse("maxsim").scores(question, towns, rows)
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_passage_without_token_vectors_comes_last(encoder: MeanPooledEncoder) -> None:
    tokens = normalize(torch.randn(3, 32), dim=1)
    collection = Collection(
        ["a", "b"], [Passage("", "."), Passage("", "x y z")], None, Rows.of(tokens, False), torch.tensor([0, 3])
    )
    assert ids("maxsim", "seals", collection, encoder) == ["b", "a"]


# --- fusion and stages ---


def test_zscore_by_hand() -> None:
    one, other = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([10.0, 10.0, 40.0])
    fused = ZScore().fuse([one, other], [0.75, 0.25])
    low = -math.sqrt(1.5)
    torch.testing.assert_close(fused[0], torch.tensor(0.75 * low - 0.25 * math.sqrt(0.5)))
    torch.testing.assert_close(standardised(one), torch.tensor([low, 0.0, -low]))
    assert torch.equal(standardised(torch.full((3,), 7.0)), torch.zeros(3)), "equal scores say nothing"
    assert torch.equal(standardised(torch.tensor([4.0])), torch.zeros(1))


def test_ranks_by_hand() -> None:
    fused = Ranks(constant=10).fuse([torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.0, 9.0, 5.0])], [0.5, 0.5])
    expected = [0.5 / 11 + 0.5 / 13, 0.5 / 13 + 0.5 / 11, 0.5 / 12 + 0.5 / 12]
    torch.testing.assert_close(fused, torch.tensor(expected))


def test_weights_are_shares(towns: Collection, encoder: MeanPooledEncoder) -> None:
    pytest.importorskip("bm25s")
    question = Question("Where do seals rest?", encoder, ALL)
    four, one = (
        Retriever.parse(spec).scores(question, towns, towns.rows())
        for spec in ("dense(weight=4)+bm25(weight=1)", "dense(weight=0.8)+bm25(weight=0.2)+zscore")
    )
    torch.testing.assert_close(four, one)


def test_rerank_orders_the_best_by_maxsim_and_leaves_the_others_below(
    towns: Collection, encoder: MeanPooledEncoder
) -> None:
    question, rows = Question("Where do seals rest?", encoder, ALL), towns.rows()
    late = Retriever.parse("maxsim").scores(question, towns, rows)
    before = torch.tensor([4.0, 3.0, 2.0, 1.0])
    after = Rerank(top=2).apply(before, question, towns, rows)
    torch.testing.assert_close(after[:2], late[:2])
    assert after[2] > after[3] and after[:2].min() > after[2]
    torch.testing.assert_close(Rerank(top=50).apply(before, question, towns, rows), late)


def test_titles_lift_what_is_named_and_what_the_best_name(towns: Collection) -> None:
    rows, before = towns.rows(), torch.tensor([3.0, 0.0, 1.0, 2.0])
    plain = standardised(before)
    lifted = FollowTitles(named=5.0, linked=0.0).apply(before, Question("How old is Oskholm?"), towns, rows)
    torch.testing.assert_close(lifted - plain, torch.tensor([0.0, 5.0, 0.0, 0.0]))
    # the best passage is then that of Tollenbeck, whose text names Oskholm
    linked = FollowTitles(named=5.0, linked=2.0, first=1).apply(before, Question("Where is Tollenbeck?"), towns, rows)
    torch.testing.assert_close(linked - plain, torch.tensor([0.0, 2.0, 5.0, 0.0]))
    among = towns.rows(["p3", "p1"])
    few = FollowTitles().apply(torch.tensor([1.0, 0.0]), Question("Tollenbeck or Oskholm"), towns, among)
    torch.testing.assert_close(few, torch.tensor([4.0, -1.0]))  # only candidates are lifted


def test_without_titles_nothing_changes() -> None:
    collection, before = words_only(Passage("", "a b"), Passage("", "c d"), Passage("", "e f")), torch.randn(3)
    after = FollowTitles().apply(before, Question("a b c"), collection, collection.rows())
    torch.testing.assert_close(after, standardised(before))


def test_what_counts_as_a_title() -> None:
    titles = Titles(
        words_only(
            Passage("Mercury (planet)", "x"), Passage("The Red Kite", "x"), Passage("Up", "x"), Passage("Kite", "x"),
            Passage("the red KITE", "y"), Passage("(2009)", "x"),
        )
    )  # fmt: skip
    assert titles.named("On Mercury, it is hot.") == {0}
    assert titles.named("on mercury") == set(), "one word is a name by its capital"
    assert titles.named("the red kite flew") == {1, 4}, "several words are one in any case"
    assert titles.named("The Red-Kite!") == {1, 3, 4}
    assert titles.named("Up and 2009") == set(), "too short, and no name"


# --- specs ---


def test_every_piece_stands_in_the_register() -> None:
    pieces = retriever_pieces()
    assert {name: entry.kind for name, entry in pieces.items()} == {
        "bm25": "scorer", "dense": "scorer", "maxsim": "scorer", "ranks": "fusion", "zscore": "fusion",
        "rerank": "stage", "titles": "stage",
    }  # fmt: skip
    assert all(entry.summary for entry in pieces.values())


@pytest.mark.parametrize(
    "spec", [DEFAULT, "bm25", "dense+maxsim+ranks(constant=30)", "bm25(k1=0.9)+titles(named=1.5)+rerank(top=10)"]
)
def test_a_spec_survives_printing(spec: str) -> None:
    recipe = Retriever.parse(spec)
    assert Retriever.parse(str(recipe)) == recipe and str(recipe) == spec


def test_needs_are_those_of_all_pieces() -> None:
    needs = {spec: Retriever.parse(spec).needs for spec in ("bm25+titles", "dense+bm25", "bm25+rerank", "dense+maxsim")}
    assert needs == {"bm25+titles": set(), "dense+bm25": {"pooled"}, "bm25+rerank": {"tokens"}, "dense+maxsim": ALL}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "retriever spec must be a non-empty string"),
        ("bm25 dense", "cannot read the retriever spec"),
        ("bm52", "did you mean 'bm25'"),
        ("bm25(k=1)", "unknown parameter of bm25"),
        ("bm25(b=2)", "b must be from 0 to 1"),
        ("dense(weight=-1)", "weight must be"),
        ("dense(weight=0)", "every weight is 0"),
        ("dense+dense", "dense is given twice"),
        ("titles", "nothing that scores"),
        ("zscore", "nothing that scores"),
        ("dense+zscore", "zscore fuses several scorers"),
        ("dense+bm25+zscore+ranks", "one fusion is enough"),
        ("dense+rerank(top=0)", "top must be a whole number of at least 1"),
        ("dense+titles(first=0.5)", "first must be a whole number"),
    ],
)
def test_refused_specs(spec: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        Retriever.parse(spec)
    assert why in str(caught.value) and "\n" not in str(caught.value)
