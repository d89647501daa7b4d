"""Attention through the flash-attn package, for prompts and for full reads; masks it cannot express go to SDPA."""

import importlib.util

from torch import Tensor

from kvfoundry.errors import MissingExtraError
from kvfoundry.kernels.attention import sdpa
from kvfoundry.visibility import Visibility


def require() -> None:
    """Raise one line when the package is missing, before anything is computed."""
    if importlib.util.find_spec("flash_attn") is None:
        raise MissingExtraError(
            "attn_implementation='flash_attention_2' needs the package flash-attn (pip install flash-attn); "
            "or choose 'sdpa' or 'eager'."
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `naive.attend`. Sinks, masks from positions and CPU tensors take the SDPA path."""
    if visibility.pattern == "masked" or sinks is not None or not query.is_cuda or key.shape[3] != value.shape[3]:
        return sdpa.attend(query, key, value, visibility, scaling=scaling, softcap=softcap, sinks=sinks)
    require()
    from flash_attn import flash_attn_func

    output = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        causal=visibility.pattern != "full",  # by the lower right corner
        softcap=softcap or 0.0,
    )
    return output.transpose(1, 2)
