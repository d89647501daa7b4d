"""vLLM's caches as the connector opens them: what is served, and what is refused by name."""

from types import SimpleNamespace

import pytest
import torch

from kvfoundry.errors import UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import PlainBlocks
from kvfoundry.integrations.vllm.opening import check_groups, check_parallel, opened_layers


class FullAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def config(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{number}"]) for number, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups)


FULL = FullAttentionSpec(num_kv_heads=2, head_size=8, head_size_v=8)


def test_one_group_of_full_layers_is_served():
    check_groups(config(FULL))
    check_parallel(SimpleNamespace(decode_context_parallel_size=1))


@pytest.mark.parametrize(
    "specs, says",
    [((FULL, FULL), "2 groups of blocks"), ((MambaSpec(),), "MambaSpec"), ((FULL, MambaSpec()), "groups")],
)
def test_hybrid_models_are_refused_with_the_way_out(specs, says):
    with pytest.raises(UnsupportedModelError, match=rf"{says}.*--disable-hybrid-kv-cache-manager"):
        check_groups(config(*specs))


def test_context_parallelism_is_refused():
    with pytest.raises(UnsupportedModelError, match="context parallelism"):
        check_parallel(SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1))


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "ROCM_ATTN", "TURBOQUANT"])
def test_back_ends_are_refused_by_name(backend):
    """Also those of a GPU, for a cache that is not there."""
    with pytest.raises(UnsupportedModelError, match=f"{backend} on cpu is not served"):
        opened_layers({"layer.0": torch.zeros(4, 2, 16, 16)}, config(FULL), {"layer.0": backend})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_s_layers_are_plain():
    cache = {"layer.0": torch.zeros(4, 2, 16, 16, device="cuda", dtype=torch.bfloat16)}
    assert isinstance(opened_layers(cache, config(FULL), {"layer.0": "FLASH_ATTN"})["layer.0"], PlainBlocks)
