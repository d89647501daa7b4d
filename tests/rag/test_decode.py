"""Whole answers on tiny models: what policies do, what failures leave behind, and what speculation keeps."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvfoundry.chunks import ChunkKV
from kvfoundry.errors import DataError, SpecError, UnsupportedModelError
from kvfoundry.rag.decode import Decoder, Settings
from kvfoundry.rag.making import Maker
from kvfoundry.rag.policies import Seen, policies, policy
from kvfoundry.rag.prompts import Laid
from kvfoundry.rag.reader import PromptChunks, Reader, best_token
from kvfoundry.rag.room import Room
from kvfoundry.rag.speculative import Speculator
from kvfoundry.rag.summaries import KeySummary
from kvfoundry.rag.trace import Answer, Step, totals
from kvfoundry.rag.trace_file import TraceFile, load_trace

from .tiny import laid, maker_of

HALF = Room(share=0.5)


def settings(name: str = "summary", **how: Any) -> Settings:
    return Settings(policy(name), **{"room": HALF, "horizon": 1, "margin": 0.0, "new_tokens": 8, "piece": 4, **how})


def filled(maker: Maker, prompt: Laid) -> Laid:
    """The prompt with all its chunks stored."""
    for each in prompt.candidates:
        key = each.key(maker.identity)
        maker.store.put(key, maker.read(each.token_ids, each.behind))
    return prompt


def replayed(maker: Maker, prompt: Laid, answer: Answer) -> list[int]:
    """The tokens of an answer by a reader that is told at every step what is resident."""
    chunks = PromptChunks(maker, prompt)
    reader = Reader(chunks, {each: chunks.placed(each) for each in answer.steps[0].resident}, observed=False)
    tokens: list[int] = []
    for step in answer.steps:
        here, wanted = reader.residents.here, set(step.resident)
        reader.residents.exchange(here - wanted, {each: chunks.placed(each) for each in wanted - here})
        first = step.position - prompt.question_at
        ids = prompt.question[first : first + step.tokens] if step.kind == "question" else [tokens[-1]]
        logits = reader.read(ids)
        if step.position + step.tokens >= prompt.tokens:
            tokens.append(best_token(logits[-1], frozenset(), first=False))
    return tokens


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("name", sorted(policies()))
def test_answers_follow_from_what_was_resident(
    name: str, wait: bool, own_model: Callable[..., PreTrainedModel]
) -> None:
    with maker_of(own_model("llama")) as maker:
        prompt = filled(maker, laid())
        answer = Decoder(maker, settings(name, wait=wait, measure=True)).answer(prompt)
        assert answer.token_ids == replayed(maker, prompt, answer)
        assert maker.store.stats()["pinned_bytes"] == 0
    sizes = [step.resident_bytes for step in answer.steps]
    assert max(sizes) == answer.peak_bytes <= answer.room
    assert answer.steps[0].resident == [2, 3], "the best two begin"
    assert sum(step.tokens for step in answer.steps) == len(prompt.question) + 7
    for step in answer.steps:
        assert 0 <= (step.resident_share or 0.0) <= 1 and step.hit in (True, False)
        away = set(range(4)) - set(step.resident)
        assert all(step.spent[each] == 0 for each in away)
        assert all(step.spent[each] > 0 for each in step.resident)
        assert step.measure is not None and 0 < sum(step.measure) < 1
    if name in ("none", "retrieval_rank"):
        assert not any(step.started for step in answer.steps)
    record = json.loads(json.dumps(answer.record()))
    assert record["predictions"] == sum(len(step["started"]) for step in record["steps"])
    assert totals([record])["samples"] == 1


def test_a_model_that_is_split_over_devices_is_refused_by_name(own_model: Callable[..., PreTrainedModel]) -> None:
    with maker_of(own_model("llama")) as maker:
        maker.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
        with pytest.raises(UnsupportedModelError, match="split over devices"):
            Decoder(maker, settings())


def test_with_room_for_all_it_is_decoding_over_all(own_model: Callable[..., PreTrainedModel]) -> None:
    with maker_of(own_model("llama")) as maker:
        prompt = filled(maker, laid(found=4))
        decoder = Decoder(maker, settings("none", room=Room(share=1.0), measure=True))
        answer = decoder.answer(prompt)
        assert answer.token_ids == decoder.everything(PromptChunks(maker, prompt)).tokens
        for step in answer.steps:  # what was spent is what is measured when all are here
            assert step.resident_share == pytest.approx(1.0) and step.measure == pytest.approx(step.spent, abs=1e-5)


def test_estimates_of_one_token_pages_are_the_attention(own_model: Callable[..., PreTrainedModel]) -> None:
    """A page of one token has its key for a summary: then the estimate is what is spent, under either kind."""
    for kind in ("centroid", "bounds"):
        for family in ("llama", "gemma2", "gpt_oss"):
            with maker_of(own_model(family), kind=kind, page=1) as maker:
                chunks = PromptChunks(maker, laid())
                reader = Reader(chunks, {each: chunks.placed(each) for each in range(4)}, shelf=chunks.shelf())
                reader.read(chunks.prompt.question)
                look = reader.look()
            assert look.estimated is not None
            torch.testing.assert_close(look.estimated.mass, look.spent.mass, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(look.estimated.focus, look.spent.focus, atol=1e-5, rtol=1e-4)


def test_bounds_hold_and_centroids_move_with_their_chunk(own_model: Callable[..., PreTrainedModel]) -> None:
    with maker_of(own_model("llama"), page=4) as maker:
        chunks = PromptChunks(maker, laid())
        each, at = chunks.chunk(1), chunks.prompt.candidates[1].at
        moved = chunks.placed(1)
        for kind in ("centroid", "bounds"):
            summary = KeySummary.of(each, kind, 4).moved(chunks.ropes, at - each.start, 1, 1)  # type: ignore[arg-type]
            assert summary.nbytes > 0
            for own, (keys, _) in zip(summary.parts, moved.layers, strict=True):
                for page, first in enumerate(range(0, keys.shape[1], 4)):
                    rows = keys[:, first : first + 4]
                    if kind == "centroid":
                        torch.testing.assert_close(own[0][:, page], rows.mean(dim=1), atol=1e-4, rtol=1e-4)
                    else:
                        assert bool((rows >= own[0][:, page, None] - 1e-4).all())
                        assert bool((rows <= own[1][:, page, None] + 1e-4).all())
                        assert bool((own[1] - own[0]).max() < 3 * (keys.max() - keys.min()))


def test_summaries_are_kept_and_damaged_ones_made_again(
    own_model: Callable[..., PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with maker_of(own_model("llama"), tmp_path) as maker:
        prompt = filled(maker, laid())
        first = PromptChunks(maker, prompt).shelf()
        with monkeypatch.context() as patch:
            patch.setattr(KeySummary, "of", lambda *_: pytest.fail("made again"))
            again = PromptChunks(maker, prompt).shelf()
        assert torch.equal(first.parts[0][0], again.parts[0][0])
        for path in tmp_path.rglob("*.safetensors"):
            path.write_bytes(b"nothing")
        assert torch.equal(PromptChunks(maker, prompt).shelf().parts[1][0], first.parts[1][0])


def test_a_waiting_call_waits_a_delay_and_a_horizon_hides_it(own_model: Callable[..., PreTrainedModel]) -> None:
    with maker_of(own_model("llama")) as maker:
        prompt = filled(maker, laid())
        how = {"delay": 0.1, "wait": True}
        demand = Decoder(maker, settings("attention_mass", horizon=0, **how)).answer(prompt)
        assert demand.sums()["stall_seconds"] > 0.08 and demand.steps[1].stall_seconds > 0.08
        free = Decoder(maker, settings("attention_mass", horizon=99, **how)).answer(prompt)
        never = Decoder(maker, settings("attention_mass", delay=0.1)).answer(prompt)
        assert free.sums()["stall_seconds"] == never.sums()["stall_seconds"] == 0


def test_ahead_waits_less_than_on_demand_and_guesses_change_no_text(own_model: Callable[..., PreTrainedModel]) -> None:
    """B83: transfers of 20 ms, begun three calls before they are waited for, or when they are wanted."""
    less = 0
    with maker_of(own_model("llama")) as maker:
        for seed in range(10):
            prompt = filled(maker, laid(seed=seed))
            how = {"delay": 0.02, "wait": True, "new_tokens": 3, "margin": 0.0}
            demand, ahead = (
                Decoder(maker, settings("attention_mass", horizon=horizon, **how)).answer(prompt) for horizon in (0, 3)
            )
            less += ahead.sums()["stall_seconds"] < demand.sums()["stall_seconds"]
            for answer in (demand, ahead):
                assert answer.token_ids == replayed(maker, prompt, answer)
    assert less >= 9


def kvfoundry_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("kvfoundry-promote")]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_mid_transfer_leaves_nothing(
    error: type[BaseException], own_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B53: a promotion is under way when the answer is cancelled; the next one is right."""
    with maker_of(own_model("llama")) as maker:
        prompt = filled(maker, laid())
        decoder = Decoder(maker, settings("attention_mass", wait=True, horizon=0))
        right = decoder.answer(prompt)
        assert right.sums()["promotions"] > 0
        slow = Decoder(maker, settings("attention_mass", delay=20.0))
        read = Reader.read

        def failing(self: Reader, ids: Any) -> Any:
            if self.seen > prompt.tokens:
                assert kvfoundry_threads() and maker.store.stats()["pinned_bytes"] > 0
                raise error("cancelled")
            return read(self, ids)

        with monkeypatch.context() as patch:
            patch.setattr(Reader, "read", failing)
            with pytest.raises(error):
                slow.answer(prompt)
        assert not kvfoundry_threads() and maker.store.stats()["pinned_bytes"] == 0
        again = decoder.answer(prompt)
        assert (again.token_ids, again.steps[-1].resident) == (right.token_ids, right.steps[-1].resident)


def test_a_transfer_that_fails_costs_a_passage_and_no_answer(
    own_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with maker_of(own_model("llama")) as maker:
        prompt = filled(maker, laid())
        chunk = PromptChunks.chunk

        def failing(self: PromptChunks, number: int) -> ChunkKV:
            if threading.current_thread().name.startswith("kvfoundry-promote"):
                raise OSError("the disk is gone")
            return chunk(self, number)

        monkeypatch.setattr(PromptChunks, "chunk", failing)
        answer = Decoder(maker, settings("attention_mass", wait=True)).answer(prompt)
        assert answer.sums()["failed_transfers"] > 0 and answer.sums()["promotions"] == 0
        assert all(step.resident == [2, 3] for step in answer.steps)
        none = Decoder(maker, settings("none")).answer(prompt)
        assert answer.token_ids == none.token_ids


def test_what_the_store_lost_is_computed_again(own_model: Callable[..., PreTrainedModel]) -> None:
    with maker_of(own_model("llama")) as maker:
        prompt = filled(maker, laid())
        decoder = Decoder(maker, settings("attention_mass", wait=True, horizon=0))
        right = decoder.answer(prompt)
        maker.store.clear()
        again = decoder.answer(prompt)
        assert again.token_ids == right.token_ids and again.sums()["failed_transfers"] == 0
        assert len(maker.store.listing()["host"]) == 1, "only the head is put: placeholders of text stay text"


@pytest.mark.parametrize(
    ("family", "drafts"), [("llama", 1), ("llama", 4), ("gemma2", 4), ("mistral", 4), ("gpt_oss", 3)]
)
def test_speculation_says_what_decoding_over_all_says(
    family: str, drafts: int, own_model: Callable[..., PreTrainedModel]
) -> None:
    how = settings("none", new_tokens=14)
    with maker_of(own_model(family)) as maker:
        for seed in (0, 5):
            prompt = filled(maker, laid((40, 30, 25, 8), seed=seed))
            wanted = Decoder(maker, how).everything(PromptChunks(maker, prompt))
            found = Speculator(maker, how, drafts).answer(prompt)
            assert found.token_ids == wanted.tokens and found.speculation is not None
            own = found.speculation
            assert own["proposed"] >= own["accepted"] and own["rounds"] + own["accepted"] == 13
        sure = Speculator(maker, replace(how, room=Room(share=1.0)), drafts)
        everything = sure.answer(filled(maker, laid((40, 30, 25, 8), seed=5, found=4))).speculation
        assert everything is not None and everything["accepted"] == everything["proposed"], "a draft over all is right"


def seen(**how: Any) -> Seen:
    found = Seen([2, 1, 0], frozenset({1, 2}))
    found.note(*how.pop("notes"))
    return found


def test_a_wrong_guess_is_one_that_was_read_less_than_what_went() -> None:
    def step(number: int, spent: list[float], **how: Any) -> Step:
        return Step(number, "answer", 10 + number, 1, resident=[0], spent=spent, **how)

    landed = [{"candidate": 1, "replaced": [0], "seconds": 0.1}]
    steps = [step(0, [0.3, 0.0], started=[1]), step(1, [0.0, 0.2], landed=landed), step(2, [0.0, 0.4])]
    rest: dict[str, Any] = {"text": "", "token_ids": [], "f1": 0.0, "candidates": [], "room": 0, "load_seconds": 0.0}
    rest |= {"item": "a", "first_token_seconds": 0.0, "seconds": 0.0, "peak_bytes": 0}
    assert Answer(**rest, steps=steps).wrong_guesses() == 0
    assert Answer(**rest, steps=steps[:2]).wrong_guesses() == 1, "read less than what it replaced"
    assert Answer(**rest, steps=steps[:1]).wrong_guesses() == 1, "not here by the end"


def test_policies_by_what_they_know() -> None:
    spent = {"focus": [0.0, 0.2, 0.4], "mass": [0.0, 0.5, 0.1]}
    estimated = {"focus": [0.9, 0.1, 0.2], "mass": [0.2, 0.3, 0.4]}
    known = seen(notes=(spent, estimated))
    assert policy("none").values(known) == [0, 0, 0]
    assert policy("retrieval_rank").values(known) == [1 / 3, 1 / 2, 1]
    assert policy("summary").values(known) == [0.9, 0.1, 0.2]
    assert policy("summary(by=mass)").values(known) == [0.2, 0.3, 0.4]
    assert policy("attention_mass").values(known) == pytest.approx([0.3, 0.2, 0.4], rel=3e-3)
    plain, curious = policy("bandit(bonus=0)").values(known), policy("bandit(bonus=1.0)").values(known)
    assert plain == [0.9, 0.2, 0.4]
    assert curious[0] - plain[0] > curious[1] - plain[1] > 0, "what was never read gets the larger bonus"
    known.future = [0.1, 0.6, 0.2]
    assert policy("oracle").values(known) == [0.1, 0.6, 0.2]
    known.note({"focus": [0.0, 0.6, 0.0], "mass": [0.0, 0.0, 0.0]}, None)
    assert known.spent["focus"] == pytest.approx([None, 0.3, 0.3], abs=1e-9) and known.steps == [0, 2, 2]
    assert known.estimated == estimated


@pytest.mark.parametrize(
    ("spec", "why"),
    [("sumary", "did you mean 'summary'"), ("summary(by=luck)", "by must be one of"), ("none(a=1)", "takes no"),
     ("bandit(bonus=-1)", "at least 0"), ("bandit(bonis=1)", "bonus"), ("none+oracle", "one name")],
)  # fmt: skip
def test_bad_policies_are_refused_by_name(spec: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        policy(spec)


def test_a_trace_is_written_while_it_happens_and_resumed(tmp_path: Path) -> None:
    record = {"item": "a", "f1": 1.0, "stall_seconds": 0.5, "first_token_seconds": 1.0, "seconds": 2.0}
    trace = TraceFile(tmp_path, {"policy": "none"})
    trace.add(record)
    lines = tmp_path / "speculative_trace.jsonl"
    assert len(lines.read_text().splitlines()) == 2, "on disk before the end"
    with pytest.raises(DataError, match="another run is writing"):
        TraceFile(tmp_path, {"policy": "none"}, resume=True)
    trace._lock.release()  # as the system does for a process that was killed
    lines.write_text(lines.read_text() + '{"item": "b", "f1"')
    with TraceFile(tmp_path, {"policy": "none"}, resume=True) as again:
        assert again.finished == {"a"}
        again.add({**record, "item": "b", "f1": 0.0})
    found = load_trace(tmp_path / "speculative_trace.json")
    assert found["totals"]["f1"] == 0.5 and [each["item"] for each in found["samples"]] == ["a", "b"]
    assert not lines.exists()
    with pytest.raises(DataError, match="policy differ"):
        TraceFile(tmp_path, {"policy": "summary"}, resume=True)
    with pytest.raises(DataError, match="add --resume"):
        TraceFile(tmp_path, {"policy": "none"})
    with TraceFile(tmp_path, {"policy": "none"}, resume=True) as whole:
        assert whole.finished == {"a", "b"}
