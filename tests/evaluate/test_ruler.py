"""RULER's tasks: lengths that are met, facts that stand in the prompt, and answers that another reader finds too."""

import collections
import gzip
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfoundry.errors import DataError
from kvfoundry.evaluate.prompts import encode_item
from kvfoundry.evaluate.tasks.base import TaskError
from kvfoundry.evaluate.tasks.ruler.counting import CODE_INTRO, DOTS, LIST_INTRO, occurrences, zeta
from kvfoundry.evaluate.tasks.ruler.filler import DEPTHS, NOISE, Essay
from kvfoundry.evaluate.tasks.ruler.fit import largest_fitting
from kvfoundry.evaluate.tasks.ruler.qa_data import read_qa
from kvfoundry.evaluate.tasks.ruler.scoring import cleaned, match_all, match_part
from kvfoundry.evaluate.tasks.ruler.table import VARIANTS, QASpec
from kvfoundry.evaluate.tasks.ruler.task import RulerTask
from kvfoundry.evaluate.tasks.ruler.variables import INTRO
from kvfoundry.evaluate.tasks.ruler.words import ADJECTIVES, NOUNS, VERBS

SHARED = Path(os.environ.get("KVFOUNDRY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
NEEDLES = [name for name in VARIANTS if name.startswith("niah")]
WITHOUT_DATA = [name for name, variant in VARIANTS.items() if not isinstance(variant.spec, QASpec)]

# A unit of filler in tokens of the tiny tokenizer, at most: what may be missing to the length.
UNIT = {"niah_single_1": 8, "niah_multikey_2": 12, "niah_multikey_3": 30, "vt": 8, "cwe": 12, "fwe": 12}

VALUES = {"number": r"[1-9]\d{6}", "identifier": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}


def squad(articles=4, paragraphs=6):
    """A SQuAD-style file: the answer to each question stands in its own paragraph alone."""
    names = iter(range(1000))
    data = []
    for article in range(articles):
        made = []
        for number in range(paragraphs):
            name = next(names)
            context = (
                f"Keeper{name} lives in town{name} near the old mill. " + "The river rose above the step. " * number
            )
            made.append({
                "context": context,
                "qas": [
                    {"question": f"Where does keeper{name} live?", "answers": [{"text": f"town{name}"}] * 2},
                    {"question": "Who built the moon?", "answers": [], "is_impossible": True},
                ],
            })  # fmt: skip
        data.append({"title": f"t{article}", "paragraphs": made})
    return {"version": "2.0", "data": data}


def hotpot(questions=6):
    return [
        {
            "question": f"Which lake is by town{number}?",
            "answer": f"lake{number}",
            "supporting_facts": [[f"A{number}", 0], [f"B{number}", 0]],
            "context": [
                [f"A{number}", [f"Town{number} is by the hill. ", "It is old."]],
                [f"B{number}", [f"By the hill is lake{number}."]],
                [f"C{number}", ["The river rose above the lower step."]],
            ],
        }
        for number in range(questions)
    ]


@pytest.fixture
def qa_files(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(squad()))
    (tmp_path / "hotpot.json").write_text(json.dumps(hotpot()))
    return {"qa_1": read_qa(tmp_path / "squad.json"), "qa_2": read_qa(tmp_path / "hotpot.json")}


def ask(tokenizer, name, *lengths, chat=True, seed=0, count=2, **more):
    return RulerTask(name, lengths or (700,), count, **more).items(tokenizer, chat, seed)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_prompt_and_answer_fill_the_length(tokenizer, name, prefix):
    items = ask(tokenizer, name, 640, 1500, chat=prefix, answer_prefix=prefix)
    assert [item.cell["length"] for item in items] == [640, 1500] * 2
    assert len({item.item for item in items}) == len({item.prompt for item in items}) == 4
    for item in items:
        assert item.max_new_tokens == VARIANTS[name].answer_tokens
        left = item.cell["length"] - item.max_new_tokens - len(encode_item(tokenizer, item, prefix))
        assert 0 <= left <= UNIT.get(name, 3)
        assert item.prompt.endswith(item.question) and bool(item.answer_prefix) == prefix


def test_other_numbers_from_4096_tokens_on(tokenizer):
    (item,) = ask(tokenizer, "cwe", 4200, count=1)
    listed = collections.Counter(re.findall(r"\d+\. (\w+)", item.prompt.rpartition(LIST_INTRO)[2]))
    assert set(listed.values()) == {30, 3} and len(listed) > 150
    assert {word for word, count in listed.items() if count == 30} == set(item.references)
    example = collections.Counter(re.findall(r"\d+\. (\w+)", item.prompt.split("\n\n")[1]))
    assert collections.Counter(example.values()) == {10: 10, 3: 30}
    assert 0 <= 4200 - 120 - len(encode_item(tokenizer, item, True)) <= 12


@pytest.mark.parametrize("name", NEEDLES)
def test_a_reader_of_needles_finds_the_answers(tokenizer, name):
    spec = VARIANTS[name].spec
    for item in ask(tokenizer, name, 900, seed=3):
        facts = collections.defaultdict(list)
        found = re.findall(rf"The {spec.values} filed under (\S+) is (\S+)\.(?=\s)", item.prompt)
        for key, value in found:
            facts[key].append(value)
        asked = [key for key in facts if re.search(rf"\b{re.escape(key)}\b", item.question)]
        assert len(asked) == spec.queries and all(key in item.answer_prefix for key in asked)
        assert sorted(value for key in asked for value in facts[key]) == sorted(item.references)
        assert len(item.references) == spec.queries * spec.values_per_key
        assert len({value for _, value in found}) == len(found)  # no value twice
        for reference in item.references:
            assert item.prompt.count(reference) == 1
            assert re.fullmatch(VALUES[spec.values], reference)
        if spec.haystack == "needles":
            lines = item.prompt.split("\n\n")[1].split("\n")
            assert len(lines) == len(found) == len(facts) > 8
        else:
            assert len(facts) == spec.num_keys and len(found) == spec.num_keys * spec.values_per_key


def test_needles_in_an_essay_stand_between_sentences_at_the_published_depths(tokenizer):
    (item,) = ask(tokenizer, "niah_multiquery", 1500, count=1)
    text = item.prompt.removesuffix(item.question).split("\n\n", 1)[1]
    sentences = re.split(r"(?<=[.!?]) ", text)
    places = [number for number, sentence in enumerate(sentences) if "filed under" in sentence]
    assert len(places) == 4
    plain = len(sentences) - 4
    allowed = {plain * depth // 100 for depth in DEPTHS}
    assert {place - before for before, place in enumerate(places)} <= allowed


def test_noise_is_the_same_few_sentences(tokenizer):
    (item,) = ask(tokenizer, "niah_single_1", 900, count=1)
    lines = item.prompt.removesuffix(item.question).split("\n\n", 1)[1].split("\n")
    noise = [line for line in lines if "filed under" not in line]
    assert len(lines) == len(noise) + 1
    assert set(noise[:-1]) == {" ".join(NOISE)} and " ".join(NOISE).startswith(noise[-1])


def test_a_reader_of_assignments_finds_the_variables(tokenizer):
    for item in ask(tokenizer, "vt", 1000, 2500, seed=5):
        example, _, text = item.prompt.rpartition(INTRO)
        held = {}
        for name, source in re.findall(r"^Set (\w+) to (\w+)\.$", text, re.MULTILINE):
            held[name] = held.get(source, source)  # a variable that is used before it is set would show as a name
        (asked,) = set(re.findall(r"\d{5}", item.question))
        assert [name for name, value in held.items() if value == asked] == list(item.references)
        assert len(item.references) == 5 and all(re.fullmatch("[A-Z]{5}", name) for name in item.references)
        assert example.startswith(INTRO) and re.search(r"hold the value \d{5}:( [A-Z]{3}){5}\n", example)
        assert len(tokenizer(example)["input_ids"]) <= min(500, item.cell["length"] // 4)


def test_a_reader_of_lists_counts_the_same_words(tokenizer):
    for item in ask(tokenizer, "cwe", 900, seed=2):
        listed = re.findall(r"(\d+)\. (\w+)", item.prompt.rpartition(LIST_INTRO)[2])
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = collections.Counter(word for _, word in listed)
        assert {word for word, _ in counts.most_common(10)} == set(item.references)
        assert set(counts.values()) == {6, 1}


def test_a_reader_of_codes_counts_the_same_words(tokenizer):
    for item in ask(tokenizer, "fwe", 500, 3000, seed=4):
        counts = collections.Counter(item.prompt.removesuffix(item.question).removeprefix(CODE_INTRO).split())
        (dots, most), *ranked = counts.most_common()
        assert dots == DOTS and most > ranked[0][1]
        assert [word for word, _ in ranked[:3]] == list(item.references)
        assert ranked[0][1] > ranked[1][1] > ranked[2][1] > ranked[3][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_come_with_their_documents_among_others(tokenizer, qa_files, name):
    data = qa_files[name]
    items = ask(tokenizer, name, 300, count=3, qa=data)
    by_question = {question.question: question for question in data.questions}
    assert len({item.question for item in items}) == 3
    orders = set()
    for item in items:
        text = item.prompt.removesuffix(item.question)
        numbers = [int(number) for number in re.findall(r"^Document (\d+):$", text, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 4
        question = by_question[item.question.rpartition("Question: ")[2]]
        assert question.answers == item.references
        places = [text.index(data.documents[place]) for place in question.needed]
        orders.add(tuple(sorted(range(len(places)), key=places.__getitem__)))
        assert any(answer in text for answer in item.references)
        near = [data.documents[place] in text for place in question.near]
        others = [data.documents[place] in text for place in range(len(data.documents))
                  if place not in {*question.needed, *question.near}]  # fmt: skip
        assert all(near) or not any(others)  # the nearest distractors come first
        assert len(numbers) == len(question.needed) + sum(near) + sum(others)


def test_qa_files_are_read_as_they_are_built(qa_files):
    one, two = qa_files["qa_1"], qa_files["qa_2"]
    assert len(one.questions) == len(one.documents) == 24 and len(one.questions[0].near) == 5
    assert one.questions[0].answers == ("town0",)
    assert len(two.questions) == 6 and len(two.documents) == 18
    assert two.documents[two.questions[1].needed[0]] == "A1\nTown1 is by the hill. It is old."


def test_the_published_questions_can_be_asked(tokenizer):
    if not SHARED.is_dir():
        pytest.skip(f"no data at {SHARED}; name it with KVFOUNDRY_DATA")
    data = read_qa(SHARED / "hotpotqa_train100" / "hotpotqa_train100.json.gz")
    assert len(data.questions) == 100 and len(data.documents) > 900
    for item in ask(tokenizer, "qa_2", 4000, count=3, qa=data):
        assert 0 <= 4000 - 32 - len(encode_item(tokenizer, item, True)) < 600
        (question,) = (question for question in data.questions if item.question.endswith(question.question))
        assert all(data.documents[place] in item.prompt for place in (*question.needed, *question.near))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "q"}]}]}]}, "article 1 is not built as"),
        ([{"question": "q", "answer": "a", "context": [["t", ["s"]]], "supporting_facts": [["u", 0]]}], "supporting"),
        ([{"question": "q"}], "record 1 has no field 'answer'"),
        ({"rows": []}, "neither SQuAD-style"),
        ({"data": [{"paragraphs": []}]}, "no question"),
    ],
)
def test_qa_files_that_cannot_be_used(tmp_path, content, message):
    (tmp_path / "q.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_qa(tmp_path / "q.json")


def test_damaged_articles_can_be_left_out(tmp_path):
    content = squad(2)
    content["data"].insert(1, {"title": "broken"})
    (tmp_path / "q.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"article 2 .*--skip-damaged"):
        read_qa(tmp_path / "q.json")
    data = read_qa(tmp_path / "q.json", skip_damaged=True)
    assert len(data.questions) == 12 and len(data.skipped) == 1


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_same_seed_same_items_other_seed_other_items(tokenizer, name):
    first, again, other = (ask(tokenizer, name, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not {item.prompt for item in first} & {item.prompt for item in other}


def test_a_folder_is_the_essay(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(f"Number {index} was seen." for index in range(200)))
    (item,) = ask(tokenizer, "niah_single_2", 500, count=1, haystack=tmp_path)
    seen = [int(number) for number in re.findall(r"Number (\d+)", item.prompt)]
    assert seen == list(range(len(seen))) and len(seen) > 50
    with pytest.raises(TaskError, match="length 5000 is too long for niah_single_2: there are no more than 800 words"):
        ask(tokenizer, "niah_single_2", 5000, count=1, haystack=tmp_path)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("niah_sngle_1", {}, "did you mean 'niah_single_1'"),
        ("vt", {"lengths": ()}, "no length"),
        ("vt", {"lengths": (0,)}, "length 0 is out of range"),
        ("vt", {"lengths": (500, 500)}, "given twice"),
        ("vt", {"items_per_length": 0}, "0 items leave nothing"),
        ("qa_1", {}, "qa_1 needs a local SQuAD-style JSON file; name it with --qa-data"),
        ("qa_2", {}, "qa_2 needs a local HotpotQA-style"),
    ],
)
def test_settings_out_of_range(name, more, message):
    with pytest.raises(TaskError, match=message):
        RulerTask(name, **more)


def test_a_file_of_the_other_style_is_refused(qa_files):
    with pytest.raises(TaskError, match="qa_1 needs a local SQuAD-style"):
        RulerTask("qa_1", qa=qa_files["qa_2"])


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_lengths_too_short_are_refused(tokenizer, name):
    with pytest.raises(TaskError, match="length 140 is too short for"):
        ask(tokenizer, name, 140)


def test_too_few_questions_are_refused(tokenizer, qa_files):
    with pytest.raises(TaskError, match="qa_2 has 6 questions at length 200, 7 are asked for"):
        ask(tokenizer, "qa_2", 200, count=7, qa=qa_files["qa_2"])
    with pytest.raises(TaskError, match="qa_2 has 0 questions at length 80"):
        ask(tokenizer, "qa_2", 80, count=1, qa=qa_files["qa_2"])


def test_string_match():
    assert match_all(["12", "34"], "only 12") == 0.5 and match_part(["12", "34"], "only 12") == 1.0
    assert match_all(["Alpha"], "ALPHA beta") == 1.0 and match_all(["x"], "") == 0.0 and match_part(["x"], "y") == 0.0
    assert cleaned(" a\tb\n ") == "a\nb"


@given(st.lists(st.integers(1, 9), min_size=3, max_size=300), st.integers(-5, 800), st.none() | st.integers(0, 400))
def test_the_largest_fitting_size_is_found_from_any_guess(steps, room, guess):
    sizes = [sum(steps[: end + 1]) for end in range(len(steps))]
    expected = max((size for size, tokens in enumerate(sizes) if tokens <= room), default=None)
    assert largest_fitting(sizes.__getitem__, room, 0, len(sizes) - 1, guess) == expected


def test_few_counts_are_needed_near_a_guess():
    asked = []
    assert largest_fitting(lambda size: asked.append(size) or 3 * size, 30_001, 1, 10**6, guess=9_990) == 10_000
    assert len(asked) <= 12


def test_zeta_and_occurrences():
    assert abs(zeta(3.0) - 1.2020569031595942) < 1e-12 and abs(zeta(2.0) - 1.6449340668482264) < 1e-12
    assert abs(zeta(1.5) - 2.612375348685488) < 1e-9
    assert occurrences(100, 3, 2.0) == [60, 15, 6]


def test_a_published_text_of_coded_words_has_the_counts_of_the_formula():
    if not SHARED.is_dir():
        pytest.skip(f"no data at {SHARED}; name it with KVFOUNDRY_DATA")
    published = json.loads(gzip.decompress((SHARED / "ruler_part" / "fwe_128k.json.gz").read_bytes()))
    text = published["input"].partition("coded words. ")[2].rpartition("\nQuestion")[0]
    counts = [count for _, count in collections.Counter(text.split()).most_common()]
    words = round(counts[0] * zeta(2.0))  # the only unknown
    ours = next(
        made for shift in range(-2, 3) if (made := occurrences(words + shift, 131072 // 50, 2.0))[0] == counts[0]
    )
    assert ours[:100] == counts[:100] and sum(count > 0 for count in ours) == len(counts)


def test_an_essay_gives_exactly_its_first_words():
    essay = Essay(["One two three.", " Four five."])
    assert [essay.sentences(words) for words in (1, 3, 4, 9)] == [
        ["One"], ["One two three."], ["One two three.", "Four"], ["One two three.", "Four five."],
    ]  # fmt: skip
    assert essay.available(4) == 4 and essay.available(9) == 5


def test_words_are_plain_and_different():
    for words in (ADJECTIVES, NOUNS, VERBS):
        assert len(set(words)) == len(words) and all(re.fullmatch("[a-z]{3,10}", word) for word in words)
