"""One tiny encoder for all retrieval tests."""

from pathlib import Path

import pytest

from kvfoundry.rag.encoders.mean_pooled import MeanPooledEncoder

from .support import tiny_encoder_folder


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder_folder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def encoder(encoder_folder: Path) -> MeanPooledEncoder:
    return MeanPooledEncoder(encoder_folder, limit=24, name="tiny")
