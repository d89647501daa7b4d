"""Models and tokenizer that many tests share, built once per session."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

# Without a GPU, Triton kernels are interpreted; Triton looks at this when it is first imported, by whomever.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tiny_models import build, build_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_built = cache(build)


def pytest_collection_finish() -> None:
    """The libraries' objects live as long as the session: no collection of garbage has to look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family, **sizes)`: shared by the whole session; caches may attach it, nothing else may change it."""
    return _built


@pytest.fixture
def own_model() -> Callable[..., PreTrainedModel]:
    """`own_model(family)`: a private copy with the same weights, under its own eager attention."""

    def fresh(family: str, **sizes: Any) -> PreTrainedModel:
        model = copy.deepcopy(_built(family, **sizes))
        model.set_attn_implementation("eager")
        return model

    return fresh


@pytest.fixture(scope="session")
def reference_model() -> Callable[..., PreTrainedModel]:
    """`reference_model(family)`: a second model with the same weights that is never attached."""
    return cache(lambda family, **sizes: build(family, **sizes))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, `w3` to `w127`."""
    return build_tokenizer()
