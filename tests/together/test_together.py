"""Methods that read a prompt together, and decode in common batches, give what each gives alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, KV_HEADS, LAYERS, left_padded, random_ids

import kvfoundry
from kvfoundry.errors import CacheStateError, DataError, UnsupportedModelError
from kvfoundry.generation import Generation
from kvfoundry.method import Method
from kvfoundry.together.join import joined, kinship
from laws.support import METHODS, small_spec

TIMES = ("ttft_seconds", "ms_per_token", "seconds")


def words(tokens: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(tokens, seed=seed).tolist())


PROMPTS = [words(40, 1), words(17, 2), words(29, 3)]


def timeless(generations: list[Generation]) -> list[dict[str, Any]]:
    return [{name: value for name, value in asdict(found).items() if name not in TIMES} for found in generations]


def apart(model, tokenizer, prompts, methods, limits, **options) -> list[list[Generation]]:
    return [
        kvfoundry.generate(
            model, tokenizer, prompts, method, limits, details=True, do_sample=False, **options
        )
        for method in methods
    ]


# Three budgets of every registered name: one that all prompts exceed, a share, and one that the short prompt is within.
BUDGETS = (8, 12, 0.5, 20)
SPECS = {name: list(dict.fromkeys(small_spec(name, budget) for budget in BUDGETS)) for name in METHODS}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_x(name, family, tiny_model, tokenizer):
    model = tiny_model(family)
    specs = SPECS[name] + ["fullkv", "snapkv(budget=12, window=4)"]
    found = kvfoundry.generate_together(model, tokenizer, PROMPTS, specs, 12)
    for spec, together, alone in zip(specs, found, apart(model, tokenizer, PROMPTS, specs, 12), strict=True):
        assert timeless(together) == timeless(alone), spec
