"""The arithmetic of a reduction in host memory, to the bit as every engine does it, compiled for one dtype and wire.

A contribution is factor * x in the accumulate dtype (float64 for float64, else float32): one product, rounded, then one
sum, rounded; never a fused multiply-add. Narrowing rounds to nearest even. float64 narrows to 16 bits by way of
float32, as torch does; NaN becomes 0x7FC0 in bfloat16.

Words
-----
x, y        addresses of elements of the tensor's dtype
wire        address of elements of the wire dtype, which is never wider
total       address of elements of the accumulate dtype: scratch in the first-level cache
count       elements of a block, at most BLOCK_ELEMENTS
rounded     narrowed to the wire and widened again

Every function is one loop over a block, written so that LLVM makes vector code of it: 16-bit floats travel as integers,
and their conversions have no branches.
"""

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import float32, float64, types, uint16, uint32
from numba.extending import intrinsic

from fusedring.kernels.host_layout import VERBS
from fusedring.kernels.host_memory import MACHINE, compiled_for_any_type

_HALF, _SINGLE = ir.HalfType(), ir.FloatType()

HAS_HALF = MACHINE == "aarch64" or bool(get_host_cpu_features().get("f16c"))
"""Whether the processor converts float16. Where it does not, LLVM would call a function that is not there."""


@intrinsic
def _bits(typing, x):
    return types.uint32(types.float32), lambda _, b, __, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def _real(typing, x):
    return types.float32(types.uint32), lambda _, b, __, a: b.bitcast(a[0], _SINGLE)


@intrinsic
def _float16_of(typing, x):
    return types.uint16(types.float32), lambda _, b, __, a: b.bitcast(b.fptrunc(a[0], _HALF), ir.IntType(16))


@intrinsic
def _of_float16(typing, x):
    return types.float32(types.uint16), lambda _, b, __, a: b.fpext(b.bitcast(a[0], _HALF), _SINGLE)


_LARGEST_HALF, _INFINITY = uint32(0x477FF000), uint32(0x7F800000)
_SMALLEST_NORMAL_HALF = uint32(0x38800000)


@compiled_for_any_type
def bfloat16_bits(x):
    """The bits of float32 `x` as a bfloat16."""
    bits = _bits(x)
    rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(rounded) if x == x else uint16(0x7FC0)


@compiled_for_any_type
def bfloat16_value(bits):
    """The float32 that these bits mean as a bfloat16."""
    return _real(uint32(bits) << uint32(16))


@compiled_for_any_type
def float16_bits_by_integers(x):
    """The bits of float32 `x` as a float16, without the processor's conversion.

    Below the smallest normal number, adding 0.5 leaves the bits of the subnormal, rounded, at the lower end of the
    mantissa: the unit in the last place of 0.5 is 2^-24, that of a subnormal float16.
    """
    bits = _bits(x)
    sign, size = (bits >> uint32(16)) & uint32(0x8000), bits & uint32(0x7FFFFFFF)
    subnormal = _bits(_real(size) + float32(0.5)) - uint32(0x3F000000)
    normal = (size - uint32(0x38000000) + uint32(0xFFF) + ((size >> uint32(13)) & uint32(1))) >> uint32(13)
    result = subnormal if size < _SMALLEST_NORMAL_HALF else normal
    result = uint32(0x7C00) if size >= _LARGEST_HALF else result
    result = uint32(0x7E00) if size > _INFINITY else result
    return uint16(result | sign)


@compiled_for_any_type
def float16_value_by_integers(bits):
    """The float32 that these bits mean as a float16, without the processor's conversion.

    2^112 is what the exponents' biases differ by: a product with it is exact, for subnormals as well.
    """
    size = uint32(bits & uint16(0x7FFF)) << uint32(13)
    value = _bits(_real(size) * float32(2.0**112))
    value = value if size < uint32(0x0F800000) else size | _INFINITY
    return _real(value | (uint32(bits & uint16(0x8000)) << uint32(16)))


@compiled_for_any_type
def float16_bits(x):
    """The bits of float32 `x` as a float16."""
    return _float16_of(x)


@compiled_for_any_type
def float16_value(bits):
    """The float32 that these bits mean as a float16."""
    return _of_float16(bits)


def _elements(kind):
    """Functions that load and store element `index` from an address, for one Numba type."""

    @intrinsic
    def load_element(typing, base, index):
        def code(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            return builder.load(builder.gep(pointer, [arguments[1]]))

        return kind(types.int64, types.int64), code

    @intrinsic
    def store_element(typing, base, index, value):
        def code(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
            builder.store(arguments[2], builder.gep(pointer, [arguments[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), code

    return load_element, store_element


STORED = {"float32": float32, "float64": float64, "float16": uint16, "bfloat16": uint16}
"""What an element is in memory: 16-bit floats are integers."""


def verbs(dtype, wire, *, has_half=HAS_HALF):
    """The verbs for tensors of `dtype` over `wire` (names of dtypes), in the order of VERBS: Python functions that
    take (target, a, b, factor, count), for Numba to compile. has_half: whether the processor converts float16."""
    real = float64 if dtype == "float64" else float32
    exact, lossless = STORED[wire] is real, wire == dtype
    load_x, store_x = _elements(STORED[dtype])
    load_wire, store_wire = _elements(STORED[wire])
    load_total, store_total = _elements(real)
    value_of, bits_of = _conversions(dtype, real, has_half)
    value_on_wire, bits_on_wire = _conversions(wire, real, has_half)

    @compiled_for_any_type
    def rounded(value):
        return value if exact else value_on_wire(bits_on_wire(value))

    @compiled_for_any_type
    def final(value):
        """The tensor's element that stands for a total: rounded to the wire first."""
        return bits_on_wire(value) if lossless else bits_of(rounded(value))

    def scale_to_wire(wire, x, _, factor, count):
        """wire = factor * x, narrowed."""
        by = real(factor)
        for i in range(count):
            store_wire(wire, i, bits_on_wire(by * value_of(load_x(x, i))))

    def scale_rounded(total, x, _, factor, count):
        """total = factor * x, rounded."""
        by = real(factor)
        for i in range(count):
            store_total(total, i, rounded(by * value_of(load_x(x, i))))

    def add_scaled_rounded(total, x, _, factor, count):
        """total += factor * x, rounded."""
        by = real(factor)
        for i in range(count):
            store_total(total, i, load_total(total, i) + rounded(by * value_of(load_x(x, i))))

    def add_scaled(total, x, _, factor, count):
        """total += factor * x."""
        by = real(factor)
        for i in range(count):
            store_total(total, i, load_total(total, i) + by * value_of(load_x(x, i)))

    def widen(total, wire, _, factor, count):
        """total = wire."""
        for i in range(count):
            store_total(total, i, value_on_wire(load_wire(wire, i)))

    def add_wire(total, wire, _, factor, count):
        """total += wire."""
        for i in range(count):
            store_total(total, i, load_total(total, i) + value_on_wire(load_wire(wire, i)))

    def narrow(wire, total, _, factor, count):
        """wire = total, narrowed."""
        for i in range(count):
            store_wire(wire, i, bits_on_wire(load_total(total, i)))

    def finish(x, total, _, factor, count):
        """x = total, rounded: the end of a sum."""
        for i in range(count):
            store_x(x, i, final(load_total(total, i)))

    def sum_of_two(x, a, b, factor, count):
        """x = factor * a + factor * b, each rounded: all of it, where two ranks' contributions lie raw."""
        by = real(factor)
        for i in range(count):
            one = rounded(by * value_of(load_x(a, i)))
            store_x(x, i, final(one + rounded(by * value_of(load_x(b, i)))))

    made = (scale_to_wire, scale_rounded, add_scaled_rounded, add_scaled, widen, add_wire, narrow, finish, sum_of_two)
    assert tuple(verb.__name__ for verb in made) == VERBS
    return made


def _conversions(name, real, has_half):
    """Functions from what is stored as dtype `name` to a number of type `real`, and back, rounded to nearest even."""
    if name in ("float32", "float64"):
        stored = STORED[name]

        @compiled_for_any_type
        def value(x):
            return real(x)

        @compiled_for_any_type
        def bits(x):
            return stored(x)

        return value, bits
    if name == "bfloat16":
        widen, narrow = bfloat16_value, bfloat16_bits
    elif has_half:
        widen, narrow = float16_value, float16_bits
    else:
        widen, narrow = float16_value_by_integers, float16_bits_by_integers

    @compiled_for_any_type
    def value_of_bits(x):
        return real(widen(x))

    @compiled_for_any_type
    def bits_of_value(x):
        return narrow(float32(x))

    return value_of_bits, bits_of_value
