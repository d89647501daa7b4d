"""Which tiers a store has: the short form, keywords, and one sentence for everything that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfoundry.chunks import ChunkStore, StoreConfig
from kvfoundry.chunks.config import (
    DeviceConfig,
    DiskConfig,
    FilesConfig,
    HostConfig,
    RedisConfig,
    parsed_size,
    store_config,
)
from kvfoundry.errors import MissingExtraError, StoreError


def test_the_short_form() -> None:
    config = store_config(
        "device:cuda:1:4GiB, host:512 MiB,disk:/var/cache/kv:20GB,redis://me@cache:6380/2?size=1TiB&timeout=0.5&prefix=rag,"
        "s3://bucket/kv?size=100GB&retry=9"
    )
    assert config.tiers == (
        DeviceConfig(size=4 << 30, device="cuda:1"),
        HostConfig(size=512 << 20),
        DiskConfig(path=Path("/var/cache/kv"), size=20 * 10**9),
        RedisConfig(url="redis://me@cache:6380/2", size=1 << 40, timeout=0.5, prefix="rag"),
        FilesConfig(url="s3://bucket/kv", size=100 * 10**9, retry=9),
    )
    assert config.write == "through" and config.workers == 2


def test_keywords() -> None:
    config = store_config(
        tiers=[{"kind": "host", "size": "2GiB"}, {"kind": "disk", "path": "~/kv, with: odd name", "size": 10**9}],
        write="back",
    )
    assert config == StoreConfig(
        tiers=(HostConfig(size=2 << 30), DiskConfig(path=Path("~/kv, with: odd name"), size=10**9)), write="back"
    )
    assert store_config(config, workers=3).workers == 3 and store_config("host:1GB", write="back").write == "back"


@pytest.mark.parametrize(
    "text, size", [("1", 1), (7, 7), ("2GiB", 2 << 30), ("1.5 kB", 1500), ("3TB", 3 * 10**12), ("4mib", 4 << 20)]
)
def test_sizes(text: Any, size: int) -> None:
    assert parsed_size(text) == size


BAD = [
    ("", "one or more tiers"), ("host:1GB,", "one or more tiers"), ("host", "is no tier"), ("ram:1GB", "is no tier"),
    ("host:lots", "'2GiB'"), ("host:0", "holds nothing"), ("host:-1GB", "'2GiB'"), ("host:a:1GB", "is no tier"),
    ("device", "is no tier"), ("disk:", "is no tier"), ("disk:/var/kv", "needs a size"),
    ("host:1GB,host:2GB", "of each"),
    ("redis://h?cap=1GB", "'cap'"), ("redis://h?size=x", "size"), ("redis://h?timeout=0", "timeout"),
    ("redis://h?prefix=a%20b", "prefix"), ("s3://b?prefix=a", "'prefix'"), ("simplecache::s3://b", "is no tier"),
    ("s3://b::zip://x", "chained"), ("redis://:secret@h", "KVFOUNDRY_REDIS_PASSWORD"),
    ("redis://u:secret@h/0?size=1GB", "KVFOUNDRY_REDIS_PASSWORD"), ("s3://k:secret@bucket", "no password"),
    ("redis://h?password=secret", "'password'"), ("device:tpu:1GB", "is not there"),
    ("device:cuda:77:1GB", "is not there"),
]  # fmt: skip


@pytest.mark.parametrize("text, said", BAD, ids=[text for text, _ in BAD])
def test_what_cannot_be_read_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(StoreError) as refused:
        ChunkStore(text)
    message = str(refused.value)
    assert said in message and "secret" not in message.replace("no secret", "") and "\n" not in message
    assert len(message) < 320


@pytest.mark.parametrize(
    "settings",
    [
        {"tiers": []}, {"tiers": [{"kind": "tape"}]}, {"tiers": [{"kind": "host"}]}, {"tier": []}, {},
        {"tiers": [{"kind": "host", "size": "1GB", "color": "red"}]},
        {"tiers": [{"kind": "host", "size": "1GB"}], "write": "up"},
        {"tiers": [{"kind": "redis", "url": "redis://:secret@h"}]}, {"tiers": [{"kind": "host", "size": True}]},
        {"tiers": [{"kind": "files", "url": "s3://b?secret=x"}]},
        {"tiers": [{"kind": "host", "size": 1}], "workers": 0},
    ],
)  # fmt: skip
def test_odd_keywords_are_one_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(StoreError) as refused:
        ChunkStore(**settings)
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtraError, match=r"kvfoundry\[store\]"):
        ChunkStore("host:1MB,redis://127.0.0.1")
    with pytest.raises((MissingExtraError, StoreError)):
        ChunkStore("nosuchscheme://x/y")
