"""Packed codes, as in `dither.ops.storage`: two 4-bit codes per byte, four 6-bit codes per three bytes.

Legend: P lines of Q elements in a tile; `stride` is the length of a stored line in items of the output, bytes if packed.
"""

import re

import triton
import triton.language as tl

from dither.ops.triton.rounding import as_bits, as_float

# Eight E2M1 codes as one word.
#   $1..$8     magnitudes as in `truncated_code` before it adds random bits: the code above 22 bits of fraction
#   $9..$16    words with the signs in the top bit
#   $17..$20   two 16-bit random numbers each
# A multiply-add brings each code to its own byte; byte permutations collect codes and signs. This takes 26 instructions fewer
# per eight elements than code by code.
E2M1_WORD = tl.constexpr(
    """{
    .reg .b32 r, even, odd, t<8>, a, b;
    prmt.b32 r, $17, 0, 0x4104;  mad.lo.u32 t0, $1, 4, r;
    prmt.b32 r, $17, 0, 0x4324;  mad.lo.u32 t1, $2, 4, r;
    prmt.b32 r, $18, 0, 0x4104;  mad.lo.u32 t2, $3, 4, r;
    prmt.b32 r, $18, 0, 0x4324;  mad.lo.u32 t3, $4, 4, r;
    prmt.b32 r, $19, 0, 0x4104;  mad.lo.u32 t4, $5, 4, r;
    prmt.b32 r, $19, 0, 0x4324;  mad.lo.u32 t5, $6, 4, r;
    prmt.b32 r, $20, 0, 0x4104;  mad.lo.u32 t6, $7, 4, r;
    prmt.b32 r, $20, 0, 0x4324;  mad.lo.u32 t7, $8, 4, r;
    prmt.b32 a, t0, t2, 0x0073;  prmt.b32 b, t4, t6, 0x0073;  prmt.b32 even, a, b, 0x5410;
    prmt.b32 a, t1, t3, 0x0073;  prmt.b32 b, t5, t7, 0x0073;  prmt.b32 odd, a, b, 0x5410;
    mad.lo.u32 r, odd, 16, even;
    prmt.b32 a, $9, $11, 0x0073;   prmt.b32 b, $13, $15, 0x0073;  prmt.b32 even, a, b, 0x5410;
    prmt.b32 a, $10, $12, 0x0073;  prmt.b32 b, $14, $16, 0x0073;  prmt.b32 odd, a, b, 0x5410;
    shr.u32 even, even, 4;
    lop3.b32 r, r, even, 0x08080808, 0xF8;
    lop3.b32 $0, r, odd, 0x80808080, 0xF8;
    }"""
)


@triton.jit
def eight(x, P: tl.constexpr, Q: tl.constexpr):
    """Split x [P, Q] into eight tensors [P, Q / 8]: element i of each run of eight."""
    even, odd = tl.split(tl.reshape(x, [P, Q // 8, 2, 2, 2]))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def e2m1_words(a, sign, random, F: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Round magnitudes with bits `a` stochastically with 16 random bits; return packed codes, int32[P, Q / 8]."""
    u = as_bits(tl.inline_asm_elementwise(F.DOWN, "=f,f", [as_float(a)], dtype=tl.float32, is_pure=True, pack=1))
    u0, u1, u2, u3, u4, u5, u6, u7 = eight(u, P, Q)
    s0, s1, s2, s3, s4, s5, s6, s7 = eight(sign, P, Q)
    r0, r1, r2, r3, r4, r5, r6, r7 = eight(random, P, Q)
    # The halves were split from such words, and the compiler cancels both steps.
    w0, w1, w2, w3 = r0 | (r1 << 16), r2 | (r3 << 16), r4 | (r5 << 16), r6 | (r7 << 16)
    arguments = [u0, u1, u2, u3, u4, u5, u6, u7, s0, s1, s2, s3, s4, s5, s6, s7, w0, w1, w2, w3]
    constraints: tl.constexpr = "=r" + ",r" * 20
    return tl.inline_asm_elementwise(E2M1_WORD, constraints, arguments, dtype=tl.int32, is_pure=True, pack=1)


# Eight E2M1 codes of the word $4, times the scale $5, as four words of two BF16 numbers each; the products are exact. -0 is
# added to them, since Ada has no product alone. Permutations look the two bytes of a number up by the code itself, without its
# sign: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
E2M1_NUMBERS = tl.constexpr(
    """{
    .reg .b32 m, e, h, l, n, s, zero, scale;
    mov.b32 zero, 0x80008000;
    cvt.rn.bf16x2.f32 scale, $5, $5;
    and.b32 m, $4, 0x77777777;  shl.b32 e, $4, 4;
    prmt.b32 h, 0x3F3F3F00, 0x40404040, m;  prmt.b32 l, 0xC0800000, 0xC0804000, m;
    prmt.b32 n, l, h, 0x5140;  prmt.b32 s, e, $4, 0x4000;  lop3.b32 n, n, s, 0x80008000, 0xF8;
    fma.rn.bf16x2 $0, n, scale, zero;
    prmt.b32 n, l, h, 0x7362;  prmt.b32 s, e, $4, 0x5010;  lop3.b32 n, n, s, 0x80008000, 0xF8;
    fma.rn.bf16x2 $1, n, scale, zero;
    shr.u32 m, m, 16;
    prmt.b32 h, 0x3F3F3F00, 0x40404040, m;  prmt.b32 l, 0xC0800000, 0xC0804000, m;
    prmt.b32 n, l, h, 0x5140;  prmt.b32 s, e, $4, 0x6020;  lop3.b32 n, n, s, 0x80008000, 0xF8;
    fma.rn.bf16x2 $2, n, scale, zero;
    prmt.b32 n, l, h, 0x7362;  prmt.b32 s, e, $4, 0x7030;  lop3.b32 n, n, s, 0x80008000, 0xF8;
    fma.rn.bf16x2 $3, n, scale, zero;
    }"""
)
E2M1_SATURATED = tl.constexpr(
    re.sub(
        r"fma.rn.bf16x2 (\$.), n, scale, zero;",
        r"fma.rn.bf16x2 n, n, scale, zero; min.NaN.bf16x2 n, n, most; max.NaN.bf16x2 \1, n, least;",
        E2M1_NUMBERS.value.replace("scale;", "scale, most, least; mov.b32 most, 0x7F7F7F7F; mov.b32 least, 0xFF7FFF7F;", 1),
    )
)


# Four E4M3 codes of the word $2, times the scale $3, as two words of two BF16 numbers each.
E4M3_NUMBERS = tl.constexpr(
    """{
    .reg .b16 c, d, h<4>;  .reg .b32 p;  .reg .f32 f<4>;
    mov.b32 {c, d}, $2;
    cvt.rn.f16x2.e4m3x2 p, c;  mov.b32 {h0, h1}, p;
    cvt.rn.f16x2.e4m3x2 p, d;  mov.b32 {h2, h3}, p;
    cvt.f32.f16 f0, h0;  cvt.f32.f16 f1, h1;  cvt.f32.f16 f2, h2;  cvt.f32.f16 f3, h3;
    mul.rn.f32 f0, f0, $3;  mul.rn.f32 f1, f1, $3;  mul.rn.f32 f2, f2, $3;  mul.rn.f32 f3, f3, $3;
    cvt.rn.satfinite.bf16x2.f32 $0, f1, f0;  cvt.rn.satfinite.bf16x2.f32 $1, f3, f2;
    }"""
)


@triton.jit
def word_numbers(words, scale, BITS: tl.constexpr, SATURATE: tl.constexpr):
    """Return the codes of words [N], E2M1 (4 bits) or E4M3 (8 bits), times float32 scales [N], as pairs of BF16 numbers.

    int32[N, pairs per word]. SATURATE is for E2M1 with scales whose products may overflow; those of E4M3 always saturate.
    """
    if BITS == 8:
        n01, n23 = tl.inline_asm_elementwise(
            E4M3_NUMBERS, "=r,=r,r,f", [words, scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        return tl.join(n01, n23)
    else:
        PTX: tl.constexpr = E2M1_SATURATED if SATURATE else E2M1_NUMBERS
        n01, n23, n45, n67 = tl.inline_asm_elementwise(
            PTX, "=&r,=&r,=&r,=&r,r,f", [words, scale], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
        return tl.reshape(tl.join(tl.join(n01, n45), tl.join(n23, n67)), [words.shape[0], 4])


@triton.jit
def store_words(pointer, words, line, first, lines, stride, Q: tl.constexpr):
    """Store words of eight 4-bit codes: elements first to first + Q - 1 of each line."""
    at = first // 8 + tl.arange(0, Q // 8)
    inside = (line < lines)[:, None] & (at < stride // 4)[None, :]
    tl.store(pointer.to(tl.pointer_type(tl.int32)) + line[:, None] * (stride // 4) + at[None, :], words, mask=inside)


@triton.jit
def store_packed(
    pointer, code, line, first, lines, stride, BITS: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr
):
    """Store codes [P, Q] of elements first to first + Q - 1 of each line: 4-bit, 6-bit or one per item.

    Lines follow each other without gaps, so `stride` is also their stored length; stores are wide if it is a multiple of 16.
    WORDS says that it is a multiple of 4. Example: the 4-bit codes 1, 2, 3, 4 are the bytes 0x21, 0x43.
    """
    start = pointer + line[:, None] * stride
    if BITS == 4 and WORDS:
        # Eight codes make a word, assembled within one thread.
        c0, c1, c2, c3, c4, c5, c6, c7 = eight(code, P, Q)
        low = c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)
        store_words(pointer, low | (c4 << 16) | (c5 << 20) | (c6 << 24) | (c7 << 28), line, first, lines, stride, Q)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(code, [P, Q // 2, 2]))
        at = first // 2 + tl.arange(0, Q // 2)
        inside = (line < lines)[:, None] & (at < stride)[None, :]
        tl.store(start + at[None, :], (low | (high << 4)).to(tl.uint8), mask=inside)
    elif BITS == 6:
        even, odd = tl.split(tl.reshape(code, [P, Q // 4, 2, 2]))
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        word = c0 | (c1 << 6) | (c2 << 12) | (c3 << 18)
        at = first // 4 + tl.arange(0, Q // 4)
        inside = (line < lines)[:, None] & (at * 3 < stride)[None, :]
        for octet in tl.static_range(3):
            tl.store(start + at[None, :] * 3 + octet, ((word >> (8 * octet)) & 0xFF).to(tl.uint8), mask=inside)
    else:
        at = first + tl.arange(0, Q)
        inside = (line < lines)[:, None] & (at < stride)[None, :]
        tl.store(start + at[None, :], code.to(pointer.dtype.element_ty), mask=inside)
