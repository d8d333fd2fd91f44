"""Triton kernels for products of bf16 and fp16 with the schemes of few bits, along the rows of the weight.

The weight is integers times one number. A tensor core multiplies by the integers, which fp16 holds exactly, and the sum is
scaled. Each thread makes those weights that a tensor core takes from it, so none of them is moved: the order of the inputs is
changed instead, once for all programs. Several programs share the inputs of an output; the last one that is ready adds up their
sums.

Shapes: T tokens, K inputs, N outputs of a tile; the weight is (N, K). A block is C calls of the generator of each row, a call has
16 or 128 values; KIND is a position in `tiles.KINDS`. Tested in the interpreter of Triton 3.9, and on an H100 with Triton 3.6.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from hf_freeze.seeded.fused_kernels import as_bf16, philox


@triton.jit
def _most(x_at, inputs, K: tl.constexpr):
    """The largest of the sizes of the inputs."""
    most = 0.0
    for start in range(0, inputs, K):
        place = start + tl.arange(0, K)
        x = tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(x), 0))
    return most


@triton.jit
def arrange(
    x_at, out_at, factor_at, count_at, inputs, padded, tiles, KIND: tl.constexpr, C: tl.constexpr, K: tl.constexpr
):
    """out (tokens, padded) fp16: the inputs of a token, times a power of two that uses the range of fp16, in the order in which
    `product` multiplies. factor (2, tokens) fp32: the inverse of that power; half of the sum of `out`. Sets count (tiles,) to 0.
    A program takes one token, K inputs at a time."""
    token, tokens = tl.program_id(0), tl.num_programs(0)
    x_at += token.to(tl.int64) * inputs
    out_at += token.to(tl.int64) * padded
    exponent = tl.maximum(_most(x_at, inputs, K).to(tl.int32, bitcast=True) >> 23, 20)
    power = ((127 + 141 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest is below 2^15 then
    half = 0.0
    for start in range(0, padded, K):
        place = start + tl.arange(0, K)
        x = (tl.load(x_at + place, mask=place < inputs, other=0.0).to(tl.float32) * power).to(tl.float16)
        half += 0.5 * tl.sum(x.to(tl.float32), 0)
        if KIND == 1:  # block, call, pair of bytes, one of the pair
            x = tl.permute(tl.reshape(x, (K // (16 * C), C, 8, 2)), (0, 2, 1, 3))
        else:  # block, call, word, half of the word, bit of the half
            x = tl.permute(tl.reshape(x, (K // (128 * C), C, 4, 2, 16)), (0, 4, 2, 1, 3))
        tl.store(out_at + place, tl.reshape(x, (K,)), mask=place < padded)
    tl.store(factor_at + token, ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    tl.store(factor_at + tokens + token, half)
    for start in range(token * 256, tiles, tokens * 256):
        place = start + tl.arange(0, 256)
        tl.store(count_at + place, tl.zeros([256], tl.int32), mask=place < tiles)


@triton.jit
def _halves(word):
    """(N, C) words of two fp16 -> (N, C, 2)."""
    low, high = (word & 0xFFFF).to(tl.uint16), (word >> 16).to(tl.uint16)
    return tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))


@triton.jit
def _bytes(word, INTERPRETED: tl.constexpr):
    """(N, C) words -> (N, C, 2, 2) fp16: 1024 + 128 + b of the signed bytes b; the pairs are along the last axis. 0x6400 is 1024,
    and the last bits of an fp16 there count ones."""
    word = word ^ 0x80808080
    if INTERPRETED:
        low = (word & 0xFF) | ((word & 0xFF00) << 8) | 0x64006400
        high = ((word >> 16) & 0xFF) | ((word >> 8) & 0xFF0000) | 0x64006400
    else:  # one instruction in place of four
        fill = word * 0 + 0x64646464
        low = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x4140;", "=r,r,r", [word, fill], dtype=tl.uint32, is_pure=True, pack=1
        )
        high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x4342;", "=r,r,r", [word, fill], dtype=tl.uint32, is_pure=True, pack=1
        )
    return tl.join(_halves(low), _halves(high))


@triton.jit
def _signs(word, bit):
    """(N, C) words -> (N, C, 2) fp16: 1 or -1 by this bit of each half of the word."""
    return _halves(((word << (15 - bit)) & 0x80008000) | 0x3C003C00)


@triton.jit(do_not_specialize=["key0", "key1", "upper0", "upper1"])
def product(
    x_at,
    factor_at,
    part_at,
    count_at,
    y_at,
    bias_at,
    tokens,
    padded,
    outputs,
    key0,
    key1,
    upper0,
    upper1,
    scale,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    PIECES: tl.constexpr,
):
    """y (tokens, outputs) = x by the weight, plus the bias; x (a multiple of T, padded) and factor are what `arrange` made; rows
    of x above `tokens` may hold anything. A program makes the sums of N outputs and T tokens over one of PIECES pieces of the
    inputs; part (tiles, PIECES, T, N) holds them. Late pieces may be empty."""
    PER_CALL: tl.constexpr = 16 if KIND == 1 else 128
    BLOCK: tl.constexpr = C * PER_CALL
    K: tl.constexpr = BLOCK if KIND == 1 else 8 * C  # of signs, one bit of each half at a time
    output = tl.program_id(0) * N + tl.arange(0, N)
    token = tl.program_id(1) * T + tl.arange(0, T)
    piece, is_token, is_output = tl.program_id(2), token < tokens, output < outputs
    x_at += token[None, :].to(tl.int64) * padded + tl.arange(0, K)[:, None]
    share = tl.cdiv(padded // BLOCK, PIECES) * BLOCK
    total = tl.zeros([N, T], dtype=tl.float32)
    for start in range(piece * share, tl.minimum(piece * share + share, padded), BLOCK):
        call = (start // PER_CALL + tl.arange(0, C)).to(tl.uint32)[None, :] + output.to(tl.uint32)[:, None] * 0
        a, b, c, d = philox(call, output.to(tl.uint32)[:, None] + call * 0, key0, key1, upper0, upper1)
        if KIND == 1:
            x = tl.load(x_at + start)
            first = tl.join(_bytes(a, INTERPRETED), _bytes(b, INTERPRETED))
            weight = tl.join(first, tl.join(_bytes(c, INTERPRETED), _bytes(d, INTERPRETED))) - 1152.0
            total = tl.dot(tl.reshape(tl.permute(weight, (0, 5, 4, 3, 1, 2)), (N, K)), x, total)
        else:
            for bit in range(16):
                x = tl.load(x_at + start + bit * K)
                first = tl.join(_signs(a, bit), _signs(b, bit))
                weight = tl.join(first, tl.join(_signs(c, bit), _signs(d, bit)))
                total = tl.dot(tl.reshape(tl.permute(weight, (0, 4, 3, 1, 2)), (N, K)), x, total)
    is_last = True
    if PIECES > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        within = tl.arange(0, N)[:, None] + tl.arange(0, T)[None, :] * N
        part_at += tile.to(tl.int64) * (PIECES * N * T) + within
        tl.store(part_at + piece * (N * T), total)
        tl.debug_barrier()
        is_last = tl.atomic_add(count_at + tile, 1) == PIECES - 1
        if is_last:
            total = tl.zeros([N, T], dtype=tl.float32)
            for number in tl.static_range(PIECES):  # always in this order
                total += tl.load(part_at + number * (N * T), cache_modifier=".cg")
    if is_last:
        if KIND == 1:  # 2 b + 1
            total = 2 * (total + tl.load(factor_at + tokens + token, mask=is_token, other=0.0)[None, :])
        total *= (tl.load(factor_at + token, mask=is_token, other=0.0) * scale)[None, :]
        if HAS_BIAS:
            total += tl.load(bias_at + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if INTERPRETED and y_at.dtype.element_ty == tl.bfloat16:
            total = as_bf16(total)
        inside = is_token[None, :] & is_output[:, None]
        place = token[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(y_at + place, total.to(y_at.dtype.element_ty), mask=inside)
