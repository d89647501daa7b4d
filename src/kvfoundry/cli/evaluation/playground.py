"""The words of the older playground (KVCache-Factory): its flags, and the specs that they stand for.

Every flag keeps its meaning; what no flag says stays the default of our method, which is the paper's. A flag that could
change nothing is refused. docs/from_the_playground.md maps whole commands.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from kvfoundry.errors import KVFoundryError, unknown_name

PANEL = "Words of the older playground"

# Its names for methods, in any case; all other specs are read as they stand.
_METHODS = (
    "adakv", "cam", "fullkv", "h2o", "headinfer", "headkv", "l2norm", "minference", "minicache", "nacl", "pyramidkv",
    "quest", "scissorhands", "snapkv", "streamingllm", "think",
)  # fmt: skip
_OTHER_NAMES = {"full": "fullkv"}

_MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    "pivot": ("pivot_merge", {}),
    "weighted": ("weighted_merge", {"form": "neighbour"}),
}

# quant_method -> its flags, each with the parameter of ours that it sets.
_CODES = {
    "kivi": {"nbits": "bits", "q_group_size": "group"},
    "kvquant": {"nbits": "bits", "outlier_ratio": "outliers"},
    "gear": {"nbits": "bits", "rank": "rank", "outlier_ratio": "outlier_ratio", "q_group_size": "group"},
}
_CODE_FLAGS = ("nbits", "rank", "outlier_ratio", "q_group_size", "axis_key", "axis_value")

# The published axes of all three: keys per channel, values per token.
_PUBLISHED_AXES = (1, 0)
_GROUPED_ALONG = {0: "channels", 1: "tokens"}

Calls = list[tuple[str, dict[str, Any]]]


def _word(*flags: str, help: str) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=PANEL)


@dataclass(frozen=True)
class PlaygroundWords:
    """The flags of the older playground, each an option of every eval task."""

    max_capacity_prompts: Annotated[
        int | None,
        _word("--max_capacity_prompts", "--max_capacity_prompt", help="Rows per KV head and layer, as --budget."),
    ] = None
    kv_cache_granularity: Annotated[
        str | None,
        _word("--kv_cache_granularity", help="One kept set per query_head or per kv_head. (default: the method's)"),
    ] = None
    gqa_score_agg: Annotated[
        str | None,
        _word("--gqa_score_agg", help="Scores of the query heads of a KV head become one: mean, max or sum."),
    ] = None
    merge: Annotated[
        str | None, _word("--merge", help="Dropped rows go into kept ones: pivot (LOOK-M) or weighted (KVMerger).")
    ] = None
    head_path: Annotated[str | None, _word("--head_path", help="Head table of headkv, a JSON file.")] = None
    quant_method: Annotated[
        str | None, _word("--quant_method", help="Store rows as codes: kivi, kvquant or gear; of every method.")
    ] = None
    nbits: Annotated[int | None, _word("--nbits", help="Bits of a code. (default: the quant_method's)")] = None
    q_group_size: Annotated[int | None, _word("--q_group_size", help="Numbers per scale (kivi, gear).")] = None
    axis_key: Annotated[int | None, _word("--axis_key", help="Keys: 1 per channel, as published; 0 per token.")] = None
    axis_value: Annotated[
        int | None, _word("--axis_value", help="Values: 0 per token, as published; 1 per channel.")
    ] = None
    rank: Annotated[int | None, _word("--rank", help="Rank of what gear adds to its codes.")] = None
    outlier_ratio: Annotated[
        float | None, _word("--outlier_ratio", help="Share of the numbers kept exactly (gear, kvquant).")
    ] = None
    attn_implementation: Annotated[
        str | None,
        _word("--attn_implementation", help="Prompt attention: sdpa, eager or flash_attention_2. (default: sdpa)"),
    ] = None

    def __post_init__(self) -> None:
        """Raises KVFoundryError: an unknown choice, or a flag of codes that says nothing here."""
        _choice("--kv_cache_granularity", self.kv_cache_granularity, ("kv_head", "query_head"))
        _choice("--gqa_score_agg", self.gqa_score_agg, ("max", "mean", "sum"))
        _choice("--merge", self.merge, _MERGES)
        _choice("--quant_method", self.quant_method, _CODES)
        _choice("--attn_implementation", self.attn_implementation, ("eager", "flash_attention_2", "sdpa"))
        for flag in ("axis_key", "axis_value"):
            if getattr(self, flag) not in (None, 0, 1):
                raise KVFoundryError(f"--{flag} is 0 (per token) or 1 (per channel), not {getattr(self, flag)}.")
        if self.gqa_score_agg is not None and self.kv_cache_granularity == "query_head":
            raise KVFoundryError(
                "--gqa_score_agg makes one score of those of a KV head's query heads, and --kv_cache_granularity "
                "query_head keeps a set for each of them; leave one out."
            )
        self._check_codes()

    def _check_codes(self) -> None:
        given = [flag for flag in _CODE_FLAGS if getattr(self, flag) is not None]
        if self.quant_method is None:
            if given:
                raise KVFoundryError(f"--{given[0]} describes codes; name them with --quant_method kivi, for example.")
            return
        for flag in given:
            if flag in ("axis_key", "axis_value"):
                continue
            if flag not in _CODES[self.quant_method]:
                takers = " and ".join(name for name, flags in _CODES.items() if flag in flags)
                raise KVFoundryError(f"--{flag} is for {takers}; {self.quant_method} has nothing like it.")
        if self.quant_method != "kivi" and self._axes() != _PUBLISHED_AXES:
            raise KVFoundryError(
                f"{self.quant_method} stores keys per channel (--axis_key 1) and values per token (--axis_value 0); "
                "other axes are for kivi."
            )

    def _axes(self) -> tuple[int, int]:
        key, value = _PUBLISHED_AXES
        return (key if self.axis_key is None else self.axis_key, value if self.axis_value is None else self.axis_value)

    def codes(self) -> tuple[str, dict[str, Any]]:
        """The codec that --quant_method and its flags stand for."""
        assert self.quant_method is not None
        names = _CODES[self.quant_method]
        arguments = {ours: getattr(self, flag) for flag, ours in names.items() if getattr(self, flag) is not None}
        if self._axes() == _PUBLISHED_AXES:
            return self.quant_method, arguments
        # KIVI on other axes is no longer KIVI: plain codes, with KIVI's defaults and as many newest rows whole.
        bits, (key, value) = arguments.pop("bits", 2), self._axes()
        if bits not in (2, 4, 8):
            raise KVFoundryError(f"--nbits {bits} exists on the published axes only; other axes have 2, 4 or 8 bits.")
        along = {"keys": _GROUPED_ALONG[key], "values": _GROUPED_ALONG[value]}
        return f"int{bits}", {"group": 32, **arguments, **along, "residual": 128}

    def budgets(self, given: Sequence[str] | None) -> list[str]:
        """The values of --budget, or the one of --max_capacity_prompts."""
        if self.max_capacity_prompts is None:
            return list(given or ())
        if given:
            raise KVFoundryError("--budget and --max_capacity_prompts say the same; give one of them.")
        return [str(self.max_capacity_prompts)]


def specs(methods: Sequence[str] | None, words: PlaygroundWords) -> list[str]:
    """The specs that --method and the older flags stand for, one per method.

    methods: specs, or names of the playground in any case; none is the full cache. Beside other methods the full cache
    is their baseline, and no flag but --quant_method changes it.

    Raises:
        KVFoundryError: a flag that a method has no use for, or that its spec has settled already.
    """
    from kvfoundry.method import Call, parse_calls

    recipes = [_as_played(parse_calls(_ours(method)), words) for method in methods or ["fullkv"]]
    alone = all(calls == [("fullkv", {})] for calls in recipes)
    for flag, change, lacking in _changes(words):
        for number, calls in enumerate(recipes):
            changed = change(calls)
            if changed is not None:
                recipes[number] = changed
            elif alone or calls != [("fullkv", {})]:
                method = "+".join(name for name, _ in calls)
                raise KVFoundryError(f"{flag}: {method} {lacking}; leave one of them out.")
    return ["+".join(str(Call(name, tuple(arguments.items()))) for name, arguments in calls) for calls in recipes]


def _choice(flag: str, value: str | None, known: Iterable[str]) -> None:
    if value is not None and value not in known:
        raise KVFoundryError(unknown_name(flag, value, known))


def _ours(method: str) -> str:
    name = _OTHER_NAMES.get(method.strip().lower(), method.strip().lower())
    return name if name in _METHODS else method


def _as_played(calls: Calls, words: PlaygroundWords) -> Calls:
    """There, think prunes the channels of the rows that snapkv leaves within --max_capacity_prompts."""
    if words.max_capacity_prompts is not None and [name for name, _ in calls] == ["think"]:
        return [("snapkv", {}), *calls]
    return calls


def _changes(words: PlaygroundWords) -> list[tuple[str, Callable[[Calls], Calls | None], str]]:
    """Each flag that is given, what it makes of a recipe (None: nothing), and why it would make nothing of one."""
    found: list[tuple[str, Callable[[Calls], Calls | None], str]] = []
    if words.kv_cache_granularity is not None:
        change = partial(_set, "--kv_cache_granularity", "granularity", words.kv_cache_granularity)
        found.append(("--kv_cache_granularity", change, "chooses nothing head by head"))
    if words.gqa_score_agg is not None:
        change = partial(_set, "--gqa_score_agg", "group", words.gqa_score_agg)
        found.append(("--gqa_score_agg", change, "makes no score of those of several heads"))
    if words.head_path is not None:
        change = partial(_set, "--head_path", "table", words.head_path)
        found.append(("--head_path", change, "reads no head table"))
    if words.merge is not None:
        found.append(("--merge", partial(_merged, words.merge), "drops no rows that could be merged"))
    if words.quant_method is not None:
        found.append(("--quant_method", partial(_coded, words.codes()), ""))
    return found


def _set(flag: str, parameter: str, value: str, calls: Calls) -> Calls | None:
    """The value in every call that has such a parameter."""
    from kvfoundry.registry import entry

    takers = [name for name, _ in calls if parameter in entry(name).parameters]
    for name, arguments in calls:
        if name in takers and parameter in arguments:
            raise KVFoundryError(f"{flag} and the spec of {name} both set {parameter}; give it once.")
    changed = [(name, arguments | ({parameter: value} if name in takers else {})) for name, arguments in calls]
    return changed if takers else None


def _merged(merge: str, calls: Calls) -> Calls | None:
    from kvfoundry.recipe import stores_within

    return [*calls, _MERGES[merge]] if any(stores_within(name) for name, _ in calls) else None


def _coded(codes: tuple[str, dict[str, Any]], calls: Calls) -> Calls:
    return [codes] if calls == [("fullkv", {})] else [*calls, codes]
