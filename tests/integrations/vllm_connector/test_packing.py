"""Rows of a span as a chunk: bit for bit without a codec, packed with one."""

import pytest
import torch

from kvfoundry.errors import DataError, SpecError
from kvfoundry.integrations.vllm.packing import LayerShape, Packing, checked_method

SHAPES = (LayerShape(2, 64, 64), LayerShape(2, 64, 32))


def rows(tokens: int, dtype: torch.dtype = torch.bfloat16):
    source = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(s.heads, tokens, dim, generator=source).to(dtype) for dim in (s.key_dim, s.value_dim))
        for s in SHAPES
    ]


def packed(spec: str, dtype: torch.dtype = torch.bfloat16, tokens: int = 256):
    packing = Packing(checked_method(spec), SHAPES, dtype)
    return packing, packing.chunk(torch.arange(tokens), torch.arange(512), rows(tokens, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_rows_come_back_bit_for_bit(dtype):
    packing, chunk = packed("fullkv", dtype)
    for number, wanted in enumerate(rows(256, dtype)):
        assert all(torch.equal(found, each) for found, each in zip(packing.rows(chunk, number), wanted, strict=True))
    assert chunk.start == 512 and chunk.dtype == dtype


@pytest.mark.parametrize(
    "spec, share, error",
    [
        ("int8", 0.57, 0.02),
        ("int8(group=64)", 0.55, 0.02),
        ("int4", 0.32, 0.3),
        ("kivi(bits=4, residual=0)", 0.32, 0.35),
        ("int8+rotate", 0.57, 0.05),
    ],
)
def test_codecs_save_bytes_and_lose_little(spec, share, error):
    packing, chunk = packed(spec)
    whole = packed("fullkv")[1]
    count = lambda held: sum(t.nbytes for n, t in held.tensors().items() if n[0].isdigit())  # noqa: E731
    assert count(chunk) <= share * count(whole)
    for number, wanted in enumerate(rows(256)):
        for found, each in zip(packing.rows(chunk, number), wanted, strict=True):
            assert found.dtype == each.dtype and 0 < float((found - each).abs().max()) < error * float(each.abs().max())


def test_a_chunk_is_read_in_another_process_s_packing():
    _, chunk = packed("int8")
    again = type(chunk).from_tensors(chunk.tensors(), chunk.metadata())
    packing = Packing(checked_method("int8"), SHAPES, torch.bfloat16)
    assert torch.equal(packing.rows(again, 1)[0], packing.rows(chunk, 1)[0])


@pytest.mark.parametrize("spec", ["snapkv(budget=64)", "quest", "minference", "minicache", "int8+park"])
def test_methods_that_do_more_are_refused(spec):
    with pytest.raises(SpecError):
        checked_method(spec)


@pytest.mark.parametrize("spec, needs", [("kvquant(bits=3)", "RoPE"), ("think", "queries")])
def test_codecs_that_need_a_model_are_refused(spec, needs):
    with pytest.raises(SpecError, match=needs):
        checked_method(spec)


def test_rows_that_are_not_finite_are_not_coded():
    bad = rows(256)
    bad[1][1][0, 3, 5] = float("inf")
    packing = Packing(checked_method("int8"), SHAPES, torch.bfloat16)
    with pytest.raises(DataError, match=r"layer 1 .* not finite"):
        packing.chunk(torch.arange(256), torch.empty(0, dtype=torch.long), bad)


def test_rows_of_another_model_are_refused():
    _, chunk = packed("fullkv")
    for shapes in (SHAPES[:1], (LayerShape(4, 64, 64), SHAPES[1]), (LayerShape(2, 32, 32), SHAPES[1])):
        with pytest.raises(DataError, match="another model"):
            Packing(checked_method("fullkv"), shapes, torch.bfloat16).rows(chunk, 0)
