"""The one place that says which recorded method is which method of ours, and with which parameters.

`CLAIMS` maps the folder of a recording to a claim: how its parameters become a method spec, and which driver compares.
Every recorded parameter must be taken or named as without effect; a parameter that is neither fails the walk.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .cases import Case, Key


class Unmapped(AssertionError):
    """A claimed method was recorded with something that the mapping does not know."""


class Parameters:
    """Recorded parameters, each of which has to be accounted for."""

    def __init__(
        self, recorded: dict[str, Any], tensor: Callable[[str], Any] = lambda name: None, case_id: str = ""
    ) -> None:
        self._left = dict(recorded)
        self._tensor = tensor
        self.case_id = case_id

    def take(self, name: str, default: Any = ...) -> Any:
        if name not in self._left and default is ...:
            raise Unmapped(f"the recording has no parameter {name!r}; it has {sorted(self._left)}")
        return self._left.pop(name, default)

    def look(self, name: str) -> Any:
        """A parameter that something else still has to take."""
        if name not in self._left:
            raise Unmapped(f"the recording has no parameter {name!r}; it has {sorted(self._left)}")
        return self._left[name]

    def nested(self, name: str) -> tuple[tuple[float, ...], ...]:
        """A recorded matrix as nested tuples, for methods that take one as a parameter."""
        tensor = self._tensor(name)
        if tensor is None:
            raise Unmapped(f"the recording has no tensor {name!r}")
        return tuple(tuple(row) for row in tensor.tolist())

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def has_tensor(self, name: str) -> bool:
        """Whether the recording holds a tensor of this name."""
        return self._tensor(name) is not None

    def without_effect(self, *names: str) -> None:
        """Parameters that the reference accepts and ignores (its notes say so)."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        if self._left:
            raise Unmapped(f"no mapping for the recorded parameters {self._left}")


@dataclass(frozen=True)
class Recipe:
    """What one recorded case asks of us: a method spec, and the layer that the tensors belong to."""

    spec: str
    layer_idx: int = 0
    num_layers: int = 1


@dataclass(frozen=True)
class Claim:
    """How a recorded method is replayed.

    driver: "tensors" (q, k, v of one layer), "positions" (no tensors: any will do), "steps" (prefill, then single
    tokens), "model" (a tiny model, prefill and teacher-forced decoding), "selector" (attention instead of q and k),
    "pages" (what a decode step reads), "one step" (values and attention of one merge), "events" (a tiny model, merges
    in decode), "decoding" (a tiny model, evictions in decode), "codes" (rows under a codec, or its flow through prefill
    and decode), "plain codes" (every mode of int2, int4 and int8), "element groups" (groups of single elements),
    "kvquant" or "gear" (rows of numbers), "channels" and "channels of a model" (pruned keys), "layer pair" (rows of
    two layers), or "blend" (chunks of a recorded model). scores: the recorded ranking tensor; lowest: it ranks what
    goes first, so the smallest stay.
    inject: the recorded scores are random draws, to be given. merged: which of keys and values are more than copies.
    draws: the recorded draws of a merge as uniform numbers [1, heads, tokens], made for the first batch row.
    unlike: the reason why a case cannot be reproduced, a known fault of the reference, or None.
    normals: the score takes the recorded normal numbers of every layer (randn0, randn1, ...) in place of its own.
    """

    driver: Literal["tensors", "positions", "steps", "model", "selector", "pages", "one step", "events", "decoding",
                    "codes", "plain codes", "element groups", "kvquant", "gear",
                    "channels", "channels of a model", "layer pair", "blend"]  # fmt: skip
    recipe: Callable[[Parameters, int], Recipe]
    scores: str = "scores"
    lowest: bool = False
    inject: bool = False
    merged: tuple[str, ...] = ()
    draws: Callable[[Case, int], Tensor] | None = None
    normals: bool = False
    unlike: Callable[[dict[str, Any]], str | None] = lambda entry: None


def _cacheblend(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("model", "model_seed", "layers", "heads", "kv_heads", "hidden")  # the recorded model has them
    p.without_effect("chunk_lengths", "suffix_length", "chunks_prefilled_with_bos", "total_tokens", "context_tokens")
    p.without_effect("recompute_ratios", "greedy_steps")  # the driver goes through them
    return Recipe(f"check={p.take('check_layer')}")


def recipe_for(case: Case, claim: Claim, tokens: int) -> Recipe:
    """The recipe of one case; Unmapped where a recorded parameter has no counterpart."""
    parameters = Parameters(case.parameters, case.tensor, case.case_id)
    recipe = claim.recipe(parameters, tokens)
    parameters.finish()
    return recipe


def _spec(name: str, **parameters: Any) -> str:
    written = (f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in parameters.items())
    return f"{name}({', '.join(written)})"


# --- KVCache-Factory and the papers' own code: capacities are absolute, window included -----------------------------


def _granularity(p: Parameters) -> dict[str, str]:
    granularity = p.take("kv_cache_granularity")
    group = p.take("gqa_score_agg", "mean")
    return {"granularity": granularity} if granularity == "query_head" else {"granularity": granularity, "group": group}


def _factory_snapkv(p: Parameters, tokens: int) -> Recipe:
    pooling = {"avgpool": "avg", "maxpool": "max"}[p.take("pooling")]
    budget, window, kernel = p.take("max_capacity_prompt"), p.take("window_size"), p.take("kernel_size")
    return Recipe(_spec("snapkv", budget=budget, window=window, kernel=kernel, pooling=pooling, **_granularity(p)))


def _factory_h2o(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("kernel_size", "pooling")
    return Recipe(_spec("h2o", budget=p.take("max_capacity_prompt"), window=p.take("window_size"), **_granularity(p)))


def _skipped_first(skipped: list[int], layer_idx: int) -> int:
    """Our `skip_layers` counts first layers; the recording lists them, and only this case's layer matters."""
    if sorted(skipped) == list(range(len(skipped))):
        return len(skipped)
    return layer_idx + 1 if layer_idx in skipped else 0


def _factory_l2norm(p: Parameters, tokens: int) -> Recipe:
    layer_idx = p.take("layer_idx")
    skip = _skipped_first(p.take("skip_layers"), layer_idx)
    spec = _spec("l2norm", budget=p.take("max_capacity_prompt"), skip_layers=skip, **_granularity(p))
    return Recipe(spec, layer_idx, max(layer_idx, skip) + 1)


def _factory_streamingllm(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("kernel_size", "pooling")
    budget = p.take("max_capacity_prompt")
    return Recipe(_spec("streamingllm", budget=budget, sinks=budget - p.take("window_size"), **_granularity(p)))


def _window(p: Parameters, capacity: str = "max_capacity_prompt") -> dict[str, Any]:
    """The parameters that every method with an observation window has."""
    pooling = {"avgpool": "avg", "maxpool": "max"}[p.take("pooling")]
    budget, window, kernel = p.take(capacity), p.take("window_size"), p.take("kernel_size")
    return {"budget": budget, "window": window, "kernel": kernel, "pooling": pooling}


def _factory_pyramidkv(p: Parameters, tokens: int) -> Recipe:
    layers = p.take("num_hidden_layers")
    spec = _spec("pyramidkv", **_window(p), beta=p.take("beta"), rule="kvcache_factory", **_granularity(p))
    return Recipe(spec, p.take("layer_idx"), layers)


def _factory_adakv(p: Parameters, tokens: int) -> Recipe:
    own = {"floor": p.take("floor"), "normalize": p.take("normalize"), "rule": "kvcache_factory"}
    layers = p.take("num_hidden_layers")
    return Recipe(_spec("adakv", **_window(p), **own, **_granularity(p)), p.take("layer_idx"), layers)


def _factory_headkv(p: Parameters, tokens: int) -> Recipe:
    own = {"table": p.nested("head_scores"), "beta": p.take("head_beta"), "rule": "kvcache_factory"}
    layers = p.take("num_hidden_layers")
    return Recipe(_spec("headkv", **_window(p), **own, **_granularity(p)), p.take("layer_idx"), layers)


def _paper_adakv(p: Parameters, tokens: int) -> Recipe:
    """Pyramid mode is our pyramid under the same head budgets; `skip` layers are uniform."""
    shared, group = p.take("gqa_support"), p.take("gqa_func")
    kept = {"granularity": "kv_head", "group": group} if shared else {"granularity": "query_head"}
    window = _window(p, "base_capacity")
    floor, normalize, skip = p.take("floor_alpha"), p.take("normalize"), p.take("skip")
    if p.take("pyram_mode", False):
        layers = _spec("pyramidkv", **window, beta=p.take("pyram_beta"), rule="adakv", **kept)
    else:
        p.without_effect("pyram_beta")
        layers = _spec("snapkv", **window, **kept)
    heads = _spec("adaptive_heads", floor=floor, normalize=normalize, rule="kvcache_factory", skip_layers=skip)
    num_layers = p.take("num_hidden_layers")
    return Recipe(f"{layers}+{heads}", p.take("layer_idx"), num_layers)


def _paper_headkv(p: Parameters, tokens: int) -> Recipe:
    own = {"table": p.nested("head_scores"), "beta": p.take("beta"), "temperature": p.take("temp"), "rule": "authors"}
    layers = p.take("num_hidden_layers")
    spec = _spec("headkv", **_window(p, "budget"), **own, granularity="query_head")
    return Recipe(spec, p.take("layer_idx"), layers)


def _paper_l2norm(p: Parameters, tokens: int) -> Recipe:
    layer_idx = p.take("layer")
    skip = _skipped_first(p.take("skip_layers"), layer_idx)
    keep, prune_after = p.take("keep_ratio"), p.take("prune_after")
    budget = math.ceil(keep * tokens) if tokens >= prune_after else tokens
    return Recipe(_spec("l2norm", budget=budget, skip_layers=skip), layer_idx, max(layer_idx, skip) + 1)


def _paper_streaming_llm(p: Parameters, tokens: int) -> Recipe:
    """`num_coming` tokens are about to be written: the reference makes room for them ahead, we count them in."""
    sinks, coming = p.take("start_size"), p.take("num_coming") or 0
    p.take("seq_len")
    return Recipe(_spec("streamingllm", budget=sinks + p.take("recent_size") - coming, sinks=sinks))


def _paper_h2o(p: Parameters, tokens: int) -> Recipe:
    prefill = p.take("prefill_len")
    heavy, recent = int(p.take("heavy_ratio") * prefill), int(p.take("recent_ratio") * prefill)
    recorded = (p.take("heavy_budget"), p.take("recent_budget"))
    if (heavy, recent) != recorded:
        raise Unmapped(f"ratios give heavy {heavy} and recent {recent}; recorded are {recorded}")
    p.without_effect("decode_steps")  # read by the driver
    return Recipe(_spec("h2o", budget=heavy + recent, window=recent, leaving="skip"))


# --- kvpress: a share is dropped, what stays is floored; one kept set per KV head, and decoding drops nothing ---------

_PROMPT_ONLY = "+schedule(prefill='end')"


def _kept(p: Parameters, tokens: int) -> int:
    return max(1, int(tokens * (1 - p.take("compression_ratio"))))


def _press_snapkv(p: Parameters, tokens: int) -> Recipe:
    window, kernel = p.take("window_size"), p.take("kernel_size")
    return Recipe(_spec("snapkv", budget=_kept(p, tokens), window=window, kernel=kernel, pooling="avg", group="mean"))


def _press_tova(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("tova", budget=_kept(p, tokens)) + _PROMPT_ONLY)


def _press_knorm(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("l2norm", budget=_kept(p, tokens), skip_layers=0))


def _press_streaming_llm(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("streamingllm", budget=_kept(p, tokens), sinks=p.take("n_sink")) + _PROMPT_ONLY)


def _press_random(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("random", budget=_kept(p, tokens), seed=p.take("seed")))


def _press_observed_attention(p: Parameters, tokens: int) -> Recipe:
    spec = _spec("h2o", budget=_kept(p, tokens), window=0, normalize=True, group="mean")
    return Recipe(spec + _PROMPT_ONLY)


def _press_expected_attention(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_of_press("ExpectedAttentionPress", p, _kept(p, tokens)))


def _press_keydiff(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("keydiff", budget=_kept(p, tokens)))


def _press_lagkv(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_of_press("LagKVPress", p, _kept(p, tokens)))


def _of_press(name: str, p: Parameters, budget: int) -> str:
    """The spec of a press that another one wraps; its own parameters lie beside those of the wrapper."""
    if name == "SnapKVPress":
        window, kernel = p.take("window_size"), p.take("kernel_size")
        return _spec("snapkv", budget=budget, window=window, kernel=kernel, pooling="avg")
    if name == "KnormPress":
        return _spec("l2norm", budget=budget, skip_layers=0)
    if name == "KeyDiffPress":
        return _spec("keydiff", budget=budget)
    if name == "TOVAPress":
        return _spec("tova", budget=budget) + _PROMPT_ONLY
    if name == "ObservedAttentionPress":
        return _spec("h2o", budget=budget, window=0, normalize=True) + _PROMPT_ONLY
    if name == "LagKVPress":
        ranking = "overall" if p.take("cross_scoring") else "partition"
        return _spec("lagkv", budget=budget, lag=p.take("lag_size"), sinks=p.take("n_sink"), ranking=ranking)
    if name == "ExpectedAttentionPress":
        return _spec(
            "expected_attention",
            budget=budget,
            future=p.take("n_future_positions"),
            sinks=p.take("n_sink"),
            covariance=p.take("use_covariance"),
            value_norm=p.take("use_vnorm"),
            # the wrapper's epsilon comes first where both have one
            epsilon=p.take("epsilon", 0.0),
        )
    raise Unmapped(f"no mapping for the wrapped press {name}")


def _press_chunkkv(p: Parameters, tokens: int) -> Recipe:
    """The reference counts chunks, a shorter last one included; our budget is that many chunks' worth of rows."""
    chunk, share = p.take("chunk_length"), 1 - p.take("compression_ratio")
    kept = max(1, int(math.ceil(tokens / chunk) * share))
    return Recipe(_of_press(p.take("press"), p, kept * chunk) + f"+{_spec('chunks', size=chunk, rest='drop')}")


def _critical(p: Parameters, tokens: int, kept: int) -> str:
    """The reference takes the first stage's share of the unrounded budget."""
    sure = max(1, int((1 - p.take("compression_ratio")) * tokens * p.take("first_stage_ratio")))
    p.without_effect("note")
    return _spec("critical", first=(sure + 1e-6) / kept, epsilon=p.take("epsilon"))


def _press_criticalkv(p: Parameters, tokens: int) -> Recipe:
    kept = max(1, int(tokens * (1 - p.look("compression_ratio"))))
    critical = _critical(p, tokens, kept)
    return Recipe(_of_press(p.take("press"), p, kept) + f"+{critical}")


def _press_block(p: Parameters, tokens: int) -> Recipe:
    blocks = _spec("blocks", size=p.take("block_size"))
    return Recipe(_of_press(p.take("press"), p, _kept(p, tokens)) + f"+{blocks}")


def _press_pyramidkv(p: Parameters, tokens: int) -> Recipe:
    # A share and not a number of rows: this pyramid starts from the fraction itself.
    share, window, kernel = 1 - p.take("compression_ratio"), p.take("window_size"), p.take("kernel_size")
    spec = _spec("pyramidkv", budget=float(share), window=window, kernel=kernel, beta=p.take("beta"), rule="kvpress")
    return Recipe(spec)


def _press_cur(p: Parameters, tokens: int) -> Recipe:
    block = p.take("local_window_size", None)
    block = block if p.take("use_local_approximation") else None
    seed = 0 if p.take("use_random_leverage") else None
    sinks, leverage = p.take("num_sinks"), p.take("leverage_type")
    return Recipe(_spec("cur", budget=_kept(p, tokens), sinks=sinks, leverage=leverage, block=block, seed=seed))


def _press_leverage(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("leverage", budget=_kept(p, tokens), sketch=p.take("sketch_dimension")))


def _press_noncausal(p: Parameters, tokens: int) -> Recipe:
    return Recipe(_spec("noncausal", budget=_kept(p, tokens), chunk=p.take("chunk_size"), padded=True))


_DECODE_PRESSES = ("KnormPress", "KeyDiffPress")


def _press_decoding(p: Parameters, tokens: int) -> Recipe:
    """Nothing goes in the prompt; in decode, every so many tokens, down to the target."""
    # Scores are of the present rows, so the buffer of hidden states is never read.
    p.without_effect("hidden_states_buffer_size")
    every, target = p.take("compression_interval"), p.take("target_size")
    inner = _of_press(p.take("base_press"), p, target)
    return Recipe(f"{inner}+{_spec('schedule', prefill='never', every=every, cap=target)}")


def _press_prefill_decoding(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("hidden_states_buffer_size")
    press, every, target = p.take("prefill"), p.take("compression_interval"), p.take("target_size")
    if press != p.take("base_press"):
        raise Unmapped("the prompt and the decoding were compressed by two different presses")
    inner = _of_press(press, p, _kept(p, tokens))
    return Recipe(f"{inner}+{_spec('schedule', every=every, cap=target)}")


def _turns_queries(entry: dict[str, Any]) -> str | None:
    """Why a decoding case cannot be ours: window queries all turned to the position of the newest token."""
    press = entry["params"]["base_press"]
    return None if press in _DECODE_PRESSES else f"{press} in decode rotates earlier queries with a wrong position"


def _press_critical_adakv(p: Parameters, tokens: int) -> Recipe:
    kept = max(1, int(tokens * (1 - p.look("compression_ratio"))))
    heads = _spec("adaptive_heads", floor=float(p.take("alpha_safeguard")), rule="kvpress")
    # Every head's first stage is a share of its own whole number of rows.
    p.without_effect("compression_ratio")
    critical = _spec("critical", first=p.take("first_stage_ratio"), epsilon=p.take("epsilon"))
    return Recipe(f"{_of_press(p.take('press'), p, kept)}+{heads}+{critical}")


def _press_adakv(p: Parameters, tokens: int) -> Recipe:
    """A wrapper: the press inside gives the scores."""
    heads = _spec("adaptive_heads", floor=float(p.take("alpha_safeguard")), rule="kvpress")
    return Recipe(f"{_of_press(p.take('press'), p, _kept(p, tokens))}+{heads}")


# --- merges -----------------------------------------------------------------------------------------------------------


def _factory_merge(p: Parameters, tokens: int) -> Recipe:
    """The cluster that merges is named in the case id alone: snap, h2o, slm or pyr."""
    piece = {"pivot": "+pivot_merge()", "weighted": "+weighted_merge(form='neighbour')"}[p.take("merge")]
    words = set(p.case_id.split("-"))
    clusters = {"snap": _factory_snapkv, "h2o": _factory_h2o, "slm": _factory_streamingllm, "pyr": _factory_pyramidkv}
    named = [recipe for word, recipe in clusters.items() if word in words]
    if len(named) != 1:
        raise Unmapped(f"the case id {p.case_id!r} must name one of {sorted(clusters)}")
    recipe = named[0](p, tokens)
    return replace(recipe, spec=recipe.spec + piece)


def _factory_cam(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("kernel_size", "pooling", "merge")
    budget, window, start = p.take("max_capacity_prompt"), p.take("window_size"), p.take("start_budget_ratio")
    return Recipe(_spec("cam", budget=budget, form="prefill", window=window, start=start, **_granularity(p)))


def drawn_around(probability: Tensor, drawn: Tensor) -> Tensor:
    """Uniform numbers that lead to the recorded draws, if our probability is the recorded one to 1e-4."""
    return torch.where(drawn > 0, probability - 1e-4, probability + 1e-4)


def _factory_cam_draws(case: Case, tokens: int) -> Tensor:
    probability, drawn, at = (case.tensor(name) for name in ("merge_prob", "merge_mask", "merge_pos"))
    assert probability is not None and drawn is not None and at is not None
    uniform = torch.ones(1, probability.shape[1], tokens)
    uniform[0, :, at.long()] = drawn_around(probability, drawn).T
    return uniform


def _press_merging(p: Parameters, tokens: int) -> Recipe:
    presses = {
        "ExpectedAttentionPress": _press_expected_attention,
        "KeyDiffPress": _press_keydiff,
        "KnormPress": _press_knorm,
        "LagKVPress": _press_lagkv,
        "PyramidKVPress": _press_pyramidkv,
        "SnapKVPress": _press_snapkv,
        "StreamingLLMPress": _press_streaming_llm,
        "TOVAPress": _press_tova,
    }
    press = p.take("press")
    if press not in presses:
        raise Unmapped(f"no mapping for the wrapped {press}")
    recipe = presses[press](p, tokens)
    piece = _spec("value_merge", threshold=p.take("similarity_threshold"), fraction=p.take("merge_fraction"))
    return replace(recipe, spec=f"{recipe.spec}+{piece}")


def _press_cam(p: Parameters, tokens: int) -> Recipe:
    """The scores of the wrapped press are given, see the driver: what is replayed is the merge."""
    p.without_effect("base_press", "hidden_states_buffer_size")
    target, every = p.take("target_size"), p.take("compression_interval")
    merge = _spec("cam_merge", form="kvpress", merge=p.take("merge_budget"), most=every)
    return Recipe(
        f"l2norm(budget={target}, skip_layers=0)+schedule(prefill='never', every={every}, cap={target})+{merge}"
    )


def _paper_cam(p: Parameters, tokens: int) -> Recipe:
    """One step of `tokens` rows. The reference merges the row two before the one that leaves; see the driver."""
    sinks, merge = p.take("start_budget"), p.take("merge_budget")
    return Recipe(_spec("cam", budget=sinks + p.take("recent_budget"), sinks=sinks, merge=merge))


# --- selectors --------------------------------------------------------------------------------------------------------


def _protected(budget: int, sinks: int, recent: int, tokens: int) -> int | float:
    """The budget; a share where it cannot hold what is protected, for a number of rows is refused then."""
    return budget if budget >= sinks + recent else (budget + 0.5) / tokens


def _nacl(p: Parameters, tokens: int) -> Recipe:
    """Proxies at the beginning see only themselves, so they protect their rows and rank nothing: they are sinks."""
    mode, proxies, sinks = p.take("proxy_mode", None) or p.take("mode"), p.take("proxy_size"), p.take("sink_size")
    listed = p.take("protected", None) or p.take("protected_indices", None) or []
    p.without_effect("protected", "protected_indices", "generator_seed", "batch", "heads", "queries", "tokens")
    if list(listed) != list(range(len(listed))):
        raise Unmapped(f"only first tokens can be protected, the recording has {listed}")
    sinks = {"suffix": 0, "edges": sinks, "prefix": proxies}[mode]
    sinks, proxies = max(sinks, len(listed)), 1 if mode == "prefix" else proxies
    budget = _protected(p.take("token_budget"), sinks, proxies, tokens)
    random, temperature = p.take("random_budget"), p.take("random_temperature")
    return Recipe(_spec("nacl", budget=budget, proxies=proxies, sinks=sinks, random=random, temperature=temperature))


def _scissorhands(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("generator_seed", "batch", "heads", "queries", "tokens", "updates")
    recent, sinks = p.take("recent_size"), p.take("sink_size")
    decay = p.take("decay")
    selection = {"topk": "top", "sample": "sample", "prob": "sample"}[p.take("selection")]
    return Recipe(
        _spec(
            "scissorhands",
            budget=_protected(p.take("token_budget"), sinks, recent, tokens),
            history=p.take("history_window"),
            recent=recent,
            sinks=sinks,
            form="sum",
            decay=1.0 if decay is None else decay,
            selection=selection,
            temperature=p.take("random_temperature"),
        )
    )


def _quest(p: Parameters, tokens: int) -> Recipe:
    """The rule is the driver's: all of them are recorded. A page larger than the budget is refused, so it is cut."""
    p.without_effect("batch", "heads", "tokens", "head_dim", "pages", "last_page_tokens", "tie", "page_budget")
    budget, page, recent = p.take("token_budget"), p.take("page_size"), p.take("recent_size")
    return Recipe(_spec("quest", budget=budget, page=page, recent=recent, skip_layers=0, granularity="query_head"))


# --- codecs -----------------------------------------------------------------------------------------------------------


def _plain_codes(p: Parameters, tokens: int) -> Recipe:
    """The driver adds the mode: all of them are recorded."""
    p.without_effect("batch", "heads", "tokens", "head_dim", "has_zero_and_constant_groups")
    along = {"channel_dim": "channels", "token_dim": "tokens"}[p.take("group_axis")]
    return Recipe(_spec(f"int{p.take('bits')}", group=p.take("group_size"), keys=along, values=along))


def _kivi(p: Parameters, tokens: int) -> Recipe:
    """Cases without a residual are of blocks alone."""
    p.without_effect("batch", "kv_heads", "tokens", "head_dim", "dtype", "key_outlier_channels")
    p.without_effect("constant_key_channels", "constant_value_tokens", "prefill_tokens", "decode_steps")
    group = p.take("group_size")
    return Recipe(
        _spec("kivi", bits=p.take("bits"), group=group, residual=p.take("residual_length", group), flow="paper")
    )


def _element_groups(p: Parameters, tokens: int) -> Recipe:
    raise Unmapped("no method of ours groups single elements; the driver takes the parameters as they are")


def _kvquant(p: Parameters, tokens: int) -> Recipe:
    p.take("kind")
    p.without_effect("calib_tokens", "tokens", "heads", "head_dim", "channels", "axis")  # shapes; read by the driver
    p.without_effect("fisher_weighted", "rope_theta")  # of the calibration and of the model; read by the driver
    levels = "fitted"
    if "zero_point_rounded_and_clamped" in p:
        levels = "grid" if p.take("zero_point_rounded_and_clamped") else "uniform"
    share = round(1 - p.take("sparsity_threshold"), 9)
    first = max(0, p.take("first_few_fp16", -1))
    # Q-Norm has no parameter of its own in the recordings: the moments that it needs are there or not.
    q_norm = p.has_tensor("norm_scale")
    spec = f"kvquant(bits={p.take('bits')}, outliers={share}, first={first}, levels={levels}, q_norm={q_norm})"
    return Recipe(spec)


def _gear(p: Parameters, tokens: int) -> Recipe:
    p.take("kind")
    # Shapes, and figures that follow from the others on the recorded shapes; read by the driver.
    p.without_effect("batch", "heads", "tokens", "head_dim", "group_covers", "outliers_per_side_per_row", "method")
    p.without_effect("levels", "group_size")
    rank, loops = p.take("rank"), max(1, p.take("power_loops"))
    return Recipe(_spec("gear", bits=p.take("bits"), rank=rank, outlier_ratio=p.take("sparsity"), loops=loops))


# --- codecs that are no quantizers ------------------------------------------------------------------------------------


def _factory_think(p: Parameters, tokens: int) -> Recipe:
    """The energy of the queries is that of the last 32, whatever the window of the selection."""
    granularity = p.take("kv_cache_granularity", "query_head")
    think = _spec("think", ratio=p.take("ratio"), window=32, recent=p.take("recent_size"), granularity=granularity)
    if "pruner-only" in p.case_id:
        return Recipe(think)
    return Recipe(f"{_spec('snapkv', **_window(p), granularity=granularity)}+{think}")


def _press_think(p: Parameters, tokens: int) -> Recipe:
    ratio = p.take("key_channel_compression_ratio")
    return Recipe(_spec("think", ratio=ratio, window=p.take("window_size"), recent=0))


def _press_composed(p: Parameters, tokens: int) -> Recipe:
    """One press after the other; both take the window."""
    presses, window = p.take("presses"), p.look("window_size")
    if presses != ["SnapKVPress", "ThinKPress"]:
        raise Unmapped(f"no mapping for the presses {presses} after each other")
    first = _press_snapkv(p, tokens)
    think = _spec("think", ratio=p.take("key_channel_compression_ratio"), window=window, recent=0)
    return Recipe(f"{first.spec}+{think}")


def _minicache(p: Parameters, tokens: int) -> Recipe:
    p.without_effect("batch", "kv_heads", "tokens", "head_dim", "special", "eps")
    share, count = p.take("retention_ratio"), p.take("retention_count")
    if count is not None:  # a share that rounds up to this many rows
        share = max(0.0, (count - 0.5) / tokens)
    return Recipe(_spec("minicache", t=float(p.take("interpolation")), retention=float(share)))


CLAIMS: dict[Key, Claim] = {
    ("blend", "cacheblend"): Claim("blend", _cacheblend),
    ("eviction", "kvcache_factory", "think"): Claim("channels", _factory_think),
    ("eviction", "papers", "think"): Claim("channels", _factory_think),
    ("eviction", "kvpress", "composed"): Claim("channels of a model", _press_composed),
    ("eviction", "kvpress", "think"): Claim("channels of a model", _press_think),
    ("eviction", "kvcache_factory", "minicache"): Claim("layer pair", _minicache),
    ("cross_layer", "minicache"): Claim("layer pair", _minicache),
    ("eviction", "kvcache_factory", "snapkv"): Claim("tensors", _factory_snapkv),
    ("eviction", "kvcache_factory", "h2o"): Claim("tensors", _factory_h2o),
    ("eviction", "kvcache_factory", "l2norm"): Claim("tensors", _factory_l2norm, lowest=True),
    ("eviction", "kvcache_factory", "streamingllm"): Claim("tensors", _factory_streamingllm),
    ("eviction", "kvcache_factory", "pyramidkv"): Claim("tensors", _factory_pyramidkv),
    ("eviction", "kvcache_factory", "adakv"): Claim("tensors", _factory_adakv),
    ("eviction", "kvcache_factory", "headkv"): Claim("tensors", _factory_headkv),
    ("eviction", "papers", "adakv"): Claim("tensors", _paper_adakv),
    ("eviction", "papers", "headkv"): Claim("tensors", _paper_headkv),
    ("eviction", "papers", "snapkv"): Claim("tensors", _factory_snapkv),
    ("eviction", "papers", "l2norm"): Claim("tensors", _paper_l2norm, scores="norms", lowest=True),
    ("eviction", "papers", "streaming_llm"): Claim("positions", _paper_streaming_llm),
    ("eviction", "papers", "h2o"): Claim("steps", _paper_h2o),
    ("eviction", "kvcache_factory", "merge_pivot"): Claim("tensors", _factory_merge, merged=("keys", "values")),
    ("eviction", "kvcache_factory", "merge_weighted"): Claim("tensors", _factory_merge, merged=("keys", "values")),
    ("eviction", "kvcache_factory", "cam"): Claim(
        "tensors", _factory_cam, merged=("values",), draws=_factory_cam_draws
    ),
    ("eviction", "kvcache_factory", "nacl"): Claim("selector", _nacl, scores="reduced"),
    ("eviction", "kvcache_factory", "scissorhands"): Claim("selector", _scissorhands, scores="importance"),
    ("eviction", "kvcache_factory", "quest"): Claim("pages", _quest),
    ("eviction", "papers", "cam"): Claim("one step", _paper_cam),
    ("eviction", "kvpress", "cam"): Claim("events", _press_cam),
    ("eviction", "kvpress", "merging"): Claim("model", _press_merging, merged=("values",)),
    ("selection", "nacl"): Claim("selector", _nacl, scores="reduced_scores"),
    ("selection", "scissorhands"): Claim("selector", _scissorhands, scores="importance"),
    ("quantization", "kvquant"): Claim("kvquant", _kvquant),
    ("quantization", "gear"): Claim("gear", _gear),
    ("quantization", "plain"): Claim("plain codes", _plain_codes),
    ("quantization", "kivi"): Claim("codes", _kivi),
    ("quantization", "kvcache_factory_hqq"): Claim("element groups", _element_groups),
    ("pages", "quest"): Claim("pages", _quest),
    ("eviction", "kvpress", "snapkv"): Claim("model", _press_snapkv),
    ("eviction", "kvpress", "pyramidkv"): Claim("model", _press_pyramidkv),
    ("eviction", "kvpress", "adakv"): Claim("model", _press_adakv, scores="inner_scores"),
    ("eviction", "kvpress", "tova"): Claim("model", _press_tova),
    ("eviction", "kvpress", "knorm"): Claim("model", _press_knorm),
    ("eviction", "kvpress", "streaming_llm"): Claim("model", _press_streaming_llm),
    ("eviction", "kvpress", "random"): Claim("model", _press_random, inject=True),
    ("eviction", "kvpress", "observed_attention"): Claim("model", _press_observed_attention),
    ("eviction", "kvpress", "expected_attention"): Claim("model", _press_expected_attention),
    ("eviction", "kvpress", "keydiff"): Claim("model", _press_keydiff),
    ("eviction", "kvpress", "lagkv"): Claim("model", _press_lagkv),
    ("eviction", "kvpress", "chunkkv"): Claim("model", _press_chunkkv),
    ("eviction", "kvpress", "criticalkv"): Claim("model", _press_criticalkv),
    ("eviction", "kvpress", "critical_adakv"): Claim("model", _press_critical_adakv),
    ("eviction", "kvpress", "block"): Claim("model", _press_block),
    ("eviction", "kvpress", "cur"): Claim("model", _press_cur, normals=True),
    ("eviction", "kvpress", "leverage_score"): Claim("model", _press_leverage, normals=True),
    ("eviction", "kvpress", "non_causal_attn"): Claim("model", _press_noncausal),
    ("eviction", "kvpress", "decoding"): Claim("decoding", _press_decoding, unlike=_turns_queries),
    ("eviction", "kvpress", "prefill_decoding"): Claim("decoding", _press_prefill_decoding, unlike=_turns_queries),
}

# Folders whose name is not that of our method; every other folder is looked up under its own name without underscores.
_OTHER_NAMES = {"knorm": "l2norm", "observedattention": "h2o"}


def claim_of(folder: Key, offered: Collection[str]) -> Claim | None:
    """The claim for a folder, by the last parts of its path; None for a method that we do not offer.

    Raises Unmapped when the method is among the `offered` names and nothing maps the folder.
    """
    for depth in {len(key) for key in CLAIMS}:
        if folder[-depth:] in CLAIMS:
            return CLAIMS[folder[-depth:]]
    name = folder[-1].replace("_", "")
    name = _OTHER_NAMES.get(name, name)
    if name in offered:
        raise Unmapped(f"{name} is offered, but nothing maps the recordings in {'/'.join(folder[-3:])}")
    return None
