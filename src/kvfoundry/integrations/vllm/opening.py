"""From vLLM's caches to layers that rows can be read from and written to; what is not served is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvfoundry.errors import UnsupportedModelError
from kvfoundry.integrations.vllm.blocks import (
    CPU_BACKEND,
    PLAIN_BACKENDS,
    LayerBlocks,
    Order,
    OrderedBlocks,
    PlainBlocks,
    check_cache,
    found_order,
)
from kvfoundry.integrations.vllm.packing import LayerShape

HYBRID_REMEDY = (
    "start vLLM with --disable-hybrid-kv-cache-manager where its layers are full and sliding-window attention"
)


def check_groups(kv_cache_config: Any) -> None:
    """UnsupportedModelError unless all layers keep every token, in one group of blocks."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"its layers keep different tokens ({len(groups)} groups of blocks); {HYBRID_REMEDY}."
        )
    for spec in _specs(groups[0]).values():
        name = type(spec).__name__
        if name != "FullAttentionSpec":
            raise UnsupportedModelError(
                f"its layers keep other things than every token's rows ({name}); {HYBRID_REMEDY}."
            )


def check_parallel(parallel: Any) -> None:
    """UnsupportedModelError where one request's tokens are spread over workers."""
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        raise UnsupportedModelError("context parallelism spreads the tokens of a request over workers.")


def opened_layers(
    kv_caches: Mapping[str, Tensor], kv_cache_config: Any, backends: Mapping[str, str]
) -> dict[str, LayerBlocks]:
    """Every layer's blocks, by vLLM's name. backends: the attention back end of every layer."""
    check_groups(kv_cache_config)
    specs = _specs(kv_cache_config.kv_cache_groups[0])
    orders: dict[tuple[Any, ...], Order] = {}
    opened: dict[str, LayerBlocks] = {}
    for name, cache in kv_caches.items():
        spec, backend = specs[name], backends.get(name, "unknown")
        shape = LayerShape(spec.num_kv_heads, spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size)
        if cache.device.type == "cpu" and backend == CPU_BACKEND:
            check_cache(cache, shape)  # before the kernel is asked, which trusts what it is given
            key = (shape, cache.shape[2], cache.dtype)
            if key not in orders:
                orders[key] = cpu_order(shape, cache)
            opened[name] = OrderedBlocks(cache, shape, orders[key])
        elif cache.device.type == "cuda" and backend in PLAIN_BACKENDS:
            opened[name] = PlainBlocks(cache, shape)
        else:
            raise UnsupportedModelError(
                f"the attention back end {backend} on {cache.device.type} is not served; use one of "
                f"{', '.join((CPU_BACKEND, *PLAIN_BACKENDS))} (--attention-backend)."
            )
    if not opened:
        raise UnsupportedModelError("it has no attention layer with a cache of its own.")
    return opened


def cpu_order(shape: LayerShape, cache: Tensor) -> Order:
    """The order of vLLM's CPU kernel on this machine, for caches like this one.

    UnsupportedModelError where the kernel is another one, or does not take such a cache.
    """
    import torch

    slots = cache.shape[2]
    try:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        isa = _get_attn_isa(cache.dtype, slots, shape.key_dim)

        def put(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
            ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(slots), isa)

        return found_order(shape.heads, slots, shape.key_dim, cache.dtype, put)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        raise UnsupportedModelError(f"vLLM's CPU kernel cannot be asked ({type(error).__name__}: {error}).") from error


def _specs(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    own = getattr(spec, "kv_cache_specs", None)
    return dict(own) if own else dict.fromkeys(group.layer_names, spec)
