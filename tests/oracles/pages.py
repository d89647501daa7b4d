"""Driver for recordings of page reading: bounds, scores and tables by pure functions, the output by a real layer."""

from typing import Any

import torch
from torch import Tensor

import kvfoundry
from kvfoundry.reading.pages import (
    best_pages,
    evaluation_pages,
    factory_tokens,
    kernel_pages,
    page_bounds,
    page_scores,
)

from .cases import Case
from .mapping import Claim, Recipe, Unmapped, recipe_for


def replay(case: Case, claim: Claim) -> None:
    inputs = case.inputs() or {name: case.tensor(name) for name in "qkv"}
    query, key = inputs["q"], inputs["k"]
    if query is None or key is None:
        raise Unmapped("the recording has no q and k")
    query = query[:, :, -1:]
    recipe = recipe_for(case, claim, key.shape[2])
    facts = _Facts(case, query[:, :, 0], key)
    if case.tensor("eval_token_mask") is not None:
        facts.compare_whole()
        _compare_outputs(case, recipe, query, key, inputs["v"], facts)
    else:
        facts.compare_prefix()


class _Facts:
    """Parameters of the case, and comparisons of bounds, scores and tables."""

    def __init__(self, case: Case, query: Tensor, key: Tensor) -> None:
        self.case, self.query, self.key = case, query, key
        parameters = case.parameters
        self.page, self.budget, self.recent = (parameters[n] for n in ("page_size", "token_budget", "recent_size"))
        self.tokens = key.shape[2]
        self.tie = bool(parameters.get("tie", False))

    def counts(self, number: int) -> Tensor:
        return torch.full(self.key.shape[:2], number)

    def scores(self, tokens: int) -> Tensor:
        low, high = page_bounds(self.key[:, :, :tokens], self.page)
        for name, ours in (("page_min", low), ("page_max", high)):
            recorded = self.case.tensor(name)
            assert recorded is None or torch.equal(ours, recorded), f"{name} of pages of {self.page}"
        scores, recorded = page_scores(self.query, low, high), self.case.tensor("page_scores")
        kind = "page_scores" if "page_scores" in self.case.file.get("tolerance", {}) else "scores"
        torch.testing.assert_close(scores, recorded, **self.case.tolerance(kind))
        return scores

    def same_pages(self, ours: Tensor, name: str, scores: Tensor) -> None:
        recorded = self.case.tensor(name)
        assert recorded is not None, f"the recording has no {name}"
        recorded = recorded.long().sort(dim=-1).values
        if self.tie:  # equal scores may be broken another way
            assert ours.shape == recorded.shape
            torch.testing.assert_close(
                scores.gather(2, ours).sort(dim=-1).values, scores.gather(2, recorded).sort(dim=-1).values
            )
        else:
            assert torch.equal(ours, recorded), f"{name}: {ours.tolist()} against {recorded.tolist()}"

    def compare_whole(self) -> None:
        scores = self.scores(self.tokens)
        counts, pages = self.counts(scores.shape[2]), self.budget // self.page
        self.same_pages(best_pages(scores, counts, self.counts(max(1, pages))), "selected_pages", scores)
        self.same_pages(kernel_pages(scores, counts, self.counts(pages)), "kernel_pages", scores)
        mask = self.case.tensor("eval_token_mask")
        assert mask is not None
        table = evaluation_pages(scores, counts, self.counts(min(self.budget, self.tokens) // self.page))
        ours = _page_mask(table, self.page, self.tokens)
        if not self.tie:
            assert torch.equal(ours, mask.bool()), "tokens of the evaluation rule"
        prefix = self.tokens - min(self.recent, self.budget, self.tokens)
        low, high = page_bounds(self.key[:, :, :prefix], self.page)
        self.same_tokens(page_scores(self.query, low, high), "selected_tokens")

    def compare_prefix(self) -> None:
        recent = min(self.recent, self.budget, self.tokens)
        if self.case.tensor("page_scores") is not None:
            scores = self.scores(self.tokens - recent)
            budget = self.case.parameters["page_budget"]
            if budget is not None:
                self.same_pages(
                    best_pages(scores, self.counts(scores.shape[2]), self.counts(budget)), "page_indices", scores
                )
        else:
            low, high = page_bounds(self.key[:, :, : self.tokens - recent], self.page)
            scores = page_scores(self.query, low, high)
        self.same_tokens(scores, "token_indices")

    def same_tokens(self, scores: Tensor, name: str) -> None:
        slots = self.token_slots(scores)
        recorded = self.case.tensor(name)
        assert recorded is not None, f"the recording has no {name}"
        if self.tie:
            assert slots.shape == recorded.shape
        else:
            assert torch.equal(slots, recorded.long().sort(dim=-1).values), name

    def token_slots(self, scores: Tensor) -> Tensor:
        return factory_tokens(
            scores, self.counts(self.tokens), self.counts(self.budget), page=self.page, recent=self.recent
        )


def _page_mask(table: Tensor, page: int, tokens: int) -> Tensor:
    """Boolean [batch, heads, tokens]: the tokens of the pages of a table."""
    numbers = torch.arange(tokens) // page
    return (table[..., None] == numbers).any(dim=2)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    logits = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return logits.masked_fill(~mask[:, :, None], -torch.inf).softmax(dim=-1) @ value


def _compare_outputs(case: Case, recipe: Recipe, query: Tensor, key: Tensor, value: Tensor, facts: _Facts) -> None:
    """Prefill all but the last token, then the recorded step: its output under every rule."""
    if facts.tie:
        return
    kernel, chosen = case.tensor("kernel_pages"), case.tensor("selected_tokens")
    assert kernel is not None and chosen is not None
    tokens = torch.zeros(key.shape[:3], dtype=torch.bool).scatter(2, chosen.long(), True)
    everything = case.tensor("full_attn_out")
    covered = facts.budget >= facts.tokens
    wanted: dict[str, Any] = {
        "evaluation": everything if covered else case.tensor("eval_attn_out"),
        "kernel": everything
        if covered
        else _masked_attention(query, key, value, _page_mask(kernel.long(), facts.page, facts.tokens)),
        "tokens": _masked_attention(query, key, value, tokens),
    }
    base = kvfoundry.Method.parse(recipe.spec)
    for rule, output in wanted.items():
        method = kvfoundry.Method.parse(str(base).replace("quest(", f"quest(rule='{rule}', "))
        for granularity in ("query_head", "kv_head"):  # as many heads either way
            method = kvfoundry.Method.parse(str(method).replace("query_head", granularity))
            layer = method.compress(torch.zeros_like(key[:, :, :-1]), key[:, :, :-1], value[:, :, :-1])
            ours = layer.step(query, key[:, :, -1:], value[:, :, -1:])
            torch.testing.assert_close(ours, output, **case.tolerance("out"), msg=lambda m, r=rule: f"rule {r}: {m}")
