"""The scheduler's side: what is looked up, loaded and saved, over a request's whole life."""

import pytest

from kvfoundry.chunks import Identity
from kvfoundry.integrations.vllm.messages import Prompt, Span, Tenant, span_key
from kvfoundry.integrations.vllm.plan import Planner

from .fakes import output, request

SPAN, BLOCK = 64, 16


class Stored:
    """Spans that a store has, by their end; counts how often it is asked."""

    def __init__(self, *stops: int):
        self.stops, self.asked = set(stops), 0

    def __call__(self, prompt, span) -> bool:
        assert span.start < span.stop <= len(prompt)
        self.asked += 1
        return span.stop in self.stops


def planner(stored: Stored, clock=lambda: 0.0, marked=lambda _: None) -> Planner:
    return Planner(SPAN, BLOCK, stored, lambda _: Tenant(), marked, clock=clock)


def blocks(tokens: int, first: int = 1) -> list[int]:
    return list(range(first, first + -(-tokens // BLOCK)))


def spans(jobs) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for job in jobs for span in job.spans]


def test_a_new_prompt_is_saved_span_by_span_as_chunks_of_it_are_computed():
    plan, asked = planner(Stored()), request("a", 300)
    assert plan.matched(asked, 0) == 0
    first = plan.step(output({"a": 100}, new=[("a", blocks(112), 0)]))
    assert not first.loads and spans(first.saves) == [(0, 64)]
    second = plan.step(output({"a": 100}, cached=[("a", blocks(200)[7:], 100, False)]))
    assert spans(second.saves) == [(64, 128), (128, 192)]
    third = plan.step(output({"a": 100}, cached=[("a", blocks(300)[13:], 200, False)]))
    assert spans(third.saves) == [(192, 256)]
    assert (
        third.saves[0].blocks == tuple(blocks(256))
        and third.saves[0].token_ids.tolist() == asked.prompt_token_ids[:256]
    )
    assert not plan.step(output({"a": 1}, cached=[("a", None, 300, False)])).saves
    plan.finished("a")
    assert len(plan) == 0


def test_what_the_store_has_is_loaded_and_not_saved_again():
    plan, asked = planner(Stored(64, 128)), request("a", 300)
    assert plan.matched(asked, 0) == 128
    plan.allocated(asked, blocks(300), 128)
    waiting = plan.step(output({}))
    assert spans(waiting.loads) == [(0, 64), (64, 128)] and waiting.loads[0].first == 0
    assert waiting.loads[0].blocks == tuple(blocks(128))
    assert not plan.step(output({})).loads, "a load is asked for once"
    computed = plan.step(output({"a": 172}, new=[("a", blocks(300), 128)]))
    assert spans(computed.saves) == [(128, 192), (192, 256)]


def test_a_gap_ends_the_prefix():
    assert planner(Stored(64, 192)).matched(request("a", 300), 0) == 64


@pytest.mark.parametrize("tokens, usable", [(128, 64), (129, 128), (64, 0), (63, 0)])
def test_a_token_is_left_to_be_computed(tokens, usable):
    assert planner(Stored(64, 128)).matched(request("a", tokens), 0) == usable


def test_what_vllm_has_itself_is_not_loaded():
    plan, asked = planner(Stored(64, 128)), request("a", 300)
    assert plan.matched(asked, 80) == 48
    plan.allocated(asked, blocks(300), 48)
    (job,) = plan.step(output({})).loads
    assert job.first == 80 and spans([job]) == [(64, 128)]
    assert planner(Stored(64)).matched(asked, 80) == 0


def test_a_waiting_request_is_looked_up_once_a_second():
    now = [0.0]
    stored = Stored(64)
    plan, asked = planner(stored, lambda: now[0]), request("a", 300)
    for _ in range(50):
        assert plan.matched(asked, 0) == 64
    assert stored.asked == 2  # the span that is there, and the one that is not
    stored.stops.add(128)
    now[0] = 1.5
    assert plan.matched(asked, 0) == 128


def test_keys_of_a_prompt_are_made_once():
    """Every key names all tokens in front of it; a scheduler that made all anew would stand still."""
    made = Prompt(Tenant(salt="x"), request("a", 300).prompt_token_ids)
    models = [Identity({"format": "test", "namespace": "", "shard": str(part)}) for part in range(2)]
    keys = made.keys(models, Span(64, 128, 64))
    assert keys is made.keys(models, Span(64, 128, 64)) and keys[0].id != keys[1].id
    again = span_key(Tenant(salt="x").identity(models[0]), request("a", 300).prompt_token_ids, Span(64, 128, 64))
    assert keys[0].id == again.id and len(keys[0].context_ids) == 64


def test_a_preempted_request_starts_over_in_other_blocks():
    plan, asked = planner(Stored()), request("a", 200)
    plan.matched(asked, 0)
    plan.step(output({"a": 100}, new=[("a", blocks(112), 0)]))
    again = plan.step(output({"a": 200}, cached=[("a", blocks(200, 50), 0, True)]))
    assert spans(again.saves) == [(64, 128), (128, 192)] and again.saves[0].blocks[0] == 50


def test_a_failed_load_is_computed_from_there_on_and_not_tried_again():
    plan, asked = planner(Stored(64, 128, 192)), request("a", 300)
    plan.allocated(asked, blocks(300), plan.matched(asked, 0))
    plan.step(output({}))
    assert [job.request for job in plan.failed([blocks(300)[5]])] == ["a"]  # in the second span
    assert plan.matched(asked, 0) == 0
    assert spans(plan.step(output({"a": 220}, new=[("a", blocks(300), 80)])).saves) == [
        (64, 128),
        (128, 192),
        (192, 256),
    ]
    assert not plan.failed([1]), "a load fails once"


def test_cancelled_before_anything_happened():
    plan, asked = planner(Stored(64)), request("a", 300)
    plan.allocated(asked, blocks(300), plan.matched(asked, 0))
    plan.finished("a")
    assert not plan.step(output({})).loads


def test_requests_that_are_not_served_leave_no_trace():
    plan = Planner(SPAN, BLOCK, Stored(64), lambda _: None)
    assert plan.matched(request("a", 300), 0) == 0
    plan.allocated(request("a", 300), blocks(300), 0)
    work = plan.step(output({"a": 300}, new=[("a", blocks(300), 0)]))
    assert not work.loads and not work.saves and len(plan) == 0


HEAD, ONE, TWO = Span(0, 20, 0), Span(20, 110, 20), Span(110, 200, 20)


def test_documents_are_loaded_as_far_as_the_store_has_them_in_whole_blocks():
    plan, asked = planner(Stored(20, 110, 200), marked=lambda _: [HEAD, ONE, TWO]), request("a", 230)
    assert plan.matched(asked, 0) == 192
    plan.allocated(asked, blocks(230), 192)
    (job,) = plan.step(output({})).loads
    assert job.spans == (HEAD, ONE, TWO) and len(job.token_ids) == 200 and len(job.blocks) == 12
    assert not plan.step(output({"a": 38}, new=[("a", blocks(230), 192)])).saves
    assert plan.finished("a") == 82, "tokens that were read elsewhere are told, as far as blocks are whole"
    part, asked = planner(Stored(20, 200), marked=lambda _: [HEAD, ONE, TWO]), request("a", 230)
    assert part.matched(asked, 0) == 16, "what stands behind a gap is of no use to vLLM"


def test_a_repair_gets_all_documents_and_what_is_asked():
    asked = request("a", 230)
    plan = Planner(SPAN, BLOCK, Stored(20, 110, 200), lambda _: Tenant(), lambda _: [HEAD, ONE, TWO], repairs=True)
    assert plan.matched(asked, 128) == 64
    plan.allocated(asked, blocks(230), 64)
    (job,) = plan.step(output({})).loads
    assert job.spans == (HEAD, ONE, TWO) and job.first == 128 and job.moves
    assert list(job.following) == asked.prompt_token_ids[200:]


def test_what_was_loaded_in_front_of_a_gap_is_still_told():
    three = Span(200, 280, 20)
    plan, asked = planner(Stored(20, 110, 200, 280), marked=lambda _: [HEAD, ONE, TWO, three]), request("a", 300)
    plan.allocated(asked, blocks(300), plan.matched(asked, 0))
    plan.step(output({}))
    plan.step(output({"a": 28}, new=[("a", blocks(300), 272)]))
    plan.failed(blocks(300)[12:])  # from token 192 on
    assert plan.finished("a") == 82


def test_what_vllm_has_of_documents_is_told_too_and_what_is_computed_after_all_is_not():
    plan, asked = planner(Stored(20, 110, 200), marked=lambda _: [HEAD, ONE, TWO]), request("a", 230)
    assert plan.matched(asked, 192) == 0, "vLLM's own cache has all of it"
    plan.step(output({"a": 38}, new=[("a", blocks(230), 192)]))
    assert plan.finished("a") == 82
    plan.matched(request("b", 230), 192)
    plan.step(output({"b": 38}, new=[("b", blocks(230), 192)]))
    plan.step(output({"b": 230}, cached=[("b", blocks(230, 50), 0, True)]))  # preempted, and nothing is left of it
    assert plan.finished("b") == 0


def test_only_what_stands_directly_behind_the_head_is_saved():
    plan, asked = planner(Stored(), marked=lambda _: [HEAD, ONE, TWO]), request("a", 230)
    plan.matched(asked, 0)
    assert spans(plan.step(output({"a": 100}, new=[("a", blocks(230), 0)])).saves) == [(0, 20)]
    second = plan.step(output({"a": 130}, cached=[("a", None, 100, False)]))
    assert spans(second.saves) == [(20, 110)] and len(second.saves[0].blocks) == 7
    assert plan.finished("a") == 0


def test_a_prompt_with_wrong_marks_is_computed_and_not_stored():
    plan, asked = planner(Stored(64), marked=lambda _: []), request("a", 230)
    assert plan.matched(asked, 0) == 0
    assert not plan.step(output({"a": 230}, new=[("a", blocks(230), 0)])).saves
