"""Attention of one new token per sequence over static rows: in Triton on a GPU, in torch elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvfoundry.engine.coded import Coded
from kvfoundry.engine.hosted import Hosted, joined
from kvfoundry.engine.paging import Paging
from kvfoundry.engine.replacing import Replacing
from kvfoundry.engine.rows import StaticRows
from kvfoundry.kernels.attention import sdpa
from kvfoundry.kernels.available import without_triton
from kvfoundry.kernels.coded_decode import naive as coded_naive
from kvfoundry.kernels.decode_attention import naive as decode_naive
from kvfoundry.kernels.page_selection import naive as select_naive
from kvfoundry.kernels.paged_attention import naive as paged_naive
from kvfoundry.kernels.replace_row import naive as replace_naive
from kvfoundry.kernels.store_row import naive as store_naive
from kvfoundry.visibility import Visibility


class Step(NamedTuple):
    """One token per sequence in one layer, and the terms that the model adds to the logits.

    query: [batch, query_heads, 1, head_dim]; key, value: [batch, heads or a divisor, 1, dim]; position: [batch].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    scaling: float
    softcap: float | None
    sinks: Tensor | None


class Extra(NamedTuple):
    """What a layer has beside its rows: codes of older ones, bounds of pages, what chooses the row that goes, and older
    rows on the host."""

    coded: Coded | None = None
    paging: Paging | None = None
    replacing: Replacing | None = None
    hosted: Hosted | None = None


class Kernels(Protocol):
    """How a step is done."""

    def step(self, step: Step, rows: StaticRows, extra: Extra) -> Tensor:
        """Store the row of every head, read all rows, codes or the best pages, choose what goes next.

        Returns [batch, query_heads, 1, value_dim].
        """


class TorchKernels:
    """Operations of torch, of fixed shape; on the CPU, where a look at a length is free, no longer than needed."""

    def step(self, step: Step, rows: StaticRows, extra: Extra) -> Tensor:
        store_naive.store(
            step.key, step.value, step.position, rows.keys, rows.values, rows.positions, **_places(rows)
        )  # fmt: skip
        if extra.paging is not None:
            return _read_pages(select_naive, paged_naive, decode_naive, step, rows, extra.paging)
        if extra.hosted is not None:
            return _read_both(decode_naive, coded_naive, step, rows, extra.coded, extra.hosted)
        if extra.coded is not None:
            return extra.coded.attend(coded_naive, step.query, **_terms(step))
        output = self._attend(step, rows)
        if extra.replacing is not None:
            replace_naive.choose(step.query, **_choice(step, rows, extra.replacing))
        return output

    def _attend(self, step: Step, rows: StaticRows) -> Tensor:
        query, width, complete = step.query, rows.width, False
        if query.device.type == "cpu":
            width = int(rows.lengths.max())
            complete = bool((rows.lengths == width).all())
        number = torch.arange(width, device=query.device)
        where = torch.where(number < rows.lengths[..., None], 0, -1)
        visibility = Visibility(where.new_zeros(query.shape[0], 1), where, "full" if complete else "masked")
        keys, values = (rows.gathered(flat)[:, :, :width] for flat in (rows.keys, rows.values))
        return sdpa.attend(
            query, keys, values, visibility, scaling=step.scaling, softcap=step.softcap, sinks=step.sinks
        )  # fmt: skip


class TritonKernels:
    """The fused kernels: one launch stores, two read, one more chooses, and nothing is asked of the host."""

    def __init__(self) -> None:
        from kvfoundry.kernels.coded_decode import fused as coded
        from kvfoundry.kernels.decode_attention import fused as decode
        from kvfoundry.kernels.page_selection import fused as select
        from kvfoundry.kernels.paged_attention import fused as paged
        from kvfoundry.kernels.replace_row import fused as replace
        from kvfoundry.kernels.store_row import fused as store

        self._decode, self._replace, self._store = decode, replace, store
        self._select, self._paged, self._coded = select, paged, coded

    def step(self, step: Step, rows: StaticRows, extra: Extra) -> Tensor:
        self._store.store(
            step.key, step.value, step.position, rows.keys, rows.values, rows.positions, **_places(rows)
        )  # fmt: skip
        if extra.paging is not None:
            return _read_pages(self._select, self._paged, self._decode, step, rows, extra.paging)
        if extra.hosted is not None:
            return _read_both(self._decode, self._coded, step, rows, extra.coded, extra.hosted)
        if extra.coded is not None:
            return extra.coded.attend(self._coded, step.query, **_terms(step))
        if extra.replacing is not None:
            values = rows.rectangle(rows.values)
            chosen: Tensor = self._replace.attend(step.query, values=values, **_choice(step, rows, extra.replacing))
            return chosen
        output = self._decode.attend(
            step.query, rows.keys, rows.values, rows.lengths, starts=rows.starts, scaling=step.scaling,
            softcap=step.softcap, sinks=step.sinks,
        )  # fmt: skip
        assert isinstance(output, Tensor)
        return output


def _read_both(
    decode: Any, coded_decode: Any, step: Step, rows: StaticRows, coded: Coded | None, hosted: Hosted
) -> Tensor:
    """Attention over rows or codes on the host and on the device; the two modules are those of one way of computing.

    Logits without a row count where the newest rows are, once.
    """
    alike = {"scaling": step.scaling, "softcap": step.softcap}
    older = hosted.attend(decode if coded is None else coded_decode, step.query, coded, **alike)
    terms = {**_terms(step), "return_lse": True}
    if coded is not None:
        return joined(older, coded.attend(coded_decode, step.query, **terms))
    newer = decode.attend(step.query, rows.keys, rows.values, rows.lengths, starts=rows.starts, **terms)
    return joined(older, newer)


def _read_pages(selection: Any, attention: Any, decode: Any, step: Step, rows: StaticRows, paging: Paging) -> Tensor:
    """Attention over the best pages; the three modules are those of one way of computing."""
    lengths = paging.lengths()
    query, page = step.query[:, :, 0], paging.page
    groups = rows.starts.shape[1] // step.key.shape[1]
    key = step.key if groups == 1 else step.key.repeat_interleave(groups, dim=1)
    selection.extend_bounds(paging.low, paging.high, key, lengths, page=page)
    bounds = query, paging.low, paging.high, lengths
    table, counts = selection.select(*bounds, page=page, budget=paging.budget, group=paging.group)
    if paging.hosted is not None:
        found: Tensor = decode.attend(step.query, *paging.hosted.fetched(table, page, rows), **_terms(step))
        return found
    real = (
        {"real": torch.ones_like(step.position, dtype=torch.bool)} if attention is paged_naive else {"counts": counts}
    )
    output: Tensor = attention.attend(
        query, rows.keys, rows.values, table, rows.starts, rows.lengths, page, **_terms(step), **real,
    )  # fmt: skip
    return output[:, :, None]


def _terms(step: Step) -> dict[str, Any]:
    return {"scaling": step.scaling, "softcap": step.softcap, "sinks": step.sinks}


def _places(rows: StaticRows) -> dict[str, Tensor]:
    return {name: getattr(rows, name) for name in ("starts", "slots", "lengths", "capacities", "wraps")}


def _choice(step: Step, rows: StaticRows, replacing: Replacing) -> dict[str, Any]:
    return {
        "keys": rows.rectangle(rows.keys),
        "positions": rows.rectangle(rows.positions),
        "sums": replacing.sums,
        "position": step.position,
        "slots": rows.slots,
        "lengths": rows.lengths,
        "capacities": rows.capacities,
        "recent": replacing.recent,
        "first": replacing.first,
        "scaling": step.scaling,
        "softcap": step.softcap,
        "sinks": step.sinks,
        "mean": replacing.mean,
        "normalize": replacing.normalize,
    }


def kernels_for(device: torch.device) -> Kernels:
    """The fastest kernels of a device."""
    return TorchKernels() if without_triton(device) is not None else TritonKernels()
