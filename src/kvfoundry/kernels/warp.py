"""What the 32 lanes of one warp do together, for kernels written lane by lane: tensors of 32 elements, one a lane.

Where values lie in the operands of a product of the tensor cores is known (PTX, "Matrix Fragments for mma.m16n8k16"),
so a kernel that loads them there need not have them moved. Lane 4 g + t holds, of a matrix of 8 rows of 8 numbers of 16
bits, those of row g in columns 2 t (low half) and 2 t + 1 (high half): a `piece` below. In Triton's interpreter
(PTX = False) the same is worked out on whole matrices.
"""

from __future__ import annotations

from kvfoundry.kernels.triton_support import tl, triton


@triton.jit
def _matrix(piece):
    """[8, 8] int16 of a piece."""
    low, high = piece.to(tl.int16), (piece >> 16).to(tl.int16)
    return tl.join(low, high).reshape(8, 8)


@triton.jit
def _piece(matrix):
    """The piece of [8, 8] int16."""
    low, high = tl.split(matrix.reshape(32, 2))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _beside(left, right):
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def multiply(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, PTX: tl.constexpr):
    """A B + C for A [16, 16] and B [16, 8] of bfloat16, C [16, 8] of float32; the four registers of the sum.

    a0, a2: pieces of rows 0..7 of A, columns 0..7 and 8..15; a1, a3: of rows 8..15. b0, b1: pieces of the transpose of
    B, [8, 16]. c0, c1: of row g, columns 2 t and 2 t + 1; c2, c3: of row g + 8.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    b = _beside(_matrix(b0), _matrix(b1)).to(tl.bfloat16, bitcast=True).trans(1, 0)
    upper = _beside(_matrix(a0), _matrix(a2)).to(tl.bfloat16, bitcast=True)
    lower = _beside(_matrix(a1), _matrix(a3)).to(tl.bfloat16, bitcast=True)
    d0, d1 = tl.split(tl.dot(upper, b).reshape(32, 2))
    d2, d3 = tl.split(tl.dot(lower, b).reshape(32, 2))
    return c0 + d0, c1 + d1, c2 + d2, c3 + d3


@triton.jit
def transposed(piece, PTX: tl.constexpr):
    """The piece of the transposed matrix."""
    if PTX:
        return tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [piece], dtype=tl.int32, is_pure=True, pack=1
        )
    return _piece(_matrix(piece).trans(1, 0))


@triton.jit
def from_lane(value, lane, PTX: tl.constexpr):
    """What another lane holds: value[lane], of 32 bits."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=r,r,r",
            [value.to(tl.int32, bitcast=True), lane],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        ).to(value.dtype, bitcast=True)
    return tl.gather(value, lane, 0)


@triton.jit
def halves(left, right, number: tl.constexpr, PTX: tl.constexpr):
    """The low (number 0) or high (1) halves of two words as one word."""
    if PTX:
        selector: tl.constexpr = 0x7632 if number else 0x5410
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
        )
    if number:
        return ((left >> 16) & 0xFFFF) | (right & -65536)
    return (left & 0xFFFF) | (right << 16)


@triton.jit
def pair(low, high, PTX: tl.constexpr):
    """Two numbers of float32 as one word of two of bfloat16."""
    if PTX:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    high = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def times(left, right, PTX: tl.constexpr):
    """The products of two words of two bfloat16."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [left, right],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    low = (left << 16).to(tl.float32, bitcast=True) * (right << 16).to(tl.float32, bitcast=True)
    high = (left & -65536).to(tl.float32, bitcast=True) * (right & -65536).to(tl.float32, bitcast=True)
    return pair(low, high, PTX)
