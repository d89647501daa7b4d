"""What tiers hold and have done, and whether it is sound."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from kvfoundry.chunks.packing import Unavailable
from kvfoundry.chunks.tiers.base import Listing, Problem, Tier
from kvfoundry.errors import StoreError


def listings(tiers: Sequence[Tier]) -> dict[str, list[Listing]]:
    """All entries by tier. StoreError when a tier cannot be reached."""
    try:
        return {tier.name: list(tier.listing()) for tier in tiers}
    except Unavailable as error:
        raise StoreError(f"cannot list the store: {error}.") from error


def tier_stats(tiers: Sequence[Tier]) -> dict[str, dict[str, Any]]:
    """Capacity, contents and counters of every tier, ready for JSON."""
    told: dict[str, dict[str, Any]] = {}
    for tier in tiers:
        held: dict[str, Any] = {"capacity": tier.capacity}
        try:
            entries = list(tier.listing())
            held |= {"entries": len(entries), "tokens": sum(each.tokens for each in entries), "bytes": tier.nbytes}
        except Unavailable as error:
            held["unavailable"] = str(error)
        told[tier.name] = held | vars(tier.counters)
    return told


def problems_of(tiers: Sequence[Tier]) -> list[Problem]:
    """Everything that is damaged or left over, which is gone afterwards, and tiers that cannot be checked."""
    problems: list[Problem] = []
    for tier in tiers:
        try:
            problems += tier.verify()
        except Unavailable as error:
            problems.append(Problem(tier.name, "", f"cannot be checked: {error}"))
    return problems


def pinned_bytes(tiers: Sequence[Tier], pins: Container[str]) -> int:
    """Bytes in memory that may not be evicted now."""
    return sum(each.size for tier in tiers if tier.in_memory for each in tier.listing() if each.id in pins)


def everywhere(tiers: Sequence[Tier], operation: Callable[[Tier], int]) -> int:
    """The sum of an operation on every tier; StoreError when one cannot be reached, after the others are done."""
    done, failed = 0, []
    for tier in tiers:
        try:
            done += operation(tier)
        except Unavailable as error:
            failed.append(str(error))
    if failed:
        raise StoreError(f"not everything could be forgotten: {'; '.join(failed)}.")
    return done
