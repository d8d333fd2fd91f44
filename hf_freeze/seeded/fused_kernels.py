"""Triton kernels that make a seeded weight in registers (imported by fused_gpu.py only where Triton is installed).

Shapes: T tokens, K inputs and N outputs of a product; the weight is (N, K) for axis 0, (K, N) for axis 1. A tile of it is (R, C).
Tested, bit for bit, in the interpreter of Triton 3.9 on a CPU, and on an H100 with Triton 3.6.
"""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def _interleaved(a, b, c, d):
    """a0 b0 c0 d0 a1 b1 ... along the last axis."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _uniform(word, scale):
    return ((word >> 8).to(tl.int32).to(tl.float32) + (0.5 - 8388608.0)) * scale


@triton.jit
def _octet(word, shift: tl.constexpr):
    """2b + 1 of a signed byte b of the word."""
    octet = ((word >> shift) & 255).to(tl.int32)
    return (2 * (octet - 2 * (octet & 128)) + 1).to(tl.float32)


@triton.jit
def as_bf16(values):
    """fp32, rounded to the nearest bf16, ties to even. Triton's interpreter would cut bits off, and multiplies bf16 wrongly."""
    bits = values.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def philox(first, second, key0, key1, upper0, upper1):
    """The four words of the calls of Philox-4x32-10 with these first and second counter words, uint32 of one shape. One
    multiplication gives both halves of a product; Triton's own philox takes two."""
    key0, key1 = key0.to(tl.uint32), key1.to(tl.uint32)
    third, fourth = first * 0 + upper0.to(tl.uint32), first * 0 + upper1.to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = first.to(tl.uint64) * 0xD2511F53, third.to(tl.uint64) * 0xCD9E8D57
        first, third = (b >> 32).to(tl.uint32) ^ second ^ key0, (a >> 32).to(tl.uint32) ^ fourth ^ key1
        second, fourth = b.to(tl.uint32), a.to(tl.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return first, second, third, fourth


@triton.jit
def _tile(
    rows,
    column,
    key0,
    key1,
    upper0,
    upper1,
    width,
    scale,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    C: tl.constexpr,
):
    """fp32 (R, C): `rows` int64 (R,), columns from `column` on. ALIGNED: a row of `width` has whole calls of 4 uniform values."""
    if KIND == 0:
        if ALIGNED:
            call = (rows[:, None] * width + column) // 4 + tl.arange(0, C // 4)[None, :]
        else:  # every value has a call of its own, of which it takes one word
            place = rows[:, None] * width + column + tl.arange(0, C)[None, :]
            call = place // 4
        first, second = (call & 0xFFFFFFFF).to(tl.uint32), (call >> 32).to(tl.uint32)
        a, b, c, d = philox(first, second, key0, key1, upper0, upper1)
        if ALIGNED:
            values = _interleaved(_uniform(a, scale), _uniform(b, scale), _uniform(c, scale), _uniform(d, scale))
        else:
            word = place % 4
            values = _uniform(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)), scale)
    else:
        PER_CALL: tl.constexpr = 16 if KIND == 1 else 128
        number = column // PER_CALL + tl.arange(0, C // PER_CALL)[None, :]
        zero = (rows[:, None] * 0 + number * 0).to(tl.uint32)
        a, b, c, d = philox(zero + number.to(tl.uint32), zero + rows[:, None].to(tl.uint32), key0, key1, upper0, upper1)
        words = _interleaved(a, b, c, d)
        if KIND == 1:
            values = _interleaved(_octet(words, 0), _octet(words, 8), _octet(words, 16), _octet(words, 24)) * scale
        else:
            bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :].to(tl.uint32)) & 1
            values = (1 - 2 * tl.reshape(bits, [words.shape[0], C]).to(tl.int32)).to(tl.float32) * scale
    return values


@triton.jit(do_not_specialize=["key0", "key1", "upper0", "upper1"])
def product(
    x_at,
    y_at,
    bias_at,
    tokens,
    inputs,
    outputs,
    width,
    key0,
    key1,
    upper0,
    upper1,
    scale,
    AXIS: tl.constexpr,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16_BY_HAND: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """y (T, N) = x (T, K) by the weight, plus the bias: a program makes T tokens of N outputs, K inputs at a time."""
    token = tl.program_id(0) * T + tl.arange(0, T)
    begin = tl.program_id(1) * N
    output = begin + tl.arange(0, N)
    total = tl.zeros([T, N], dtype=tl.float32)
    for start in range(0, inputs, K):
        place = start + tl.arange(0, K)
        inside = (token[:, None] < tokens) & (place[None, :] < inputs)
        x = tl.load(x_at + token[:, None].to(tl.int64) * inputs + place[None, :], mask=inside, other=0.0)
        if AXIS == 0:
            weight = _tile(
                output.to(tl.int64), start, key0, key1, upper0, upper1, width, scale, KIND=KIND, ALIGNED=ALIGNED, C=K
            )
            weight = tl.trans(weight)
        else:
            weight = _tile(
                place.to(tl.int64), begin, key0, key1, upper0, upper1, width, scale, KIND=KIND, ALIGNED=ALIGNED, C=N
            )
        if BF16_BY_HAND:
            total = tl.dot(x.to(tl.float32), as_bf16(weight), total, input_precision=PRECISION)
        else:
            total = tl.dot(x, weight.to(x.dtype), total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_at + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    if BF16_BY_HAND:
        total = as_bf16(total)
    inside = (token[:, None] < tokens) & (output[None, :] < outputs)
    tl.store(
        y_at + token[:, None].to(tl.int64) * outputs + output[None, :], total.to(y_at.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["key0", "key1", "upper0", "upper1"])
def lookup(
    ids_at,
    y_at,
    count,
    width,
    key0,
    key1,
    upper0,
    upper1,
    scale,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BF16_BY_HAND: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """y (count, width): the rows `ids` of a table; a program makes R of them, C columns wide."""
    place = tl.program_id(0) * R + tl.arange(0, R)
    begin = tl.program_id(1) * C
    rows = tl.load(ids_at + place, mask=place < count, other=0).to(tl.int64)
    values = _tile(rows, begin, key0, key1, upper0, upper1, width, scale, KIND=KIND, ALIGNED=ALIGNED, C=C)
    if BF16_BY_HAND:
        values = as_bf16(values)
    column = begin + tl.arange(0, C)
    inside = (place[:, None] < count) & (column[None, :] < width)
    tl.store(
        y_at + place[:, None].to(tl.int64) * width + column[None, :], values.to(y_at.dtype.element_ty), mask=inside
    )
