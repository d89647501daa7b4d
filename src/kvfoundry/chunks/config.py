"""Which tiers a store has: keyword configuration, and the short form in one string.

    host:2GiB,disk:/var/cache/kv:20GiB,redis://cache.local:6379/0?size=50GiB

Tiers are separated by commas and asked from left to right, so the fastest comes first:

    device:SIZE  device:cuda:1:SIZE     memory of the device that reads the chunks (the first GPU, or the CPU)
    host:SIZE                           host memory, pinned where there is a GPU
    disk:FOLDER:SIZE                    a folder, shared by several processes
    redis://HOST[:PORT][/DB][?size=SIZE&timeout=SECONDS&retry=SECONDS&prefix=WORD]      or rediss:// for TLS
    SCHEME://PATH[?size=SIZE&timeout=SECONDS&retry=SECONDS]                 any file system of fsspec: s3://, file://

SIZE is bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB; a remote tier without one may hold 16 GiB.
Passwords are never part of an address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvfoundry.errors import StoreError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
REMOTE_SIZE = 16 << 30


def parsed_size(value: Any) -> int:
    """Bytes of "2GiB", "500 MB" or 1048576; ValueError for anything else, and for nothing at all."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"a size is bytes or text such as '2GiB', got {value!r}")
    found = _SIZE.fullmatch(str(value).strip())
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS:
        raise ValueError(f"a size is bytes or text such as '2GiB', got {value!r}")
    size = int(float(found[1]) * _UNITS[unit])
    if size < 1:
        raise ValueError(f"a tier of {value!r} holds nothing")
    return size


Size = Annotated[int, BeforeValidator(parsed_size)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceConfig(_Config):
    """Memory of the device that reads the chunks. device: "auto" is the first GPU, or the CPU without one."""

    kind: Literal["device"] = "device"
    size: Size
    device: str = "auto"


class HostConfig(_Config):
    """Host memory."""

    kind: Literal["host"] = "host"
    size: Size


class DiskConfig(_Config):
    """A folder. size: None only to look at one, not to write."""

    kind: Literal["disk"] = "disk"
    path: Path
    size: Size | None = None


class _RemoteConfig(_Config):
    url: str
    size: Size = REMOTE_SIZE
    timeout: float = Field(default=2.0, gt=0, le=600)
    retry: float = Field(default=5.0, ge=0, le=3600)

    @field_validator("url")
    @classmethod
    def _no_secret(cls, url: str) -> str:
        # the message must not repeat the address: it would print what must stay hidden
        if urlsplit(url).password is not None or urlsplit(url).query:
            raise ValueError(
                "an address holds no password and no further parameters; the password of a Redis store comes from the "
                "environment variable KVFOUNDRY_REDIS_PASSWORD, credentials of other stores from their own settings"
            )
        return url


class RedisConfig(_RemoteConfig):
    """A Redis database. timeout: seconds for one chunk; retry: seconds without a try after a failure."""

    kind: Literal["redis"] = "redis"
    prefix: str = Field(default="kvfoundry", pattern=r"^[\w.-]{1,64}$")


class FilesConfig(_RemoteConfig):
    """Any file system of fsspec."""

    kind: Literal["files"] = "files"


TierConfig = Annotated[DeviceConfig | HostConfig | DiskConfig | RedisConfig | FilesConfig, Field(discriminator="kind")]


class StoreConfig(_Config):
    """tiers: fastest first. write: "through" writes every tier before `put` returns, "back" the slower ones later.

    workers: threads that promote, and write later.
    """

    tiers: tuple[TierConfig, ...] = Field(min_length=1)
    write: Literal["through", "back"] = "through"
    workers: int = Field(default=2, ge=1, le=64)

    @model_validator(mode="after")
    def _one_of_each(self) -> StoreConfig:
        kinds = [tier.kind for tier in self.tiers if tier.kind in ("device", "host", "disk", "redis")]
        if len(set(kinds)) != len(kinds):
            raise ValueError("a store has at most one tier of each kind")
        return self


def store_config(source: str | Path | StoreConfig | None = None, *, look: bool = False, **settings: Any) -> StoreConfig:
    """The configuration of the short form, of keywords, or of both; StoreError says what cannot be read.

    look: the store is only looked at, so a disk tier needs no size.
    """
    try:
        if isinstance(source, StoreConfig):
            config = source.model_copy(update=settings) if settings else source
        elif source is None:
            config = StoreConfig(**settings)
        else:
            config = StoreConfig(tiers=tuple(_tier(part) for part in _parts(str(source))), **settings)
    except ValidationError as error:
        raise StoreError(f"cannot read the store's configuration: {_sentence(error)}.") from None
    except ValueError as error:
        raise StoreError(f"cannot read the store's configuration: {error}.") from None
    if not look and any(isinstance(tier, DiskConfig) and tier.size is None for tier in config.tiers):
        raise StoreError(
            "a disk tier needs a size, such as disk:/var/cache/kv:20GiB; its folder never grows beyond it."
        )
    return config


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError("a store is one or more tiers such as 'host:2GiB,disk:/var/cache/kv:20GiB'")
    return parts


def _tier(text: str) -> Any:
    if _URL.match(text):
        return _remote(text)
    kind, _, rest = text.partition(":")
    place, _, size = rest.rpartition(":")
    if kind == "host" and not place and size:
        return HostConfig(size=parsed_size(size))
    if kind == "device" and size:
        return DeviceConfig(size=parsed_size(size), device=place or "auto")
    if kind == "disk" and rest:
        if place and _SIZE.fullmatch(size.strip()):
            return DiskConfig(path=Path(place), size=parsed_size(size))
        return DiskConfig(path=Path(rest))
    raise ValueError(
        f"{text!r} is no tier; write device:SIZE, host:SIZE, disk:FOLDER:SIZE, redis://HOST or another address"
    )


def _remote(text: str) -> Any:
    address, _, query = text.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    redis = urlsplit(address).scheme in ("redis", "rediss")
    known = {"size", "timeout", "retry"} | ({"prefix"} if redis else set())
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"the parameter {unknown[0]!r:.40} of an address is none of {', '.join(sorted(known))}")
    if "::" in address:
        raise ValueError("chained addresses ('::') are not served")
    return RedisConfig(url=address, **given) if redis else FilesConfig(url=address, **given)  # type: ignore[arg-type]


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("device", "host", "disk", "redis", "files"))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place and "address holds" not in message else message
