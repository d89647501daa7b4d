"""Law 9: fail loudly, before compute; a no-op says that it was one, and why."""

import copy

import pytest
import torch
from tiny_models import EVICTABLE, build, random_ids
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    Gemma3nTextConfig,
    GPTJConfig,
    T5Config,
)

import kvfoundry
from kvfoundry.errors import CacheStateError, KVFoundryError, MissingExtraError, SpecError, UnsupportedModelError
from kvfoundry.method import Method

from .support import EVICTING, NAMES, crossed, forward_pieces, greedy, small_spec

BAD_SPECS = {
    "": "non-empty",
    "   ": "non-empty",
    "snapkv(": "cannot read",
    "snapkv(budget=8))": "cannot read",
    "snapkv(8)": "parameters are named",
    "snapkv(budget=8, budget=9)": "",
    "snapkv(**{'budget': 8})": "once and by name",
    "snapkv(budget=2**3)": "must be a number",
    "snapkv(budget={[]: 1})": "must be a number",
    "snapkv(budget=f())": "must be a number",
    "snapkv.x(budget=8)": "cannot read",
    "snapkv(budget=8)-tova(budget=8)": "cannot read",
    "3": "cannot read",
    "snapkv": "budget must be given",
    "snapkv(window=4)": "budget must be given",
    "snapkw(budget=8)": "did you mean 'snapkv'",
    "steamingllm(budget=8)": "did you mean 'streamingllm'",
    "snapkv(budgets=8)": "did you mean 'budget'",
    "snapkv(budget=64, windows=8)": "did you mean 'window'",
    "tova(budget=0)": "keeps nothing",
    "tova(budget=-3)": "keeps nothing",
    "tova(budget=0.0)": "share in",
    "tova(budget=-0.5)": "share in",
    "tova(budget=1.5)": "share in",
    "tova(budget=nan)": "share in",
    "tova(budget=1e999)": "share in",
    "tova(budget=True)": "number of rows",
    "tova(budget=None)": "number of rows",
    "tova(budget='8')": "number of rows",
    "tova(budget=[8])": "number of rows",
    "snapkv(budget=8, window=0)": "at least 1",
    "snapkv(budget=8, window=2.5)": "whole number",
    "snapkv(budget=80, kernel=4)": "odd",
    "snapkv(budget=80, pooling=median)": "one of avg, max",
    "streamingllm(budget=8, sinks=-1)": "at least 0",
    "streamingllm(budget=8, positions=new)": "one of original, slot",
    "l2norm(budget=8, skip_layers=-1)": "at least 0",
    "tova(budget=8, granularity=head)": "one of kv_head, query_head",
    "tova(budget=8, group=median)": "one of mean, max, sum",
    "snapkv(budget=8, window=32)": "cannot hold",
    "streamingllm(budget=3, sinks=4)": "cannot hold",
    "tova(budget=8)+protect(recent=9)": "cannot hold",
    "snapkv(budget=40, window=32)+schedule(every=1, cap=8)": "cannot hold",
    "tova(budget=8)+protect(sinks=-1)": "0 or more",
    "snapkv(budget=40)+tova(budget=40)": "both set",
    "tova(budget=8)+tova(budget=8)": "given twice",
    "tova(budget=8)+protect()+protect()": "given twice",
    "protect(sinks=2)": "only refines",
    "fullkv+protect(sinks=2)": "nothing to act on",
    "fullkv+tova(budget=8)": "keeps every row",
    "tova(budget=8)+schedule(prefill=later)": "prefill must be",
    "tova(budget=8)+schedule(every=0)": "at least 1",
    "tova(budget=8)+schedule(cap=4, prefill=end)": "needs every",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_spec_is_one_clear_line(spec):
    with pytest.raises(SpecError) as caught:
        Method.parse(spec)
    message = str(caught.value)
    assert "\n" not in message and BAD_SPECS[spec] in message
    with pytest.raises(SpecError):
        kvfoundry.KVCache(None, spec)  # refused before the model is looked at


@pytest.mark.parametrize("spec", [None, 3, b"tova(budget=8)", ["tova(budget=8)"]])
def test_a_spec_that_is_no_text_is_refused(spec):
    with pytest.raises(SpecError):
        Method.parse(spec)


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(SpecError) as caught:
        Method.parse("nothing_like_it(budget=8)")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_spec_parses_back_to_an_equal_method(name):
    for budget in (12, 0.25):
        method = Method.parse(small_spec(name, budget))
        assert Method.parse(str(method)) == method and hash(Method.parse(str(method))) == hash(method)
        if method.takes_budget:
            other = method.with_budget(20)
            assert other != method and other.with_budget(budget) == method
            with pytest.raises(SpecError):
                method.with_budget(0)
        else:
            with pytest.raises(SpecError, match="takes no budget"):
                method.with_budget(20)


def test_an_encoder_decoder_is_refused_by_name():
    sizes = dict(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))
    with pytest.raises(UnsupportedModelError, match=r"T5ForConditionalGeneration.*encoder-decoder.*llama"):
        kvfoundry.KVCache(model)
    assert model.config._attn_implementation != "kvfoundry"


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64),
        Gemma3nTextConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
            num_kv_shared_layers=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_a_family_that_is_not_served_is_refused_by_name(config):
    """ALiBi added by the model itself; keys and values that layers share. Nothing is computed or left behind."""
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as caught:
        kvfoundry.KVCache(model)
    assert type(model).__name__ in str(caught.value) and config.model_type in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "config",
    [
        GPTJConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=64, rotary_dim=4, n_positions=64),
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, vocab_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_a_doubtful_family_is_exact_or_refused(config):
    """Never fluent nonsense: where a family is not refused, its logits are its own."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = random_ids(1, 12) % 60
    with torch.no_grad():
        expected = model(ids).logits
    try:
        cache = kvfoundry.KVCache(model)
        with torch.no_grad():
            found = model(ids, past_key_values=cache, use_cache=True).logits
    except UnsupportedModelError as error:
        assert type(model).__name__ in str(error)
    else:
        assert torch.allclose(found, expected, atol=1e-4)


def test_an_unknown_backend_is_refused(own_model):
    model = own_model("llama")
    with pytest.raises(KVFoundryError, match="did you mean 'sdpa'"):
        kvfoundry.attach(model, attn_implementation="spda")
    assert model.config._attn_implementation == "eager"


def test_a_missing_flash_package_is_named_before_anything_happens(own_model):
    model = own_model("llama")
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"flash-attn.*'sdpa'"):
            kvfoundry.attach(model, attn_implementation="flash_attention_2")
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("name", "family"), crossed(EVICTING, EVICTABLE))
def test_a_compressed_cache_takes_a_full_mask_or_none_and_no_third(name, family, tiny_model):
    """B29: compressed to 40 %, then (a) a full-length mask and (b) none agree; (c) a kept-length mask is an error."""
    model, ids = tiny_model(family), random_ids(1, 46)
    results = []
    for mask in (torch.ones_like(ids), None):
        cache = kvfoundry.KVCache(model, small_spec(name, 16))
        forward_pieces(model, cache, ids[:, :40], [40])
        results.append(forward_pieces(model, cache, ids[:, 40:], [1, 4, 1], mask))
    assert torch.equal(*results)
    cache = kvfoundry.KVCache(model, small_spec(name, 16))
    forward_pieces(model, cache, ids[:, :40], [40])
    for width in (16, 17, 1, 40, 42):
        with pytest.raises(CacheStateError, match=rf"attention_mask covers {width} tokens.*seen 40 and 1 are new"):
            model(ids[:, 40:41], torch.ones(1, width, dtype=torch.long), None, cache)
    assert torch.equal(forward_pieces(model, cache, ids[:, 40:], [1, 4, 1]), results[0])


def test_a_handed_over_cache_generates_the_text_of_the_in_place_path(tiny_model):
    """B29, through generate: the cache of a prompt, then the whole text with its cache."""
    model, ids = tiny_model("qwen2"), random_ids(1, 40)
    for name in EVICTING:
        in_place = greedy(model, kvfoundry.KVCache(model, small_spec(name)), ids, steps=6)
        cache = kvfoundry.KVCache(model, small_spec(name))
        forward_pieces(model, cache, ids, [40])
        text = torch.cat([ids, in_place[:, :1]], dim=1)
        assert torch.equal(greedy(model, cache, text, steps=5), in_place[:, 1:])


def test_a_mask_that_hides_stored_tokens_later_is_refused(tiny_model):
    """What was stored as a real token cannot become padding afterwards, nor the reverse."""
    model, ids = tiny_model("llama"), random_ids(2, 21)
    cache = kvfoundry.KVCache(model)
    forward_pieces(model, cache, ids[:, :20], [20])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(CacheStateError, match="mask"):
        model(ids[:, 20:], mask, None, cache)


def test_a_ready_made_4d_mask_is_refused(tiny_model):
    model, ids = tiny_model("llama"), random_ids(1, 6)
    cache = kvfoundry.KVCache(model)
    mask = torch.zeros(1, 1, 6, 6).masked_fill(
        ~torch.ones(6, 6, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    with pytest.raises(UnsupportedModelError, match="2D attention_mask"):
        model(ids, mask, None, cache)


@pytest.mark.parametrize("name", EVICTING)
def test_a_method_that_dropped_nothing_says_so_and_one_that_acted_keeps_its_share(name, tiny_model):
    """B91: half of prompts shorter and longer than every internal window: applied within 2 points, or said why not."""
    info = kvfoundry.methods()[name]
    if "budget" not in info.parameters:
        pytest.skip(f"{name} takes no budget")
    model = tiny_model("llama")
    for tokens in (4, 30, 200):
        cache = kvfoundry.KVCache(model, small_spec(name, 0.5))
        forward_pieces(model, cache, random_ids(1, tokens), [tokens])
        unused = 0.02 if cache.method.unit is None else max(0.02, 2 * 4 / tokens)  # whole chunks, the last one short
        assert cache.notes == [] and 0.5 - unused <= cache.kept_share <= 0.52
    cache = kvfoundry.KVCache(model, small_spec(name, 50))
    forward_pieces(model, cache, random_ids(1, 30), [30])
    assert cache.kept_share == 1.0 and "dropped nothing" in cache.notes[0] and "30 tokens" in cache.notes[0]


def test_a_method_without_a_layer_to_act_on_says_so(tiny_model):
    """B91: window layers only, all layers skipped, a schedule that never acts."""
    for family, spec, reason in (
        ("mistral", "tova(budget=8)", "window of their own"),
        ("llama", "l2norm(budget=8, skip_layers=2)", "skips all 2"),
        ("llama", "tova(budget=8)+schedule(prefill=never)", "never acts"),
    ):
        cache = kvfoundry.KVCache(tiny_model(family), spec)
        forward_pieces(tiny_model(family), cache, random_ids(1, 30), [30])
        assert len(cache.notes) == 1 and reason in cache.notes[0]
    full = kvfoundry.KVCache(tiny_model("llama"))
    forward_pieces(tiny_model("llama"), full, random_ids(1, 30), [30])
    assert full.notes == [] and full.kept_share == 1.0 and full.kept_rows == 30


@pytest.mark.parametrize("name", EVICTING)
def test_crop_is_in_true_tokens_or_refused(name, tiny_model):
    """Taking tokens back works while their rows are there, and says why when they are not."""
    model, ids = tiny_model("llama"), random_ids(1, 40)
    cache = kvfoundry.KVCache(model, small_spec(name))
    forward_pieces(model, cache, ids, [30])
    with pytest.raises(CacheStateError, match=r"cannot take tokens back.*fullkv"):
        cache.crop(-5)
    if cache.method.schedule.every is None:
        expected = forward_pieces(model, cache.fork(), ids[:, 30:], [1] * 10)
        forward_pieces(model, cache, random_ids(1, 7, seed=9), [3, 4])
        cache.crop(-7)
        assert torch.equal(forward_pieces(model, cache, ids[:, 30:], [1] * 10), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_crop_of_a_full_cache_forgets_exactly_those_tokens(family, tiny_model):
    """B35, the kind: windows filled, tokens taken back again and again."""
    model, ids = tiny_model(family), random_ids(1, 240)
    cache, whole = kvfoundry.KVCache(model), kvfoundry.KVCache(model)
    expected = forward_pieces(model, whole, ids, [40] + [1] * 200)
    forward_pieces(model, cache, ids, [40])
    seen = 40
    for i in range(20):
        wrong = random_ids(1, 3 + i % 5, seed=i)
        forward_pieces(model, cache, wrong, [1] * wrong.shape[1] if i % 2 else [wrong.shape[1]])
        cache.crop(-wrong.shape[1])
        found = forward_pieces(model, cache, ids[:, seen:], [4, 6])
        assert torch.allclose(found, expected[:, seen : seen + 10], atol=1e-4)
        seen += 10
    with pytest.raises(CacheStateError, match="has seen 240"):
        cache.crop(-241)
    cache.crop(-240)
    assert cache.seen_tokens == 0 and cache.nbytes == 0


def test_a_key_that_a_model_handles_itself_is_refused(tiny_model):
    cache = kvfoundry.KVCache(tiny_model("llama"))
    key, _ = cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    for touch in (
        lambda k: k.transpose(1, 2),
        lambda k: torch.cat([k, k]),
        lambda k: k[:, :1],
        lambda k: k.shape,
        lambda k: k @ k,
    ):
        with pytest.raises((UnsupportedModelError, TypeError)):
            touch(key)


def test_expect_prompt_comes_first(tiny_model):
    model = tiny_model("llama")
    cache = kvfoundry.KVCache(model)
    forward_pieces(model, cache, random_ids(1, 5), [5])
    with pytest.raises(CacheStateError, match="before the prompt has ended"):
        cache.expect_prompt(10)


def test_a_deep_copied_model_is_attached_on_its_own():
    """The copy of an attached model serves a cache of its own."""
    model = build("llama")
    kvfoundry.attach(model)
    twin, ids = copy.deepcopy(model), random_ids(1, 20)
    found = forward_pieces(twin, kvfoundry.KVCache(twin), ids, [20])
    assert torch.allclose(found, forward_pieces(model, kvfoundry.KVCache(model), ids, [20]), atol=1e-4)
