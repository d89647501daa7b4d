"""vLLM's objects as far as the connector looks at them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvfoundry.integrations.vllm.blocks import PlainBlocks
from kvfoundry.integrations.vllm.packing import LayerShape

SHAPE = LayerShape(2, 8, 8)


def request(name: str, tokens: int, **changed: Any) -> SimpleNamespace:
    ids = [(7 * i) % 97 for i in range(tokens)]
    held = {"mm_features": [], "prompt_embeds": None, "resumable": False, "lora_request": None, "cache_salt": None}
    return SimpleNamespace(
        **{"request_id": name, "prompt_token_ids": ids, "kv_transfer_params": None, **held, **changed}
    )


def output(scheduled: dict[str, int], new: list[Any] = (), cached: list[Any] = ()) -> SimpleNamespace:
    """One step. new: (name, blocks, computed); cached: (name, new blocks or None, computed, resumed)."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            new_block_ids=[None if more is None else (more,) for _, more, *_ in cached],
            num_computed_tokens=[computed for _, _, computed, _ in cached],
            resumed_req_ids={name for name, _, _, resumed in cached if resumed},
        ),
    )


def layers(
    blocks: int = 40, slots: int = 16, count: int = 3, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> dict[str, Any]:
    """Caches as a GPU back end has them, tokens in front of heads in memory."""
    content = SHAPE.key_dim + SHAPE.value_dim
    made = {}
    for number in range(count):
        memory = torch.zeros(blocks, slots, SHAPE.heads, content, dtype=dtype, device=device)
        made[f"layer.{number}"] = PlainBlocks(memory.transpose(1, 2), SHAPE)
    return made


def fill(held: dict[str, Any], seed: int = 0) -> None:
    """Random rows everywhere."""
    source = torch.Generator().manual_seed(seed)
    for each in held.values():
        each.cache.copy_(torch.randn(each.cache.shape, generator=source).to(each.cache.dtype))
