"""Encoders: questions and passages as vectors. `open_encoder` finds one by what the user calls it."""

from __future__ import annotations

from kvfoundry.rag.encoders.base import Encoder, Vectors
from kvfoundry.rag.encoders.minilm import NAME, minilm_folder

__all__ = ["Encoder", "Vectors", "open_encoder"]


def open_encoder(name: str = NAME, token_encoder: str | None = None, *, device: str = "cpu") -> Encoder:
    """An encoder.

    Args:
        name: "minilm", which needs no hub and makes vectors of texts and of tokens, or a sentence-transformers name or
            folder, which makes vectors of texts.
        token_encoder: a late-interaction checkpoint (name or folder) for the vectors of tokens, e.g.
            "colbert-ir/colbertv2.0".

    Raises:
        ModelLoadError: no such model, or it cannot be fetched.
        MissingExtraError: a name other than "minilm" without the extra `rag`.
    """
    from kvfoundry.rag.encoders.named import LateInteractionEncoder, SentenceEncoder

    whole: Encoder
    if name == NAME:
        from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder

        whole = MeanPooledEncoder(minilm_folder(), name=NAME, device=device)
    else:
        whole = SentenceEncoder(name, device=device)
    if token_encoder is None:
        return whole
    from kvfoundry.rag.encoders.pair import PairedEncoder

    return PairedEncoder(whole, LateInteractionEncoder(token_encoder, device=device))
