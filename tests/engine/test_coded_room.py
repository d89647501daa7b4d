"""Room for codes in the engine is whole groups of tokens, whatever room is asked for: kernels read whole tiles."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build, random_ids

import kvfoundry
from kvfoundry.engine.coded import Coded


@pytest.mark.parametrize("room", [1, 50, 64, 100])
def test_room_is_whole_groups(room: int) -> None:
    model = build("llama")
    cache = kvfoundry.KVCache(model, "kivi(bits=2, group=32, residual=32)")
    with torch.inference_mode():
        model(random_ids(1, 150), past_key_values=cache, use_cache=True)
    rows = cache.attention_layers[0].rows
    found = Coded.needed(rows, 1, room)
    assert found % 32 == 0
    assert 151 <= found < 151 + max(room, 32) + 32
