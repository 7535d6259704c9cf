"""4-bit weights as the operand that Hopper's tensor cores take from registers; what `hopper_words` multiplies with.

Of an asynchronous product of a warp group, 64 x N x 16, only the first operand may come from registers, so the result is
transposed: its rows are rows of weights, its N columns rows of x, which lie in shared memory as bf16. A weight is unpacked once
for all rows of a block, in the thread that needs it, and never written anywhere.

Unpacking moves nothing, because words are stored in the order of `formats.packing`. Loaded as 16-bit numbers (as a tile of bf16
would be), a lane's register holds words 2 q and 2 q + 1 of a run of 32 columns, and its i-th nibbles are columns 8 i + 2 q and
8 i + 2 q + 1: the pair that lane q has to have of every eight columns. So a register gives four of the operand's, for the run's
columns in their own order, and x is used as it is.

A consumer (a group of four warps) has PART rows of weights. Its products are in flight only within a step: registers that a
product reads mustn't change until it is waited for, and ptxas waits after each one when some are in flight where a loop begins
anew (it says so: "wgmma.mma_async instructions are serialized"). The other consumer fills the gap.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minisgl.moe.kernels.roles import next_place
from minisgl.moe.kernels.tiles import e2m1_asm

PART = gl.constexpr(128)  # rows of weights of a consumer: two products
COLUMNS = gl.constexpr(64)  # of x in a tile of shared memory, which then has rows of 128 bytes


@gluon.constexpr_function
def acc_layout(n):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def operand_layout(n):
    return gl.DotOperandLayout(0, acc_layout(n), 2)


@gluon.constexpr_function
def word_layout(words):
    """[PART, words]: the bits of a row are, from the lowest, its place among eight (lanes), whether it is the second eight of
    16 (a register), which of the two products it belongs to (a register), and its warp."""
    runs = [[0, 8 << i] for i in range((words // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], *runs, [16, 0]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[32, 0], [64, 0]],
        [],
        [128, words],
    )


@gluon.constexpr_function
def largest_power(n):
    return 1 << (int(n).bit_length() - 1)


@gluon.constexpr_function
def _unpack_asm(scaled):
    """Four outputs. $4: two words, $5: -(128 + zero) twice, $6: the scale twice."""
    lines = ["{", ".reg .b32 t, one, nz;", "mov.b32 one, 0x3F803F80;", "mov.b32 nz, 0x80008000;"]
    for i in range(4):
        lines += [f"shr.u32 t, $4, {4 * i};"] if i else []
        lines += [f"lop3.b32 ${i}, {'t' if i else '$4'}, 0x000F000F, 0x43004300, 0xEA;"]
    lines += [f"fma.rn.bf16x2 ${i}, ${i}, one, $5;" for i in range(4)]
    lines += [f"fma.rn.bf16x2 ${i}, ${i}, $6, nz;" for i in range(4)] if scaled else []
    return "\n".join([*lines, "}"])


@gluon.jit
def _unpack(words, offset, scale, N: gl.constexpr, SCALED: gl.constexpr):
    """Words [PART, 16], offset and scale bf16 [PART] -> code - zero (SCALED: times scale) [PART, 64], as an operand."""
    types: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    offset = gl.broadcast(offset.expand_dims(1), words)[0]
    if SCALED:
        scale = gl.broadcast(scale.expand_dims(1), words)[0]
        a, b, c, d = gl.inline_asm_elementwise(
            _unpack_asm(True), "=&r,=&r,=&r,=&r,r,r,r", [words, offset, scale], types, True, 2
        )
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            _unpack_asm(False), "=&r,=&r,=&r,=&r,r,r", [words, offset], types, True, 2
        )
    nibbles = gl.join(gl.join(a, b), gl.join(c, d))  # low and high bit of the nibble last
    rows = nibbles.reshape([4, 2, 16, 2, 8, 2, 2]).permute([1, 0, 2, 3, 6, 5, 4])
    return gl.convert_layout(rows.reshape([PART, 64]), operand_layout(N))


def _mxfp4_asm(group: int) -> str:
    """Four outputs. $4: two words, $5 and $7: halves of the scales of four groups, see `_split_scales`. E2M1 bits at their
    place in a bf16 are 2^-126 times what they mean, and scales alone reach 2^127: two multiplications, both exact."""
    lines = ["{", ".reg .b32 s, m, lift, scale;", "mov.b32 lift, 0x7E807E80;"]
    lines.append(f"prmt.b32 scale, $5, $7, 0x{group}{4 + group}{group}{4 + group};")
    for i in range(4):
        lines += e2m1_asm(f"${i}", "$4", i)
    lines += [f"mul.rn.bf16x2 ${i}, ${i}, lift;" for i in range(4)]
    lines += [f"mul.rn.bf16x2 ${i}, ${i}, scale;" for i in range(4)]
    return "\n".join([*lines, "}"])


_MXFP4_ASM = gl.constexpr(tuple(_mxfp4_asm(group) for group in range(4)))


@gluon.jit
def _split_scales(four):
    """Four E8M0 scales (uint32) as high and low bytes of bf16: what 255 means, NaN, needs a bit of mantissa. (2^-127, which
    would need one, too, counts as zero.)"""
    nan = ((four & 0x7F7F7F7F) + 0x01010101) & four & 0x80808080
    return four >> 1 & 0x7F7F7F7F, four << 7 & 0x80808080 | nan >> 1


@gluon.jit
def _unpack_mxfp4(run, high, low, GROUP: gl.constexpr):
    """Words [PART, 8] of 32 columns, and [PART] from `_split_scales`, of whose groups it is number GROUP -> weights, by
    nibble: bf16 [PART, 8, 2, 2]."""
    types: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    high = gl.broadcast(high.expand_dims(1), run)[0]
    low = gl.broadcast(low.expand_dims(1), run)[0]
    a, b, c, d = gl.inline_asm_elementwise(
        _MXFP4_ASM[GROUP], "=&r,=&r,=&r,=&r,r,r,r,r,r", [run, high, low], types, True, 2
    )
    return gl.join(gl.join(a, b), gl.join(c, d))  # low and high bit of the nibble last


@gluon.jit
def _in_parts(words, COUNT: gl.constexpr):
    """[PART, COUNT WIDTH] as a tuple of [PART, WIDTH]."""
    if COUNT == 1:
        return (words,)
    else:
        a, b = words.reshape([PART, 2, words.shape[1] // 2]).permute([0, 2, 1]).split()
        return _in_parts(a, COUNT // 2) + _in_parts(b, COUNT // 2)


@gluon.jit
def load_words(words, c: gl.constexpr):
    """A consumer's words of a stage: int16 [PART, BLOCK_K / 4]."""
    WIDTH: gl.constexpr = words.shape[-1]
    return words.reshape([2 * PART, WIDTH]).slice(c * PART, PART, dim=0).load(word_layout(WIDTH))


@gluon.constexpr_function
def steps_of(size, block_k):
    return -(-size // block_k)


@gluon.constexpr_function
def words_of_scales(scale, size):
    """Tiles of shared memory for the scales of 128 columns, of rows with `size`. Four scales of mxfp4 are a word, where rows
    begin with one, else parts of two."""
    return 2 if scale == gl.uint32 and size % 128 != 0 else 1


@gluon.jit
def _four_scales(scales, at, c: gl.constexpr, layout: gl.constexpr, last, K: gl.constexpr):
    """mxfp4: uint32 [PART], those of 128 columns of a consumer's rows; zero past the end of rows, which the `last` may pass."""
    if K % 128 == 0:
        return scales.index(at).slice(c * PART, PART, dim=0).load(layout)
    else:
        low = scales.index(2 * at).slice(c * PART, PART, dim=0).load(layout)
        high = scales.index(2 * at + 1).slice(c * PART, PART, dim=0).load(layout)
        shift = gl.arange(0, PART, layout) * (K // 32) % 4 * 8
        four = gl.inline_asm_elementwise(
            "shf.r.clamp.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], gl.uint32, True, 1
        )
        INSIDE: gl.constexpr = (1 << K % 128 // 4) - 1  # a scale is 8 bits, and 32 columns
        return gl.where(last, four & INSIDE, four)


@gluon.jit
def all_params(
    pipe, stage, c: gl.constexpr, step, layout: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Scales (float32) and offsets -(128 + zero) (bf16) of a consumer's rows, [PART] for each of a step's GROUPS."""
    _rows, _words, scales, zeros, _full, _empty = pipe
    found, offsets = (), ()
    for g in gl.static_range(GROUPS):
        at = stage * GROUPS + g
        found = found + (scales.index(at).slice(c * PART, PART, dim=0).load(layout),)  # noqa: RUF005
        offset = gl.full([PART], -136.0, gl.bfloat16, layout)
        # Four bytes, one of which is this row's: a row has K / 128, and a consumer's first one begins a word.
        if zeros.dtype == gl.int32:
            word = zeros.index(at).slice(c * PART, PART, dim=0).load(layout)
            byte = (gl.arange(0, PART, layout) * (K // 128) + step * GROUPS + g) % 4
            offset = (-128.0 - (word >> byte * 8 & 0xFF).to(gl.float32)).to(gl.bfloat16)
        offsets = offsets + (offset,)  # noqa: RUF005
    return found, offsets


@gluon.jit
def _scaled_weights(pipe, stage, c: gl.constexpr, step, K: gl.constexpr, TILES: gl.constexpr):
    """What `_scaled_operand` makes a consumer's weights of a stage from: words, and of each 128 columns scales and offsets
    (mxfp4: halves of scales)."""
    GROUPS: gl.constexpr = TILES * COLUMNS // 128
    words = load_words(pipe[1].index(stage), c)
    if pipe[2].dtype == gl.uint32:
        runs, last = _in_parts(words, 2 * TILES), step == steps_of(K, TILES * COLUMNS) - 1
        rows: gl.constexpr = gl.SliceLayout(1, runs[0].type.layout)
        high, low = (), ()
        for g in gl.static_range(GROUPS):
            four = _four_scales(pipe[2], stage * GROUPS + g, c, rows, last, K)
            of_four = _split_scales(four)
            high, low = high + (of_four[0],), low + (of_four[1],)  # noqa: RUF005
        return runs, high, low
    else:
        runs = _in_parts(words, TILES)
        scales, offsets = all_params(pipe, stage, c, step, gl.SliceLayout(1, runs[0].type.layout), K, GROUPS)
        return runs, scales, offsets


@gluon.jit
def _scaled_operand(weights, t: gl.constexpr, N: gl.constexpr):
    """Columns 64 t to 64 t + 63, [PART, 64]."""
    if weights[1][0].dtype == gl.uint32:
        a = _unpack_mxfp4(weights[0][2 * t], weights[1][t // 2], weights[2][t // 2], t % 2 * 2)
        b = _unpack_mxfp4(weights[0][2 * t + 1], weights[1][t // 2], weights[2][t // 2], t % 2 * 2 + 1)
        rows = gl.join(a, b).reshape([4, 2, 16, 8, 2, 2, 2]).permute([1, 0, 2, 6, 5, 4, 3])
        return gl.convert_layout(rows.reshape([PART, 64]), operand_layout(N))
    else:
        return _unpack(weights[0][t], weights[2][t // 2], weights[1][t // 2].to(gl.bfloat16), N, True)


@gluon.jit
def _columns_of(x, first: gl.constexpr, count: gl.constexpr):
    """Rows of x [.., 64] as columns of a product."""
    return x.slice(first, count, dim=0).permute([1, 0])


@gluon.jit
def multiply_scaled(
    pipe, stage, phase, c: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Weights with their scales times N rows of x: results [PART, ..], one or two (sizes are powers of two), then where
    the ring stands."""
    rows, _words, _scales, _zeros, full, empty = pipe
    TILES: gl.constexpr = BLOCK_K // COLUMNS
    N0: gl.constexpr = largest_power(N)
    N1: gl.constexpr = N - N0
    acc0 = gl.zeros([PART, N0], gl.float32, acc_layout(N0))
    if N1 > 0:
        acc1 = gl.zeros([PART, N1], gl.float32, acc_layout(N1))
    for step in range(steps_of(K, BLOCK_K)):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        weights = _scaled_weights(pipe, stage, c, step, K, TILES)
        for t in gl.static_range(TILES):
            operand = _scaled_operand(weights, t, N0)
            x = rows.index(stage * TILES + t)
            flying = warpgroup_mma(operand, _columns_of(x, 0, N0), acc0, is_async=True)
            if N1 > 0:
                again = gl.convert_layout(operand, operand_layout(N1))
                more = warpgroup_mma(again, _columns_of(x, N0, N1), acc1, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(2 if t + 1 < TILES else 0, [flying, more])
            else:
                acc0 = warpgroup_mma_wait(1 if t + 1 < TILES else 0, [flying])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_place(stage, phase, full.shape[0])
    if N1 > 0:
        return (acc0, acc1), stage, phase
    else:
        return (acc0,), stage, phase


@gluon.jit
def multiply_codes(
    pipe, stage, phase, c: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """As `multiply_scaled`, for few rows (a power of two): scales are applied to the product of each group, which takes
    fewer instructions than applying them to weights."""
    rows, words, _scales, _zeros, full, empty = pipe
    TILES: gl.constexpr = BLOCK_K // COLUMNS
    GROUPS: gl.constexpr = BLOCK_K // 128
    out: gl.constexpr = acc_layout(N)
    acc = gl.zeros([PART, N], gl.float32, out)
    nothing = gl.zeros([PART, N], gl.float32, out)
    for step in range(steps_of(K, BLOCK_K)):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        runs = _in_parts(load_words(words.index(stage), c), TILES)
        scales, offsets = all_params(pipe, stage, c, step, gl.SliceLayout(1, runs[0].type.layout), K, GROUPS)
        for g in gl.static_range(GROUPS):
            by_product = scales[g].reshape([4, 2, 16]).permute([1, 0, 2]).reshape([PART])
            factor = gl.convert_layout(by_product, gl.SliceLayout(1, out)).expand_dims(1)
            x = _columns_of(rows.index(stage * TILES + 2 * g), 0, N)
            dot = warpgroup_mma(
                _unpack(runs[2 * g], offsets[g], scales[g], N, False),
                x,
                nothing,
                use_acc=False,
                is_async=True,
            )
            x = _columns_of(rows.index(stage * TILES + 2 * g + 1), 0, N)
            dot = warpgroup_mma(
                _unpack(runs[2 * g + 1], offsets[g], scales[g], N, False), x, dot, is_async=True
            )
            acc += warpgroup_mma_wait(0, [dot]) * factor
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_place(stage, phase, full.shape[0])
    return (acc,), stage, phase


@gluon.jit
def multiply(
    pipe, stage, phase, c: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr, LATE: gl.constexpr
):  # fmt: skip
    """K: columns of weights, of which the last step may have fewer than BLOCK_K: the others are zero in x and in weights."""
    if LATE:
        return multiply_codes(pipe, stage, phase, c, N, K, BLOCK_K)
    else:
        return multiply_scaled(pipe, stage, phase, c, N, K, BLOCK_K)
