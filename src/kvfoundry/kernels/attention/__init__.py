"""Attention of queries over rows. The backend names are those of transformers' `attn_implementation`."""

from collections.abc import Callable

from torch import Tensor

from kvfoundry.errors import KVFoundryError, unknown_name
from kvfoundry.kernels.attention import flash, naive, sdpa

AttentionKernel = Callable[..., Tensor]

_BACKENDS: dict[str, AttentionKernel] = {
    "sdpa": sdpa.attend,
    "eager": naive.attend,
    "flash_attention_2": flash.attend,
}


def backend(name: str) -> AttentionKernel:
    """The attention function of a backend name.

    Raises KVFoundryError for a name that is not one of sdpa, eager, flash_attention_2, and MissingExtraError when
    flash-attn is asked for and not installed.
    """
    if name not in _BACKENDS:
        raise KVFoundryError(unknown_name("attn_implementation", name, _BACKENDS))
    if name == "flash_attention_2":
        flash.require()
    return _BACKENDS[name]
