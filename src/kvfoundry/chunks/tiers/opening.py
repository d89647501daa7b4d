"""From a configuration to an open tier. Packages that only one tier needs are imported here, when it is asked for."""

from __future__ import annotations

import torch

from kvfoundry.chunks.config import DeviceConfig, DiskConfig, HostConfig, RedisConfig, TierConfig
from kvfoundry.chunks.tiers.base import Tier
from kvfoundry.errors import StoreError


def opened_tier(config: TierConfig, *, look: bool = False) -> Tier:
    """The tier; StoreError or MissingExtraError says what is wrong with it. look: nothing is made or evicted."""
    if isinstance(config, HostConfig):
        from kvfoundry.chunks.tiers.memory import HostTier

        return HostTier(config.size)
    if isinstance(config, DeviceConfig):
        from kvfoundry.chunks.tiers.memory import DeviceTier

        return DeviceTier(config.size, named_device(config.device))
    if isinstance(config, DiskConfig):
        from kvfoundry.chunks.tiers.disk import DiskTier

        return DiskTier(config.path, None if look else config.size)
    if isinstance(config, RedisConfig):
        from kvfoundry.chunks.tiers.redis import RedisTier

        return RedisTier(config.url, config.size, timeout=config.timeout, retry=config.retry, prefix=config.prefix)
    from kvfoundry.chunks.tiers.files import FilesTier

    return FilesTier(config.url, config.size, timeout=config.timeout, retry=config.retry)


def named_device(name: str | torch.device) -> torch.device:
    """A device by name, with its number, as tensors have it; "auto" is the first GPU, or the CPU without one.

    StoreError when it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise StoreError(f"the device {str(name)!r} is not there; use cpu, cuda or cuda:1.") from error
