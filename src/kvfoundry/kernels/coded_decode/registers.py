"""What the kernel over codes does to words in registers: codes out of them, entries of tables, products in pairs."""

from __future__ import annotations

from kvfoundry.kernels.triton_support import tl, triton


@triton.jit
def codes_at(
    words,
    place: tl.constexpr,
    BITS: tl.constexpr,
    ROOM: tl.constexpr,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
    TINY: tl.constexpr,
    dtype: tl.constexpr,
):
    """The codes at one place of the words as numbers of the dtype: base + code * 2 ** (place * BITS % ROOM).

    ROOM: bits of the word that are looked at without moving them, a whole number of codes.
    TINY: without the base, in units of the dtype's smallest number.
    PAIRS: two words of 16 bits at once in a register of 32, in two instructions; the compiler does not find them.
    """
    if KIND == 2:
        return words.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)
    if BITS == 8:
        return words.to(tl.float32).to(dtype)
    moved: tl.constexpr = place * BITS // ROOM * ROOM
    mask: tl.constexpr = (2**BITS - 1) << (place * BITS % ROOM)
    if PAIRS:
        # (word >> moved) & mask | base in both halves: bits that cross the middle fall to the mask
        base: tl.constexpr = 0 if TINY else (0x43004300 if dtype == tl.bfloat16 else 0x64006400)
        if moved > 0:
            words = tl.inline_asm_elementwise(
                f"shr.b32 $0, $1, {moved};", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        bits = tl.inline_asm_elementwise(
            f"lop3.b32 $0, $1, {mask * 0x10001}, {base}, 0xEA;",
            "=r,r",
            [words],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
        return bits.to(dtype, bitcast=True)
    code = (words.to(tl.int16) >> moved) & mask
    if dtype == tl.bfloat16:
        return (code | (0 if TINY else 0x4300)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if dtype == tl.float16:
        return (code | (0 if TINY else 0x6400)).to(tl.int16).to(tl.float16, bitcast=True)
    return code.to(dtype)


@triton.jit
def load_entries(at, inside, PER: tl.constexpr):
    """PER neighbouring entries of a table in one word: entries are small, and every load takes an instruction."""
    bits: tl.constexpr = PER * at.dtype.scalar.element_ty.primitive_bitwidth
    if PER > 1:
        if bits == 64:
            at = at.to(tl.pointer_type(tl.int64))
        elif bits == 32:
            at = at.to(tl.pointer_type(tl.int32))
        else:
            at = at.to(tl.pointer_type(tl.int16))
    return tl.load(at, mask=inside, other=None if inside is None else 0)


@triton.jit
def entry_of(words, number, PER: tl.constexpr, entry: tl.constexpr):
    """Entry number `number` of every word, of dtype `entry`."""
    bits: tl.constexpr = entry.primitive_bitwidth
    if PER > 1:
        words = words >> (number * bits)
        if bits == 32:
            words = words.to(tl.int32)
        elif bits == 16:
            words = words.to(tl.int16)
        else:
            words = words.to(tl.uint8)
        words = words.to(entry, bitcast=True)
    return words


@triton.jit
def scaled_codes(
    raw, scale, minimum, BASE: tl.constexpr, KIND: tl.constexpr, HAS_MINIMUM: tl.constexpr, dtype: tl.constexpr
):
    """Decoded numbers of the dtype, element by element."""
    number = raw - tl.full([], BASE, tl.float32).to(dtype)
    if HAS_MINIMUM:
        if KIND == 1:
            return ((number - minimum.to(dtype)) * scale.to(dtype)).to(dtype)
        return (number * scale.to(dtype) + minimum.to(dtype)).to(dtype)
    return (number * scale.to(dtype)).to(dtype)


@triton.jit
def common_terms(raw, weight, scale, minimum, BASE: tl.constexpr, KIND: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """scale * (sum of weighted numbers) + minimum * (sum of weights), from the weighted sum of raw codes; float32."""
    scale = scale.to(tl.float32)
    if HAS_MINIMUM:
        if KIND == 1:
            return (raw - (BASE + minimum.to(tl.float32)) * weight) * scale
        return (raw - BASE * weight) * scale + minimum.to(tl.float32) * weight
    return (raw - BASE * weight) * scale


@triton.jit
def entry_of_row(words, number, PER: tl.constexpr, entry: tl.constexpr, PAIRS: tl.constexpr, M: tl.constexpr):
    """As `entry_of` of words [1, rows] or [M, rows], [M, rows]; number: [M, 1]."""
    bits: tl.constexpr = PER * entry.primitive_bitwidth
    if PAIRS and PER > 1 and bits <= 64 and entry.primitive_bitwidth == 16:
        if bits == 64:
            words = (words >> (number // 2 * 32)).to(tl.int32)
        # one half of each of two words at once
        words = words.broadcast_to(M, words.shape[1])
        halves = tl.where(number % 2 == 0, 0x5410, 0x7632).broadcast_to(M, words.shape[1])
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r,r", [words, halves], dtype=tl.int16, is_pure=True, pack=2
        ).to(entry, bitcast=True)
    else:
        found = entry_of(words, number, PER, entry).broadcast_to(M, words.shape[1])
    return found


@triton.jit
def laid_beside(left, right, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """[M, n] and [M, n] as [M, 2 n]; all lanes keep what they have."""
    both = tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])
    if PAIRS:
        # Nothing is moved; but where the compiler sees a join it expects numbers of 4 bits and lays out a product so.
        both = tl.inline_asm_elementwise(
            "mov.b16 $0, $1;", "=h,h", [both.to(tl.int16, bitcast=True)], dtype=tl.int16, is_pure=False, pack=1
        ).to(dtype, bitcast=True)
    return both


@triton.jit
def times_pairs(one, other, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Products of the dtype. PAIRS: two at once, which the compiler does not find."""
    if PAIRS and dtype == tl.bfloat16:
        product = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [one, other],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        product = (one * other).to(dtype)
    return product
