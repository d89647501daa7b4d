"""transformers' own attention for a while, for what ours is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from kvfoundry.attention import attach, backend_of


@contextmanager
def own_attention(model: PreTrainedModel, implementation: str | None = None) -> Iterator[None]:
    """The model under transformers' attention; under ours, with its backend as it was, on exit.

    implementation: "eager", say; by default the backend that the model has.
    """
    attach(model)
    backend = backend_of(model)
    model.set_attn_implementation(implementation or backend)
    try:
        yield
    finally:
        attach(model, attn_implementation=backend)
