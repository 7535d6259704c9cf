"""Parts of kernels whose warps have roles: the ring of buffers that they share, and how tiles are handed out.

A producer (four warps) fills buffers; two consumers (four warps each) multiply what is in them: of `hopper`, whose products are
here, each 64 rows x 256 columns; those of `hopper_words` are in `word_operand`, those of `persistent` in `stream`.
A buffer has a barrier that says it is full, and one that says both consumers are done with it. Whoever goes round the ring
carries its place and a parity: that of the round in which it is. Numbers of tiles reach the consumers through a ring of
their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_M = gl.constexpr(128)
ROWS = gl.constexpr(64)  # of a consumer
BLOCK_N = gl.constexpr(256)  # rows of weights
RING = gl.constexpr(2)  # numbers of tiles on their way to the consumers
WORD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SCALAR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ACC_FP8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 32]))


@gluon.constexpr_function
def store_layout(columns):
    """[64, columns]: a warp keeps the 16 rows it has as a result of the tensor cores; a thread gets 8 neighbouring columns."""
    more = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *more],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, columns],
    )


@gluon.jit
def next_place(at, phase, SIZE: gl.constexpr):
    """The next place of a ring, and the parity that its barriers are waited for with."""
    at += 1
    wrapped = at == SIZE
    return gl.where(wrapped, 0, at), phase ^ wrapped.to(gl.int32)


@gluon.jit
def taken_tile(turn, counter, first, total):
    """The tile of a turn of the counter, or -1. Every program is refused once, and the last one sets the counter back for the
    next launch."""
    if turn == total + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    return gl.where(turn < total, first + turn, -1)


@gluon.jit
def take_tile(counter, total):
    """The next tile, or -1."""
    return taken_tile(gl.atomic_add(counter, 1, sem="relaxed"), counter, 0, total)


@gluon.jit
def place_of_tile(tile, num_m, NUM_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Tile to (row block, column block), GROUP_M row blocks sharing each column block's weights in L2."""
    group = tile // (GROUP_M * NUM_N)
    size = gl.minimum(num_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * NUM_N)
    return group * GROUP_M + within % size, within // size


@gluon.jit
def send(ring, at, phase, word):
    tiles, sent, taken = ring
    mbarrier.wait(taken.index(at), phase ^ 1)
    tiles.index(at).store(gl.full([1], word, gl.int32, SCALAR))
    mbarrier.arrive(sent.index(at), count=1)


@gluon.jit
def receive(ring, at, phase):
    """What the producer sent of a tile, as its kernel has it; -1: there are no more."""
    tiles, sent, taken = ring
    mbarrier.wait(sent.index(at), phase)
    word = gl.max(tiles.index(at).load(SCALAR), 0)
    mbarrier.arrive(taken.index(at), count=1)
    return word


@gluon.jit
def sigmoid(x):
    """To a few units in the last place, of each value by itself: where neighbours in a thread belong to different rows, whose
    results must not depend on each other. (Where they are of one row, as in `hopper`, two can share a reciprocal.)"""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 a; mul.f32 a, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 a, a; add.f32 a, a, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, a; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def multiply(pipe, stage, phase, c: gl.constexpr, STEPS: gl.constexpr, COPIED: gl.constexpr):
    """A consumer's 64 rows times 256 rows of weights; then where the ring stands. COPIED: rows came by asynchronous copies,
    which the tensor cores see only behind a fence."""
    rows, weights, full, empty = pipe
    acc = gl.zeros([ROWS, BLOCK_N], gl.float32, ACC_FP8 if rows.dtype.primitive_bitwidth == 8 else ACC)
    before = 0  # not `stage`: the frontend takes an alias of a variable of the loop for a constant
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        if COPIED:
            fence_async_shared()
        x = rows.index(stage * 2 + c)
        w = weights.index(stage).reshape([BLOCK_N, x.shape[1]]).permute([1, 0])
        acc = warpgroup_mma_wait(1, [warpgroup_mma(x, w, acc, is_async=True)])
        mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
        before = stage
        stage, phase = next_place(stage, phase, full.shape[0])
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(before), count=1)
    return acc, stage, phase


@gluon.jit
def skip(pipe, stage, phase, STEPS: gl.constexpr):
    """Of a consumer without rows."""
    _rows, _weights, full, empty = pipe
    for _ in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_place(stage, phase, full.shape[0])
    return stage, phase


@gluon.jit
def rings(FULL: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of the buffers, each full after FULL arrivals, and the ring of tile numbers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    tiles = gl.allocate_shared_memory(gl.int32, [RING, 1], WORD)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(RING):
        mbarrier.init(sent.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    return full, empty, (tiles, sent, taken)
