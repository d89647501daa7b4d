"""Fewer token vectors: those alike become one (hierarchical pooling; Clavié et al., 2024, arXiv 2409.14683)."""

from torch import Tensor

from kvfoundry.rag.extra import load


def pool_tokens(tokens: Tensor, factor: int) -> Tensor:
    """Unit vectors [tokens, dimensions] -> about 1/factor of them, each the mean of a Ward cluster, made unit again.

    The first vector, that of the whole text, stays.

    Raises:
        MissingExtraError: factor above 1 without the extra `rag`.
    """
    if factor == 1:
        return tokens
    library = load("sentence_transformers", "token pooling").multi_vector_encoder.modules
    return library.HierarchicalTokenPooling(pool_factor=factor).pool_one(tokens)
