"""Which tokens each selector takes, and how a spec names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import random_ids
from transformers import DynamicCache, PreTrainedModel

from kvfoundry import compat
from kvfoundry.blend import Blend, blend_chunks, selectors
from kvfoundry.blend.select.first_k_per_chunk import even_shares
from kvfoundry.errors import SpecError

from .support import passages, read_all, reused_rows

Models = Callable[..., PreTrainedModel]
LENGTHS = (10, 6, 14)


def chosen(model: PreTrainedModel, spec: str, question: int = 99) -> list[int]:
    chunks = read_all(model, passages(LENGTHS))
    tokens = blend_chunks(model, [chunks], [random_ids(4, seed=question)], blend=spec).recomputed[0].tolist()
    assert tokens == sorted(set(tokens)) and all(0 <= token < sum(LENGTHS) for token in tokens)
    return tokens


@pytest.mark.parametrize("name", [name for name in selectors() if name != "none"])
@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.1, 3), (0.16, 4), (0.5, 15), (0.7, 21), (1.0, 30)])
def test_the_ratio_is_kept_and_exact_tokens_come_last(name: str, ratio: float, count: int, tiny_model: Models) -> None:
    tokens = chosen(tiny_model("llama"), f"blend(ratio={ratio}, select={name})")
    assert len(tokens) == count
    assert sum(token >= LENGTHS[0] for token in tokens) == min(count, sum(LENGTHS[1:]))


def test_none_takes_nothing_at_any_ratio(tiny_model: Models) -> None:
    assert chosen(tiny_model("llama"), "blend(ratio=0.9, select=none)") == []


def test_the_first_tokens_of_every_chunk(tiny_model: Models) -> None:
    model = tiny_model("llama")
    assert chosen(model, "blend(ratio=0.2, select=first_k_per_chunk)") == [10, 11, 12, 16, 17, 18]
    assert chosen(model, "blend(ratio=0.5, select=first_k_per_chunk)") == [*range(10, 16), *range(16, 25)]
    assert even_shares(7, [10, 10, 10]) == [3, 2, 2]
    assert even_shares(9, [1, 10, 2]) == [1, 6, 2]
    assert even_shares(50, [4, 3]) == [4, 3]
    assert even_shares(0, []) == []


def test_random_draws_follow_their_seed(tiny_model: Models) -> None:
    model = tiny_model("llama")
    first, again, other = (chosen(model, f"blend(ratio=0.3, select=random, seed={seed})") for seed in (1, 1, 2))
    assert first == again != other


def test_what_the_question_asks_for_depends_on_the_question(tiny_model: Models) -> None:
    model = tiny_model("llama")
    spec = "blend(ratio=0.2, select=query_aware)"
    assert chosen(model, spec, question=1) != chosen(model, spec, question=2)
    assert chosen(model, "blend(ratio=0.2)", question=1) == chosen(model, "blend(ratio=0.2)", question=2)


def test_query_aware_takes_what_the_question_attends_to(tiny_model: Models, reference_model: Models) -> None:
    """In a model of one layer reused rows are those of a full prefill, and so is the attention to them."""
    sizes = {"num_hidden_layers": 1}
    parts, question = passages(LENGTHS), random_ids(4, seed=99)
    ids = torch.cat([*parts, question])[None]
    with torch.no_grad():
        weights = reference_model("llama", **sizes)(ids, output_attentions=True).attentions[0]
    attended = weights[0, :, -4:, : sum(LENGTHS)].sum(dim=(0, 1))
    attended[: LENGTHS[0]] = -1
    wanted = attended.topk(6).indices.sort().values.tolist()
    model = tiny_model("llama", **sizes)
    chunks = read_all(model, parts)
    blended = blend_chunks(model, [chunks], [question], blend="blend(ratio=0.2, select=query_aware)")
    assert blended.recomputed[0].tolist() == wanted


def test_with_a_check_layer_attention_is_weighed_by_what_is_wrong(tiny_model: Models, reference_model: Models) -> None:
    """Attention over the reused rows x distance of fresh and reused values, both from stock transformers."""
    parts, question = passages(LENGTHS), random_ids(4, seed=99)
    reference, reused = reference_model("llama"), reused_rows(reference_model("llama"), parts)
    fresh, tokens = DynamicCache(), sum(LENGTHS)
    with torch.no_grad():
        reference(torch.cat(parts)[None], use_cache=True, **{compat.CACHE_ARGUMENT: fresh})
        away = (fresh.layers[1].values - reused.layers[1].values).square().sum(dim=(1, 3)).sqrt()[0]
        how = {"output_attentions": True, "use_cache": True, compat.CACHE_ARGUMENT: reused}
        weights = reference(question[None], **how).attentions[1]
    attended = weights[0, :, :, :tokens].sum(dim=(0, 1))
    wanted = (attended * away)[LENGTHS[0] :].topk(6).indices.sort().values + LENGTHS[0]
    assert chosen(tiny_model("llama"), "blend(ratio=0.2, select=query_aware, check=1)") == wanted.tolist()
    assert wanted.tolist() != chosen(tiny_model("llama"), "blend(ratio=0.2, select=query_aware)")


@pytest.mark.parametrize(
    "spec",
    [
        "blend(ratio=0.15, select='deviation')",
        "blend(ratio=0.15, select='query_aware', check=4)",
        "blend(ratio=0.15, select='query_aware', check=(2, 8), widen=3.0)",
        "blend(ratio=0.3, select='random', seed=4)",
        "blend(ratio=0.2, select='deviation', check=(1, 3), by='keys', update='all', widen=2.0, mask='corner')",
        "blend(ratio=1.0, select='none')",
    ],
)
def test_a_spec_reads_back(spec: str) -> None:
    blend = Blend.parse(spec)
    assert Blend.parse(str(blend)) == blend
    assert str(Blend.parse(blend)) == str(blend)
    assert Blend.parse("blend") == Blend() == Blend.parse("blend(select=deviation, ratio=0.15)")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("blend(ratio=1.5)", "ratio must be from 0 to 1, got 1.5"),
        ("blend(ratio=-0.1)", "ratio must be from 0 to 1"),
        ("blend(ratio=true)", "ratio must be a finite number"),
        ("blend(select=deviatoin)", "unknown selector 'deviatoin'; did you mean 'deviation'"),
        ("blend(select=random, sed=3)", "unknown parameter 'sed'; did you mean 'seed'"),
        ("blend(select=random, by=keys)", "unknown parameter 'by'"),
        ("blend(check=0)", "check must be a layer from 1 on"),
        ("blend(check=(2, 1))", "in rising order"),
        ("blend(by=both_of_them)", "by must be one of values, keys, both"),
        ("blend(update=some)", "update must be one of"),
        ("blend(select=query_aware, check=0)", "check must be a layer from 1 on"),
        ("blend(widen=0.5)", "widen must be at least 1"),
        ("blend(mask=none)", "mask must be one of causal, corner"),
        ("blend(select=random, seed=-1)", "seed must be a whole number"),
        ("blend()+protect(sinks=4)", "and nothing beside it"),
        ("snapkv(budget=3)", "write blend"),
        ("blend(0.15)", "parameters are named"),
        ("blend(", "cannot read"),
        ("", "non-empty"),
    ],
)
def test_a_bad_spec_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        Blend.parse(spec)
    assert "\n" not in str(caught.value)
