"""Driver for recordings of blended prompts: the recorded model and chunks, blended at every recorded ratio."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvfoundry
from kvfoundry import compat
from kvfoundry.blend import Blend
from kvfoundry.blend.blending import Blending, Context
from kvfoundry.blend.placing import Feed, placed
from kvfoundry.blend.ropes import ropes_of
from kvfoundry.chunks import ChunkKV
from kvfoundry.chunks.chunk import ChunkLayer
from kvfoundry.chunks.passage import read_passage
from kvfoundry.layouts.record import Record

from .cases import Case
from .mapping import Claim, recipe_for

# Recorded name behind the ratio -> what our spec says beside it.
_VARIANTS = {
    "": "update=all",
    "_code_mask": "update=all, mask=corner",
    "_partial_update": "update=chosen",
    "_bykey_partial": "update=chosen, by=keys",
}


def replay(case: Case, claim: Claim) -> None:
    check = recipe_for(case, claim, int(case.parameters["total_tokens"])).spec
    with torch.inference_mode():
        _Replay(case, check).run()


@cache
def _model(folder: Path, name: str) -> LlamaForCausalLM:
    config = LlamaConfig(**json.loads((folder / f"config.{name}.json").read_text()), attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(load_file(folder / f"model.{name}.safetensors"), strict=False)
    assert not unexpected and all("rotary" in key for key in missing), (missing, unexpected)
    model.generation_config.eos_token_id = None
    return model


class _Replay:
    def __init__(self, case: Case, check: str):
        self.case, self.check = case, check
        parameters = case.parameters
        self.model = _model(case.folder, parameters["model"])
        self.ids, self.context = self.tensor("input_ids"), int(parameters["context_tokens"])
        self.question = self.ids[self.context :]
        # The numbers and not the lengths of the parameters: a BOS is in none of those.
        self.chunks = self._recorded_chunks(self.tensor("chunk_id")[: self.context].bincount().tolist())
        self.with_bos = parameters["chunks_prefilled_with_bos"]
        self.ratios, self.steps = parameters["recompute_ratios"], int(parameters["greedy_steps"])

    def tensor(self, name: str) -> Tensor:
        found = self.case.tensor(name)
        assert found is not None, f"the recording has no {name}"
        return found

    def close(self, ours: Tensor, name: str, kind: str) -> None:
        wanted = self.tensor(name)
        torch.testing.assert_close(ours, wanted, **self.case.tolerance(kind), msg=lambda text: f"{name}: {text}")

    def _recorded_chunks(self, lengths: list[int]) -> list[ChunkKV]:
        keys, values = self.tensor("chunk_keys_rotated_local"), self.tensor("chunk_values")
        local, chunks, at = self.tensor("local_position"), [], 0
        for length in lengths:
            part = slice(at, at + length)
            layers = tuple(
                ChunkLayer(Record("whole", {"keys": k, "values": v}), k.shape[0])
                for k, v in (
                    (k[part].transpose(0, 1), v[part].transpose(0, 1)) for k, v in zip(keys, values, strict=True)
                )
            )
            chunks.append(ChunkKV(self.ids[part], layers, "fullkv", torch.float32, int(local[at])))
            at += length
        return chunks

    def run(self) -> None:
        self._chunks_are_ours()
        self._keys_move()
        self._deviations()
        self._full_prefill()
        self._full_reuse()
        for ratio in self.ratios:
            for suffix, variant in _VARIANTS.items():
                self._blended(ratio, suffix, variant)

    def _chunks_are_ours(self) -> None:
        """Chunks that we compute are those that were recorded."""
        for number, recorded in enumerate(self.chunks):
            head = [int(self.ids[0])] if self.with_bos and number else []
            ours = read_passage(self.model, recorded.token_ids, context_ids=head)
            assert ours.start == recorded.start
            for own, layer in zip(ours.layers, recorded.layers, strict=True):
                torch.testing.assert_close(own.keys, layer.keys, **self.case.tolerance("kv"))
                torch.testing.assert_close(own.values, layer.values, **self.case.tolerance("kv"))

    def _keys_move(self) -> None:
        with self._blending() as blending:
            for layer, wanted in enumerate(self.tensor("keys_rerotated")):
                rows = blending.rows(layer)
                torch.testing.assert_close(
                    rows.keys[0], wanted[: self.context].transpose(0, 1), **self.case.tolerance("kv")
                )
                assert rows.positions[0, 0].tolist() == list(range(self.context))

    def _deviations(self) -> None:
        relative = {"rtol": float(self.case.entry["tolerance"]["deviation_rtol"]), "atol": 1e-6}
        for by in ("values", "keys"):
            blend = Blend.parse(f"blend(by={by}, {self.check})")
            for layer in range(1, len(self.chunks[0].layers)):
                with self._blending() as blending:
                    fresh = blending.probe(blending.everything, layer)
                    ours = blend.select.differences(blending, layer, blending.everything, *fresh)[0]
                name = f"{by[:-1]}_deviation_all_layers"
                torch.testing.assert_close(ours, self.tensor(name)[layer, : self.context], **relative)
                if f"check={layer}" in self.check:
                    torch.testing.assert_close(ours, self.tensor(f"{by[:-1]}_deviation")[: self.context], **relative)

    def _full_prefill(self) -> None:
        full = kvfoundry.KVCache(self.model)
        logits = self.model(self.ids[None], use_cache=True, **{compat.CACHE_ARGUMENT: full}).logits[0]
        self.close(logits, "full_logits", "logits")
        selected, whole, cache = self._blend("blend(ratio=1.0)")
        assert selected == list(range(len(self.ids)))
        self.close(whole, "full_logits", "logits")
        assert self._greedy(cache, whole) == self.tensor("full_greedy").tolist()

    def _full_reuse(self) -> None:
        for spec in ("blend(select=none)", f"blend(ratio=0, {self.check})"):
            selected, logits, cache = self._blend(spec)
            assert selected == list(range(self.context, len(self.ids)))
            self.close(logits, "full_reuse_suffix_logits", "logits")
            assert self._greedy(cache, logits) == self.tensor("full_reuse_greedy").tolist()

    def _blended(self, ratio: float, suffix: str, variant: str) -> None:
        name = f"r{round(100 * ratio):03d}"
        if self.case.tensor(f"{name}{suffix}_logits") is None:
            assert suffix, f"{name} was not recorded"
            return
        selected, logits, cache = self._blend(f"blend(ratio={ratio}, {variant}, {self.check})")
        rule = "_bykey" if "keys" in variant else ""
        wanted = self.case.tensor(f"{name}{rule}_selected")
        assert wanted is None or selected == wanted.tolist(), f"{name}{suffix}: {selected}"
        self.close(logits, f"{name}{suffix}_logits", "logits")
        if suffix:
            return
        if self.case.tensor(f"{name}_keys_last_layer") is not None:
            self.close(cache.layers[-1].keys[0].transpose(0, 1), f"{name}_keys_last_layer", "kv")
            self.close(cache.layers[-1].values[0].transpose(0, 1), f"{name}_values_last_layer", "kv")
        assert self._greedy(cache, logits) == self.tensor(f"{name}_greedy").tolist(), name

    def _blending(self) -> Any:
        return _Opened(self.model, self.chunks, self.question)

    def _blend(self, spec: str) -> tuple[list[int], Tensor, kvfoundry.KVCache]:
        """Computed positions, their logits [tokens, vocabulary] and the cache, with the suffix read."""
        blend = Blend.parse(spec)
        with self._blending() as blending:
            chosen = blend.select.choose(blending, blend.ratio)
            logits = blending.finish(chosen, corner_from=blend.corner_from, logits=True)
            cache = blending.cache
        mask = torch.ones(1, len(self.ids), dtype=torch.long)
        output = self.model(self.question[None], attention_mask=mask, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
        parts = [output.logits[0]] if logits is None else [logits[0], output.logits[0]]
        return [*chosen[0].tolist(), *range(self.context, len(self.ids))], torch.cat(parts), cache

    def _greedy(self, cache: kvfoundry.KVCache, logits: Tensor) -> list[int]:
        tokens, fork = [int(logits[-1].argmax())], cache.fork()
        while len(tokens) < self.steps:
            last = torch.tensor([tokens[-1:]])
            output = self.model(last, use_cache=True, **{compat.CACHE_ARGUMENT: fork})
            tokens.append(int(output.logits[0, -1].argmax()))
        return tokens


class _Opened:
    """A blending of one prompt, open while the `with` block runs."""

    def __init__(self, model: LlamaForCausalLM, chunks: list[ChunkKV], question: Tensor):
        cache = kvfoundry.KVCache(model)
        context = Context([placed(chunks)], [question])
        self.feed = Feed(context.pieces, ropes_of(model, cache), cache.devices(model), context.whole_length)
        self.blending = Blending(model, context, cache, self.feed)

    def __enter__(self) -> Blending:
        return self.blending

    def __exit__(self, *error: Any) -> None:
        self.feed.__exit__(*error)
