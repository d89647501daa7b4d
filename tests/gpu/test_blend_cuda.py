"""Blending on a CUDA device: its kernels, and prompts from every tier against the CPU; skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blend.support import asked, passages, read_all
from tiny_models import random_ids
from transformers import PreTrainedModel

import kvfoundry
from kvfoundry.blend import blend_chunks
from kvfoundry.blend.layer import Pass
from kvfoundry.kernels.attention import naive, scattered, sdpa
from kvfoundry.visibility import Visibility

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Models = Callable[..., PreTrainedModel]
DEVICE = torch.device("cuda:0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [3, 200, 3001])
def test_halves_joined_are_the_whole(rows: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    chosen = torch.randperm(rows)[: max(1, rows // 5)].sort().values
    step = Pass([chosen, chosen[: len(chosen) // 2 + 1]])
    positions = torch.arange(rows, device=DEVICE).expand(2, 1, rows)
    query = torch.randn(2, 8, step.columns, dim, dtype=dtype, device=DEVICE)
    key, value = torch.randn(2, 2, 2, rows, dim, dtype=dtype, device=DEVICE)
    visibility = Visibility(step.positions(DEVICE), positions, "masked")
    span = step.sight(0, torch.tensor([rows, rows]), DEVICE)[1]
    wanted = naive.attend(query.double(), key.double(), value.double(), visibility, scaling=dim**-0.5)
    for block in (16, 512):
        found = scattered.attend(query, key, value, visibility, span, scaling=dim**-0.5, block=block)
        for row, own in enumerate(step.tokens):
            torch.testing.assert_close(
                found[row, :, : len(own)].double(), wanted[row, :, : len(own)],
                rtol=0.0, atol=1e-4 if dtype == torch.float32 else 2e-2,
            )  # fmt: skip


@pytest.mark.parametrize(("queries", "rows"), [(2, 3), (32, 3001), (300, 300), (1000, 5000)])
def test_the_last_tokens_of_a_text_see_all_of_it(queries: int, rows: int) -> None:
    query = torch.randn(2, 8, queries, 128, dtype=torch.bfloat16, device=DEVICE)
    key, value = torch.randn(2, 2, 2, rows, 128, dtype=torch.bfloat16, device=DEVICE)
    positions = torch.arange(rows, device=DEVICE).expand(2, rows)
    visibility = Visibility(positions[:, rows - queries :], positions[:, None], "behind")
    wanted = naive.attend(query.float(), key.float(), value.float(), visibility, scaling=0.1)
    found = sdpa.attend(query, key, value, visibility, scaling=0.1)
    torch.testing.assert_close(found.float(), wanted, rtol=0.0, atol=2e-2)


# In bfloat16 a selector that looks at rows may choose other tokens on another device.
CASES = [
    *((spec, torch.float32) for spec in ("blend(ratio=0.2)", "blend(ratio=0.2, select=query_aware, check=1)")),
    *((f"blend(ratio={ratio}, select=first_k_per_chunk)", torch.bfloat16) for ratio in (0, 0.2, 1.0)),
]


@pytest.mark.parametrize(("spec", "dtype"), CASES, ids=str)
def test_prompts_from_every_tier_are_those_of_the_cpu(
    spec: str, dtype: torch.dtype, own_model: Models, tmp_path: Path
) -> None:
    parts, question = passages((40, 57, 33)), random_ids(6, seed=9)
    model = own_model("llama").to(dtype)
    wanted = asked(model, blend_chunks(model, [read_all(model, parts)], [question], blend=spec)).float()
    model = model.to(DEVICE)
    keys = [kvfoundry.Identity.of(model).key(own) for own in parts]
    for store_spec in ("device:64MiB", "host:64MiB", f"disk:{tmp_path / 'kv'}:64MiB"):
        with kvfoundry.ChunkStore(store_spec) as store:
            for key, chunk in zip(keys, read_all(model, parts), strict=True):
                assert store.put(key, chunk)
            chunks = [store.get(key) for key in keys]
            found = asked(model, blend_chunks(model, [chunks], [question], blend=spec)).float().cpu()
        bound = 1e-3 if dtype == torch.float32 else 5e-2 * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=bound)
