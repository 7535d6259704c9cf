"""What `hopper_words` does with its products: halves of gate_up are activated, and results leave as rows.

A result's rows are rows of weights, in the order of the two products of `word_operand`; its columns are rows of x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minisgl.moe.kernels.roles import sigmoid
from minisgl.moe.kernels.tiles import KEPT
from minisgl.moe.kernels.word_operand import PART


@gluon.constexpr_function
def store_layout(outputs, n):
    """[outputs, n]: a warp keeps the neighbouring outputs it has as a result, a thread eight of them."""
    lanes = [[8 << i, 0] for i in range((outputs // 32).bit_length() - 1)]
    rows = 5 - len(lanes)
    lanes = lanes + [[0, 1 << i if 1 << i < n else 0] for i in range(rows)]
    more = [[0, 1 << i] for i in range(rows, n.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], *more],
        lanes,
        [[outputs // 4, 0], [outputs // 2, 0]],
        [],
        [outputs, n],
    )


@gluon.constexpr_function
def cache_policy(block_m):
    """Of results where blocks have few rows: they are few in all, so the L2 can keep them."""
    return KEPT.value if block_m <= 32 else ""


@gluon.jit
def halves(acc):
    """A result's halves [PART / 2, N]: of each 16 rows of weights the first eight, and the second."""
    N: gl.constexpr = acc.shape[1]
    first, second = acc.reshape([2, 4, 2, 8, N]).permute([1, 0, 3, 4, 2]).split()
    return first.reshape([PART // 2, N]), second.reshape([PART // 2, N])


@gluon.jit
def in_order(acc):
    """A result with its rows as weights have them."""
    N: gl.constexpr = acc.shape[1]
    return acc.reshape([2, 4, 16, N]).permute([1, 0, 2, 3]).reshape([PART, N])


@gluon.jit
def _activated(gate, up, ACTIVATION: gl.constexpr):
    """As `minisgl.moe.base.activate` has it; NaN stays NaN."""
    if ACTIVATION == "silu":
        return gate * sigmoid(gate) * up
    else:
        gate, up = gl.where(gate > 7.0, 7.0, gate), gl.where(up > 7.0, 7.0, up)
        return (gl.where(up < -7.0, -7.0, up) + 1.0) * gate * sigmoid(1.702 * gate)


@gluon.jit
def store_activated(
    acc, activated_PF, bias, first_row, first_unit, F: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """bias: pointer to a slot's."""
    gate, up = halves(acc)
    if HAS_BIAS:
        unit = first_unit + gl.arange(0, gate.shape[0], gl.SliceLayout(1, gate.type.layout))
        unit = gl.minimum(unit, F - 1)
        gate += gl.load(bias + unit)[:, None]
        up += gl.convert_layout(gl.load(bias + F + unit)[:, None], up.type.layout)
    hidden = _activated(gate, up, ACTIVATION).to(activated_PF.dtype.element_ty)
    out: gl.constexpr = store_layout(hidden.shape[0], hidden.shape[1])
    unit = first_unit + gl.arange(0, hidden.shape[0], gl.SliceLayout(1, out))
    p = first_row + gl.arange(0, hidden.shape[1], gl.SliceLayout(0, out))
    pointers = activated_PF + p.to(gl.int64)[None, :] * F + unit[:, None]
    POLICY: gl.constexpr = cache_policy(BLOCK_M)
    if F % PART == 0:
        gl.store(pointers, gl.convert_layout(hidden, out), eviction_policy=POLICY)
    else:
        mask = (unit < F)[:, None]
        gl.store(pointers, gl.convert_layout(hidden, out), mask=mask, eviction_policy=POLICY)


@gluon.jit
def store_outputs(
    acc, rows_RD, bias, sorted_R, num_routes, first_row, first_output, D: gl.constexpr, HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = acc.shape[1]
    out: gl.constexpr = store_layout(PART, N)
    row = in_order(acc)
    if HAS_BIAS:
        output = first_output + gl.arange(0, PART, gl.SliceLayout(1, row.type.layout))
        row += gl.load(bias + gl.minimum(output, D - 1))[:, None]
    row = row.to(rows_RD.dtype.element_ty)
    output = first_output + gl.arange(0, PART, gl.SliceLayout(1, out))
    route = gl.load(sorted_R + first_row + gl.arange(0, N, gl.SliceLayout(0, out)))
    pointers = rows_RD + route.to(gl.int64)[None, :] * D + output[:, None]
    mask = (route < num_routes)[None, :]
    if D % (2 * PART) != 0:
        mask = mask & (output < D)[:, None]
    POLICY: gl.constexpr = cache_policy(BLOCK_M)
    gl.store(pointers, gl.convert_layout(row, out), mask=mask, eviction_policy=POLICY)
