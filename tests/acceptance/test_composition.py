"""B10: every wrapper over every scorer is set up like the scorer; with nothing to drop it is the plain model."""

from __future__ import annotations

import pytest
import torch
from laws.support import EVICTING, small_spec
from tiny_models import random_ids

import kvfoundry
from kvfoundry.errors import SpecError
from kvfoundry.method import Method

# Refinements that any evicting method may be asked to take; a pair that makes no sense must be refused when built.
PIECES = (
    "adaptive_heads()", "pyramid_layers()", "pivot_merge()", "weighted_merge()", "value_merge()", "chunks(size=4)",
    "blocks(size=8)", "critical()", "protect(sinks=1)", "schedule(every=2)", "quest(budget=64, page=4)",
    "park()",
)  # fmt: skip
SCORERS = [name for name in EVICTING if kvfoundry.methods()[name].kind == "method"]


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("name", SCORERS)
def test_a_composition_is_set_up_like_its_parts(name, piece, tiny_model) -> None:
    """With room for all rows it is the plain model; with less, the inner method finds its embedding, window, sums."""
    try:
        roomy, tight = (Method.parse(f"{small_spec(name, budget)}+{piece}") for budget in (64, 14))
    except SpecError as refusal:
        assert len(str(refusal)) > 20  # by name, with a reason, when it is built
        return
    model, ids = tiny_model("qwen3"), random_ids(1, 42, seed=8)
    with torch.inference_mode():
        logits = {}
        for method in (None, roomy, tight):
            cache = kvfoundry.KVCache(model, method)
            logits[method] = torch.cat(
                [model(ids[:, a:b], None, None, cache).logits[:, -1] for a, b in ((0, 40), (40, 41), (41, 42))]
            )
    torch.testing.assert_close(logits[roomy], logits[None], rtol=0, atol=1e-4)
    assert torch.isfinite(logits[tight]).all()
    assert cache.kept_rows < 42
