"""int4 weights as operands of a matrix product straight from the registers they were loaded into.

A product m16n8k16 multiplies 16 rows with 8 columns, 16 elements deep. Here its rows are weights (8 of one tile, 8 of
another), its columns rows of x, and which 16 elements of K it takes doesn't matter as long as both sides take the same:

    lane 4 g + q holds   four words (32 weights) of row g of both tiles, 64 bytes a row for the four lanes of a quad
                         and the activations of x row g that meet them
    lane 4 g + q gets    row g of both tiles times x rows 2 q and 2 q + 1

So a weight is unpacked once for eight rows of x (and multiplied twice for sixteen), nothing passes through shared memory,
and the sum over the quad is the tensor core's. A step is 128 columns of K: 16 words a row. Tiles of words, of activations
and of results are all [ROWS, 16], ROWS being 8 times the number of warps, which Triton lays out as above: four words a
thread, four threads a row, eight rows a warp. Row 8 w + g of activations is x row g, for every w.
A result's second dim is 4 q + 2 half + parity: of tile `half`, with x row 2 q + parity.

A step goes nibble by nibble, so that a quarter of its activations is held at a time. A set is eight rows of x: unpacked
weights serve all sets.

A step is one group of scales, so K is made of whole steps. Groups of 64 and 32 gave wrong numbers on the device when tried: a
thread asks its quad for scales (`spread`), and Triton 3.6 laid out theirs so that a quad didn't hold a row. Nothing but the
compiled code shows that: tests/unit/moe/test_few_rows_compile.py looks at it.

`0x4300 | code` is 128 + code in bf16, two codes an instruction. The 128 come off again through the sums of x, which are
products with ones. Without ASM (interpreter, activations other than bf16) codes are converted one by one.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _product_asm(sets, nibble):
    """Outputs: four results a set. Inputs: what they start from, four words of both tiles, four pairs of bf16 a set."""
    start, words = 4 * sets, 8 * sets
    lines = ["{", ".reg .b32 t, a0, a1, a2, a3;", f".reg .f32 d<{4 * sets}>;"]
    lines += [f"mov.f32 d{i}, ${start + i};" for i in range(4 * sets)]
    for word in (0, 2):
        for i in range(4):  # a0 and a2 are columns of the first tile's row, a1 and a3 of the second's
            source = f"${words + 4 * (i % 2) + word + i // 2}"
            if nibble:
                lines += [f"shr.u32 t, {source}, {4 * nibble};"]
                source = "t"
            lines += [f"lop3.b32 a{i}, {source}, 0x000F000F, 0x43004300, 0xEA;"]
        for i in range(sets):
            d = f"{{d{4 * i}, d{4 * i + 1}, d{4 * i + 2}, d{4 * i + 3}}}"
            x = words + 8 + 4 * i + word
            lines += [
                f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {{a0, a1, a2, a3}}, {{${x}, ${x + 1}}}, {d};"
            ]
    return "\n".join([*lines, *[f"mov.f32 ${i}, d{i};" for i in range(4 * sets)], "}"])


@triton.constexpr_function
def _sum_asm():
    """$0 .. $3 = $4 .. $7 + sums of x rows 2 q, 2 q + 1, 2 q, 2 q + 1 over the quad's columns, pairs $8 .. $11 of bf16."""
    lines = ["{", ".reg .b32 one;", ".reg .f32 d<4>;", "mov.b32 one, 0x3F803F80;"]
    lines += [f"mov.f32 d{i}, ${4 + i};" for i in range(4)]
    d = "{d0, d1, d2, d3}"
    for x in (8, 10):
        lines += [
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {{one, one, one, one}}, {{${x}, ${x + 1}}}, {d};"
        ]
    return "\n".join([*lines, *[f"mov.f32 ${i}, d{i};" for i in range(4)], "}"])


@triton.constexpr_function
def _constraints(sets):
    return ",".join(["=f"] * 4 * sets + ["f"] * 4 * sets + ["r"] * (8 + 4 * sets))


@triton.constexpr_function
def _from_lane(lane):
    """$0 = $1 of a lane of the quad."""
    return f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1C1F, 0xFFFFFFFF;"


_SUM_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 4))


@triton.jit
def in_order(k):
    """Where column k of a row of x is stored: in every step, quads side by side for each nibble."""
    within = k % 128
    return k - within + within % 32 // 8 * 32 + within // 32 * 8 + k % 8


@triton.jit
def load_nibble(
    x, rows, step, here, nibble: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr
):
    """The activations of one step that meet one nibble of a tile's words, as a tuple of [ROWS, 16]: pairs of bf16 as
    int32; without ASM two of float32. rows: int64 [ROWS, 1], of x stored `in_order`. What stands where not here may
    be anything: those rows' results are never used."""
    i = tl.arange(0, 16)[None, :]
    at = step * 64 + nibble * 16 + i
    inside = here
    if not EVEN:
        inside = here & (step * 16 + i < K // 8)
    if ASM:
        return (tl.load(x.to(tl.pointer_type(tl.int32)) + rows * (K // 2) + at, mask=inside, other=0),)
    else:
        first = x + rows * K + 2 * at
        even, odd = tl.load(first, mask=inside, other=0.0), tl.load(first + 1, mask=inside, other=0.0)
        return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def spread(column, j: tl.constexpr, ASM: tl.constexpr):
    """Column j of float32 [ROWS, 4] as every column of [ROWS, 16]."""
    ROWS: tl.constexpr = column.shape[0]
    if ASM:
        one = tl.inline_asm_elementwise(_from_lane(j), "=f,f", [column], tl.float32, True, 1)
        return tl.broadcast_to(one[:, :, None], (ROWS, 4, 4)).reshape(ROWS, 16)
    else:
        mine = (tl.arange(0, 4) == j)[None, :]
        return tl.broadcast_to(tl.sum(tl.where(mine, column, 0.0), 1)[:, None], (ROWS, 16))


@triton.jit
def _result(a, b):
    """Two tiles [ROWS, 8 rows of x] as one of results."""
    both = tl.permute(tl.join(a, b).reshape(a.shape[0], 4, 2, 2), (0, 1, 3, 2))
    return both.reshape(a.shape[0], 16)


@triton.jit
def halves(result):
    """The two tiles [ROWS, 4, 2] of a result: rows of weights, then of x (4 pairs)."""
    return tl.split(tl.permute(result.reshape(result.shape[0], 4, 2, 2), (0, 1, 3, 2)))


@triton.jit
def add_sums(sums, x, ASM: tl.constexpr):
    """Like a result: sums plus those of the x rows over one nibble's columns."""
    if ASM:
        return tl.inline_asm_elementwise(_sum_asm(), _SUM_CONSTRAINTS, [sums, x[0]], tl.float32, True, 4)
    else:
        WARPS: tl.constexpr = sums.shape[0] // 8
        total = tl.sum(x[0] + x[1], 1).reshape(WARPS, 1, 8)
        total = tl.broadcast_to(total, (WARPS, 8, 8)).reshape(8 * WARPS, 8)
        return sums + _result(total, total)


@triton.jit
def _plain_dot(words, x, nibble: tl.constexpr):
    """Float32 [ROWS, 8 rows of x], code by code."""
    WARPS: tl.constexpr = words.shape[0] // 8
    total = tl.zeros((WARPS, 8, 8), tl.float32)
    for half in tl.static_range(2):
        code = (words >> (4 * nibble + 16 * half) & 15).to(tl.float32)
        total += tl.sum((128.0 + code).reshape(WARPS, 8, 1, 16) * x[half].reshape(WARPS, 1, 8, 16), 3)
    return total.reshape(8 * WARPS, 8)


@triton.jit
def multiply(a, b, xs, starts, nibble: tl.constexpr, ASM: tl.constexpr):
    """starts plus one nibble of two tiles' words times the rows of each set, as a tuple of results; codes count as
    128 + code. xs: a tuple of sets, see `load_nibble`."""
    SETS: tl.constexpr = len(xs)
    if not ASM:
        results = ()
        for i in tl.static_range(SETS):
            product = _result(_plain_dot(a, xs[i], nibble), _plain_dot(b, xs[i], nibble))
            results = results + (starts[i] + product,)  # noqa: RUF005
        return results
    elif SETS == 1:
        return (
            tl.inline_asm_elementwise(
                _product_asm(1, nibble), _constraints(1), [starts[0], a, b, xs[0][0]], tl.float32, True, 4
            ),
        )
    elif SETS == 2:
        return tl.inline_asm_elementwise(
            _product_asm(2, nibble), _constraints(2), [starts[0], starts[1], a, b, xs[0][0], xs[1][0]],
            (tl.float32, tl.float32), True, 4,
        )  # fmt: skip
    elif SETS == 3:
        return tl.inline_asm_elementwise(
            _product_asm(3, nibble), _constraints(3),
            [starts[0], starts[1], starts[2], a, b, xs[0][0], xs[1][0], xs[2][0]],
            (tl.float32, tl.float32, tl.float32), True, 4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _product_asm(4, nibble), _constraints(4),
            [starts[0], starts[1], starts[2], starts[3], a, b, xs[0][0], xs[1][0], xs[2][0], xs[3][0]],
            (tl.float32, tl.float32, tl.float32, tl.float32), True, 4,
        )  # fmt: skip
