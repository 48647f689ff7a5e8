"""Between a tensor's dtype and the wire: widening loads, and stores that round to nearest even.

On a GPU the hardware's conversion does that; Triton's interpreter truncates float32 to bfloat16. Rounding here is
integer arithmetic, so that both give the same bits.

Example: 1.00390625 = 0x3F808000 lies half-way between the bfloat16 values 0x3F80 and 0x3F81. Adding 0x7FFF plus the
lowest kept bit (0) gives 0x3F80FFFF, whose upper half is 0x3F80, the even one. From 0x3F818000 the kept bit is 1, the
sum 0x3F820000, and the result 0x3F82, even again.
"""

import triton
import triton.language as tl


@triton.jit
def narrow(x, wire: tl.constexpr):
    """float32 or float64 `x` in the `wire` dtype, rounded to nearest even.

    A float64 narrows to 16 bits by way of float32, as torch does. NaN becomes the quiet NaN 0x7FC0 in bfloat16.
    """
    if wire == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        result = tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif wire == tl.float16:
        result = x.to(tl.float32).to(tl.float16)
    else:
        result = x.to(wire)
    return result


@triton.jit
def widen(x, accumulate: tl.constexpr):
    """`x` from the wire or a tensor, exactly, in the `accumulate` dtype (float32 or float64)."""
    if x.dtype == tl.bfloat16:
        result = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(accumulate)
    else:
        result = x.to(accumulate)
    return result
