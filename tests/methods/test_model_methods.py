"""Methods that read more of a model than one layer's tensors, against formulas written out on the model's own parts."""

import pytest
import torch
from tiny_models import EVICTABLE, left_padded, random_ids
from transformers import DynamicCache

import kvfoundry
from kvfoundry.errors import KVFoundryError, UnsupportedModelError
from kvfoundry.selection.refine import ProjectedValues


def prefilled(model, spec, ids, mask=None, pieces=None):
    cache = kvfoundry.KVCache(model, spec)
    cache.expect_prompt(ids.shape[1])
    with torch.no_grad():
        start = 0
        for size in pieces or [ids.shape[1]]:
            stop = start + size
            own = None if mask is None else mask[:, :stop]
            positions = None if own is None else (own.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
            model(ids[:, start:stop], attention_mask=own, position_ids=positions, past_key_values=cache)
            start = stop
    return cache


class Queries:
    """Raw (before RoPE) queries of a Llama layer: [batch, heads, tokens, dim]."""

    def __init__(self, model, layer):
        self.found, attention = None, model.model.layers[layer].self_attn
        attention.q_proj.register_forward_hook(self._note)
        self.dim = attention.head_dim

    def _note(self, module, args, output):
        self.found = output.unflatten(-1, (-1, self.dim)).transpose(1, 2)


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention_equals_the_written_out_formula(covariance, own_model):
    model, ids = own_model("llama"), random_ids(1, 30)
    queries = Queries(model, 1)
    cache = prefilled(model, f"expected_attention(budget=11, future=6, sinks=2, covariance={covariance})", ids)
    reference, full = own_model("llama"), DynamicCache()
    with torch.inference_mode():
        reference(ids, past_key_values=full)
    keys, values = full.layers[1].keys[0], full.layers[1].values[0]
    raw = queries.found[0, :, 2:]
    mean = raw.mean(dim=1)
    centred = raw - mean[:, None]
    spread = centred.transpose(1, 2) @ centred / centred.shape[1]
    rotary = reference.model.rotary_emb
    cos, sin = rotary(keys[None], torch.arange(30, 36)[None])
    basis = torch.eye(16)
    half = torch.cat([-basis[:, 8:], basis[:, :8]], dim=1)
    turn = torch.stack([basis * cos[0, p] + half * sin[0, p] for p in range(6)]).mean(dim=0)
    scores = torch.zeros(2, 30)
    for head in range(8):
        k = keys[head // 4]
        logits = k @ (mean[head] @ turn) / 4
        if covariance:
            logits = logits + ((k @ (turn.T @ spread[head] @ turn)) * k).sum(-1) / 32
        scores[head // 4, 2:] += logits[2:].softmax(-1) / 4
    scores = scores * values.norm(dim=-1)
    for head in range(2):
        best = {0, 1, *(2 + scores[head, 2:].topk(9).indices).tolist()}
        assert set(cache.layers[1].positions[0, head].tolist()) == best


@pytest.mark.parametrize("pieces", [[10, 20], [1] * 30, [29, 1]])
def test_expected_attention_accumulates_over_pieces(pieces, own_model):
    """With eviction at the prompt's end only, pieces make no difference: the statistics are those of all queries."""
    ids, mask = left_padded([30, 17])
    spec = "expected_attention(budget=9, future=8, sinks=2)+schedule(prefill='end')"
    whole = prefilled(own_model("llama"), spec, ids, mask)
    parts = prefilled(own_model("llama"), spec, ids, mask, pieces)
    for one, other in zip(whole.attention_layers, parts.attention_layers, strict=True):
        assert torch.equal(one.positions, other.positions)


def test_the_statistics_are_counted_and_follow_the_batch(own_model):
    model, ids = own_model("llama"), random_ids(2, 30)
    spec = "expected_attention(budget=12, future=8, sinks=2)+schedule(every=4)"
    cache = prefilled(model, spec, ids)
    layer = cache.layers[0]
    held = sum(t.numel() * t.element_size() for t in layer._acting._summary.values())
    assert held >= 2 * 8 * 16 * 16 * 4
    rows_only = sum(t.untyped_storage().nbytes() for t in layer.rows.tensors())
    assert layer.nbytes == rows_only + held
    twin = cache.fork()
    twin.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(twin.layers[0]._acting._summary["mean"][0], layer._acting._summary["mean"][1])
    with torch.inference_mode():
        model(ids[:, :1], None, None, twin)
    assert not torch.equal(twin.layers[0]._acting._summary["mean"], layer._acting._summary["mean"])
    quiet = prefilled(model, "expected_attention(budget=12, future=8, sinks=2)", ids)
    assert not quiet.layers[0]._acting._summary


@torch.no_grad()
@pytest.mark.parametrize("family", EVICTABLE)
def test_critical_selection_equals_the_written_out_formula(family, own_model):
    model, ids = own_model(family), random_ids(1, 30)
    spec = "snapkv(budget=16, window=4, kernel=1)"
    plain, refined = prefilled(model, spec, ids), prefilled(model, f"{spec}+critical", ids)
    for index, layer in enumerate(refined.layers):
        if not layer.evicts:
            continue
        module = model.model.layers[index].self_attn
        full = prefilled(model, None, ids).layers[index]
        first_stage = prefilled(model, "snapkv(budget=8, window=4, kernel=1)", ids).layers[index]
        for head in range(2):
            kept = set(layer.positions[0, head].tolist())
            # Half the budget by score alone: what a budget of half keeps.
            assert set(first_stage.positions[0, head].tolist()) <= kept and len(kept) == 16
        weight = module.o_proj.weight
        norms = [
            sum(
                (full.values[0, h // 4] @ weight[:, 16 * h : 16 * h + 16].T).abs().sum(-1)
                for h in range(4 * g, 4 * g + 4)
            )
            for g in range(2)
        ]
        ours = _norms(full, module)
        torch.testing.assert_close(ours[0], torch.stack(norms) / 4, rtol=1e-4, atol=1e-5)
    assert str(plain.method) != str(refined.method)


def _norms(layer, module):
    from kvfoundry.selection.evidence import Evidence

    query = torch.zeros(1, 8, 0, 16)
    positions = torch.zeros(1, 0, dtype=torch.long)
    evidence = Evidence(
        query, positions, query, positions, layer.rows.view(), None, False, layer.real, 0, 1, module=module
    )
    return ProjectedValues()._norms(evidence)


def test_critical_selection_refuses_a_module_without_output_projection(own_model):
    model = own_model("llama")
    for block in model.model.layers:
        block.self_attn.something = block.self_attn.o_proj
    layer = prefilled(model, None, random_ids(1, 8)).layers[0]
    with pytest.raises(UnsupportedModelError, match="Identity has no output projection named o_proj"):
        _norms(layer, torch.nn.Identity())
    module = torch.nn.Module()
    module.o_proj = torch.nn.Linear(64, 8)
    with pytest.raises(UnsupportedModelError, match="does not read 128 value channels"):
        _norms(layer, module)


def test_a_model_without_rope_is_refused_when_the_cache_is_built():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50))
    with pytest.raises(KVFoundryError):
        kvfoundry.KVCache(model, "expected_attention(budget=8)")
    ids = torch.randint(0, 50, (1, 20))
    cache = prefilled(model.eval(), "snapkv(budget=12, window=4)+critical", ids)
    assert cache.layers[0].lengths.tolist() == [[12, 12]]


def test_leverage_of_a_key_alone_in_its_direction_is_high(own_model):
    """Against the definition with the projection matrix of all features, on the model's own keys before RoPE."""
    from kvfoundry.rope import Rope
    from kvfoundry.selection.scores.leverage import Leverage

    model, ids = own_model("llama"), random_ids(1, 30)
    full = prefilled(model, None, ids).layers[1]
    cache = prefilled(model, "leverage(budget=10, sketch=12)", ids)
    raw = Rope.of(model, 1).unrotate(full.keys, full.positions)
    places = torch.arange(16 * 12).expand(1, 2, -1)
    from kvfoundry.selection.scores.uniform_random import hashed_normal

    phi = hashed_normal(0, 1, places).view(1, 2, 16, 12) / 12**0.5
    features = (raw - raw.mean(dim=2, keepdim=True)) @ phi
    gram = features.mT @ features + 0.01 * torch.eye(12)
    leverage = (features @ gram.inverse() @ features.mT).diagonal(dim1=-2, dim2=-1)
    for head in range(2):
        wanted = set(leverage[0, head].topk(10).indices.tolist())
        assert set(cache.layers[1].positions[0, head].tolist()) == wanted
    assert Leverage(12) == Leverage(12, draws=(phi,))


def test_the_random_numbers_are_normal():
    from kvfoundry.selection.scores.uniform_random import hashed_normal

    numbers = hashed_normal(3, 5, torch.arange(20000).expand(1, 2, -1))
    assert abs(float(numbers.mean())) < 0.02 and abs(float(numbers.std()) - 1) < 0.02
    assert abs(float((numbers[0, 0] * numbers[0, 1]).mean())) < 0.03
    assert float((numbers.abs() < 0.6745).float().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("padded", [False, True])
def test_noncausal_attention_written_out(padded):
    from kvfoundry.method import Method

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    layer = Method.parse(f"noncausal(budget=5, chunk=4, padded={padded})").compress(query, key, value)
    received = torch.zeros(2, 11)
    for head in range(4):
        for start in (0, 4, 8):
            q, k = query[0, head, start : start + 4], key[0, head // 2, start : start + 4]
            if padded and start == 8:
                q, k = torch.cat([q, torch.zeros(1, 8)]), torch.cat([k, torch.zeros(1, 8)])
            weights = (q @ k.T).softmax(dim=-1).sum(dim=0)
            received[head // 2, start : start + 4] += weights[: min(4, 11 - start)] / 2
    scores = received * value[0].norm(dim=-1)
    smooth = torch.nn.functional.avg_pool1d(scores[None], 3, 1, 1)[0]
    for head in range(2):
        assert set(layer.positions[0, head].tolist()) == set(smooth[head].topk(5).indices.tolist())
