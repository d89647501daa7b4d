"""Driver for recordings of selectors: they were given attention, not queries and keys.

A key per token, each a unit vector of its own, and the logarithm of the attention as queries give that very attention
back, so that our scores, protection and choice run as they always do.
"""

from dataclasses import replace

import torch
from torch import Tensor

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.kernels.attention import backend
from kvfoundry.layouts import DenseRows
from kvfoundry.layouts.base import Reading
from kvfoundry.method import Method
from kvfoundry.selection.draws import GivenDraws
from kvfoundry.selection.evict import evict
from kvfoundry.selection.evidence import Evidence
from kvfoundry.selection.scores.given import GivenScores

from .cases import Case
from .mapping import Claim, Unmapped, recipe_for
from .replay import _compare_kept


def replay(case: Case, claim: Claim) -> None:
    updates, given = _attention(case)
    tokens = given.shape[-1] if given is not None else updates[0].shape[-1]
    recipe = recipe_for(case, claim, tokens)
    method = kvfoundry.Method.parse(recipe.spec)
    budget = min(case.parameters["token_budget"], tokens)
    if given is not None:
        method, updates = method.replace(score=GivenScores((given,))), [torch.full((*given.shape[:2], 1, tokens), 1.0)]
    layout = _layout(updates[0])
    for number, attention in enumerate(updates):
        evidence = _evidence(method, layout, attention)
        if method.score.accumulates:
            columns = method.score.observe(evidence)
            layout = layout.with_columns(columns)
            evidence = replace(evidence, rows=layout.view())
        if given is None:
            _compare_scores(case, claim, method.score(evidence), number)
    if case.tensor("random_draws") is not None:
        method = _drawn_as_recorded(case, method, evidence, budget)
    rows = torch.full((updates[0].shape[0],), budget)
    kept = evict(method, layout, evidence, rows)
    positions = kept.view().head_positions.long()
    if method.protect.sinks + method.protect.recent > budget:
        _compare_overfull(case, method, positions, budget, recipe.spec)
        return
    plain = method.replace(choose=Method.__dataclass_fields__["choose"].default)
    for name, wanted in _retained(case).items():
        if name == "retained_with_random":
            _compare_sampled(case, method, positions, wanted)
            continue
        with_random = name == "indices"
        found = positions if with_random else evict(plain, layout, evidence, rows).view().head_positions.long()
        found = found.expand(wanted.shape[0], wanted.shape[1], -1)
        scores, ties = case.tensor(claim.scores), None
        if not case.entry.get("tie_free_all", True):
            scores, ties = case.tensor(claim.scores)[..., :tokens], torch.zeros(wanted.shape[:2], dtype=torch.bool)
        _compare_kept(
            found,
            (found >= 0).sum(-1),
            wanted,
            tie_free=ties,
            scores=scores,
            tolerance={"rtol": 1e-5, "atol": 1e-6},
            where=recipe.spec,
        )


def _attention(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """Attention [batch, heads, queries, tokens] of every update, or scores [batch, heads, tokens] that were given."""
    recorded, inputs = case.tensor("attention"), case.inputs() or {}
    if recorded is not None:
        return (list(recorded) if recorded.dim() == 5 else [recorded]), None
    if "scores" in inputs:
        return [], inputs["scores"]
    if "attn" not in inputs:
        raise Unmapped("the recording has neither attention nor scores")
    second = [inputs["attn2"]] if case.parameters.get("decay") is not None else []
    return [inputs["attn"], *second], None


def _layout(attention: Tensor) -> DenseRows:
    batch, heads, _, tokens = attention.shape
    keys = torch.eye(tokens).expand(batch, heads, -1, -1).contiguous()
    positions = torch.arange(tokens).expand(batch, -1)
    return DenseRows.of_tokens(keys, keys.clone(), positions, None, tokens - 1)


def _evidence(method: Method, layout: DenseRows, attention: Tensor) -> Evidence:
    batch, _, queries, tokens = attention.shape
    query = attention.clamp(min=1e-30).log()
    window = min(method.score.window, queries)
    # Every query may see every row: who sees what is in the attention already.
    positions = torch.full((batch, queries), tokens - 1)
    return Evidence(
        query,
        positions,
        query[:, :, queries - window :],
        positions[:, queries - window :],
        layout.view(),
        Reading(backend("eager"), 1.0),
        False,
        torch.full((batch,), tokens),
        0,
        1,
        method.group,
    )


def _compare_scores(case: Case, claim: Claim, scores: Tensor, number: int) -> None:
    recorded = case.tensor(claim.scores)
    assert recorded is not None, f"the recording has no {claim.scores}"
    if recorded.dim() == 4:
        recorded = recorded[number]
    elif claim.scores == "importance" and case.parameters.get("decay") is not None and number == 0:
        return  # recorded after the second update only
    mode = case.parameters.get("proxy_mode", case.parameters.get("mode"))
    if mode == "prefix":
        return  # all zero, but for the proxies
    first = case.parameters["sink_size"] if mode == "edges" else 0
    kind = {"reduced_scores": "scores"}.get(claim.scores, claim.scores)
    torch.testing.assert_close(scores[..., first:], recorded[..., first:], **case.tolerance(kind))


def _retained(case: Case) -> dict[str, Tensor]:
    named = {name: case.tensor(name) for name in ("indices", "retained", "retained_with_random")}
    found = {name: tensor for name, tensor in named.items() if tensor is not None}
    assert found, "the recording keeps nothing"
    return found


def _drawn_as_recorded(case: Case, method: Method, evidence: Evidence, budget: int) -> Method:
    """The method with the recorded draws: of rows neither protected nor best, the drawn ones come first."""
    draws, weights = case.tensor("random_draws"), case.tensor("random_weights")
    assert draws is not None and weights is not None
    scores = method.score(evidence)
    protected = method.protect.mask(evidence.rows, evidence.seen, torch.full_like(evidence.seen, budget))
    uniform = torch.zeros_like(scores)
    wanted = draws.shape[1]
    for number, (picked, weight) in enumerate(zip(draws.long(), weights, strict=True)):
        batch, head = divmod(number, scores.shape[1])
        best = budget - int(protected[batch, head].sum()) - wanted
        open_ = scores[batch, head].masked_fill(protected[batch, head], -torch.inf)
        certain = protected[batch, head].scatter(0, open_.topk(best).indices, True)
        candidates = (~certain).nonzero().flatten()
        uniform[batch, head, candidates[picked]] = 1.0
        temperature = method.choose.temperature
        ranked = scores[batch, head, candidates]
        logits = ranked / temperature if temperature > 0 else torch.zeros_like(ranked)
        recorded = weight[: candidates.numel()]
        torch.testing.assert_close(logits.softmax(0), recorded / recorded.sum(), rtol=1e-4, atol=1e-6)
    return method.replace(choose=replace(method.choose, draws=GivenDraws((uniform,)), temperature=0.0))


def _compare_sampled(case: Case, method: Method, positions: Tensor, wanted: Tensor) -> None:
    """The generator is the recording's own: count, order and what any draw keeps are the facts."""
    assert positions.shape == wanted.shape
    assert bool((positions.diff(dim=-1) > 0).all())
    always = case.tensor("always_retained_mask")
    for batch, head in torch.cartesian_prod(torch.arange(wanted.shape[0]), torch.arange(wanted.shape[1])).tolist():
        kept = set(positions[batch, head].tolist())
        tokens = int(wanted.max()) + 1
        sure = set(range(method.protect.sinks)) | set(range(tokens - method.protect.recent, tokens))
        if always is not None:
            sure = set(always[batch, head].nonzero().flatten().tolist())
        assert sure <= kept, f"{sorted(sure - kept)} must stay whatever is drawn"


def _compare_overfull(case: Case, method: Method, positions: Tensor, budget: int, spec: str) -> None:
    """More is protected than the budget holds: refused as a number of rows; under a share the newest come first.

    Which of the first tokens stay beside them differs: the reference lets the earliest go, we keep them.
    """
    share = dict(method.calls[0].arguments)["budget"]
    assert isinstance(share, float)
    try:
        method.with_budget(budget)
    except SpecError as error:
        assert "always kept" in str(error)
    else:
        raise AssertionError(f"{spec}: a budget of {budget} rows below what is protected must be refused")
    for name, wanted in _retained(case).items():
        assert positions.shape == wanted.shape, f"{spec}: {name}"
        recent = min(budget, method.protect.recent)
        newest = wanted[..., -recent:].long()
        assert torch.equal(positions[..., -recent:], newest), f"{spec}: the newest rows of {name}"
        assert bool((positions[..., :-recent] < method.protect.sinks).all())
