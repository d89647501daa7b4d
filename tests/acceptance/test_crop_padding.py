"""B33, B35: tokens are taken back exactly, or not at all where a row of the batch is padding."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_ids

import kvfoundry
from kvfoundry.errors import CacheStateError


@torch.inference_mode()
def filled(model, mask: torch.Tensor) -> kvfoundry.KVCache:
    cache = kvfoundry.KVCache(model)
    model(random_ids(2, 20, seed=1), mask, None, cache)
    return cache


def test_left_padding_allows_what_lies_behind_it(tiny_model) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    cache = filled(tiny_model("llama"), mask)
    cache.crop(-13)
    assert cache.layers[0].lengths.tolist() == [[7, 7], [0, 0]]
    with pytest.raises(CacheStateError, match="padding"):
        filled(tiny_model("llama"), mask).crop(-14)


def test_right_padding_is_refused_instead_of_cut_wrongly(tiny_model) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, -3:] = 0
    with pytest.raises(CacheStateError, match="padding"):
        filled(tiny_model("llama"), mask).crop(-2)
