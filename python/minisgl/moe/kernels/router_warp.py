"""The router as a warp a token: the K largest logits and their weights, without shared memory.

A decode step waits for its router, so latency is what counts. `router` ranks every expert against every other one, for which
four warps meet in shared memory seven times. Here a warp has all logits in registers, a few a lane, as integers that sort like
them, and asks K times for the largest of all lanes: of those below the last one, since `value - last` wraps around to more
than any other difference. A count of those that are at least the lowest found shows whether a value occurs twice; only then it
starts over and takes one element away a round.

For rules that choose by logits and whose weights follow from the chosen ones alone: a softmax over all, renormalised, is one
over the chosen. A tie goes to the lower index, NaN counts as the lowest and infinities as the largest finite number.
"""

from functools import lru_cache

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous


def _load(values: int, half: bool) -> list[str]:
    """h0, h1, .. = the lane's logits as float32: `values` neighbours. half: they are stored as bf16."""
    words = values // 2 if half else values
    lines = [f"mad.wide.u32 at, lane, {4 * words}, $3;"]
    for first in range(0, words, 4):
        count = min(words - first, 4)
        names = ", ".join(f"h{first + i}" for i in range(count))
        vector, names = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
        lines.append(f"ld.global{vector}.b32 {names}, [at + {4 * first}];")
    for i in reversed(range(words if half else 0)):  # word i has the values 2 i and 2 i + 1, lower half first
        lines += [f"and.b32 h{2 * i + 1}, h{i}, 0xFFFF0000;", f"shl.b32 h{2 * i}, h{i}, 16;"]
    return lines


def _sortable(values: int) -> list[str]:
    """The same as unsigned integers in the order of the numbers; none of them is zero."""
    lines = []
    for i in range(values):
        lines += [f"max.f32 h{i}, h{i}, 0fFF7FFFFF;", f"min.f32 h{i}, h{i}, 0f7F7FFFFF;"]
        lines += [f"add.f32 h{i}, h{i}, 0f00000000;", f"shr.s32 x, h{i}, 31;"]  # -0 is 0
        lines += ["or.b32 x, x, 0x80000000;", f"xor.b32 h{i}, h{i}, x;"]
    return lines


def _distinct(values: int, top_k: int) -> list[str]:
    """g0, g1, .. = the largest values in order; e, g = expert and value of the $4-th. On at TIES if one occurs twice."""
    lines = ["mov.b32 g, 0;"]
    for k in range(top_k):
        last = f"g{k - 1}" if k else "g"
        lines.append(f"sub.u32 m, h0, {last};")
        for i in range(1, values):
            lines += [f"sub.u32 x, h{i}, {last};", "max.u32 m, m, x;"]
        lines += ["redux.sync.max.u32 m, m, 0xffffffff;", f"add.u32 g{k}, {last}, m;"]
    lines += [
        "mov.b32 x, 0;",
        "mov.b32 m, g0;",
    ]  # with fewer values than K, rounds begin anew: then all are at least the lowest
    lines += [f"min.u32 m, m, g{k};" for k in range(1, top_k)]
    for i in range(values):
        lines += [f"setp.ge.u32 p, h{i}, m;", "@p add.u32 x, x, 1;"]
    lines += ["redux.sync.add.u32 x, x, 0xffffffff;", f"setp.ne.u32 p, x, {top_k};", "@p bra TIES;"]
    lines += ["mov.b32 e, 0;", "mov.b32 g, g0;"]
    for k in range(top_k):
        lines.append("mov.b32 x, 0;")
        for i in range(values):
            lines += [f"setp.eq.u32 p, h{i}, g{k};", f"@p add.u32 x, first, {i};"]
        lines += ["redux.sync.max.u32 x, x, 0xffffffff;", f"setp.eq.u32 p, $4, {k};"]
        lines += ["@p mov.b32 e, x;", f"@p mov.b32 g, g{k};"]
    return [*lines, "bra.uni DONE;"]


def _one_by_one(values: int, top_k: int) -> list[str]:
    """The same, taking away the first of the largest elements K times."""
    lines = ["TIES:", "mov.b32 k, 0;", "mov.b32 e, 0;", "mov.b32 g, g0;", "AGAIN:", "mov.b32 m, h0;"]
    lines += [f"max.u32 m, m, h{i};" for i in range(1, values)]
    lines += ["redux.sync.max.u32 m, m, 0xffffffff;", "mov.b32 x, 0xffffffff;"]
    for i in reversed(range(values)):
        lines += [f"setp.eq.u32 p, h{i}, m;", f"@p add.u32 x, first, {i};"]
    lines += ["redux.sync.min.u32 x, x, 0xffffffff;", "setp.eq.u32 p, $4, k;"]
    lines += ["@p mov.b32 e, x;", "@p mov.b32 g, m;"]
    for i in range(values):
        lines += [f"add.u32 m, first, {i};", "setp.eq.u32 p, x, m;", f"@p mov.b32 h{i}, 0;"]
    return [*lines, "add.u32 k, k, 1;", f"setp.lt.u32 p, k, {top_k};", "@p bra AGAIN;"]


def _number(result: str, key: str) -> list[str]:
    """The float32 that a sortable integer stands for."""
    lines = [f"shr.s32 x, {key}, 31;", "not.b32 x, x;", "or.b32 x, x, 0x80000000;"]
    return [*lines, f"xor.b32 x, x, {key};", f"mov.b32 {result}, x;"]


@lru_cache
def top_asm(num_experts: int, top_k: int, half: bool) -> str:
    """$0 = expert, $1 = logit of the $4-th largest (from 0) of the logits at $3, $2 = the largest; a warp's work."""
    values = num_experts // 32
    names = ", ".join([f"h{i}" for i in range(values)] + [f"g{k}" for k in range(top_k)])
    lines = ["{", f".reg .b32 lane, first, e, g, k, m, x, {names};", ".reg .pred p;", ".reg .b64 at;"]
    lines += ["mov.u32 lane, %laneid;", f"mul.lo.u32 first, lane, {values};"]
    lines += [*_load(values, half), *_sortable(values)]
    lines += [*_distinct(values, top_k), *_one_by_one(values, top_k), "DONE:", "mov.b32 $0, e;"]
    return "\n".join([*lines, *_number("$1", "g"), *_number("$2", "g0"), "}"])


@triton.jit
def router_warp_kernel(
    logits_TE,
    num_valid,  # int32 [1]: rows from here on are padding
    ids_TK,  # out int32
    weights_TK,  # out float32
    stride_t,
    scaling_factor,
    K: tl.constexpr,
    TOP: tl.constexpr,  # see `top_asm`
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_NUM_VALID: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)
    wait_for_previous(PDL)
    start_next(PDL)
    address = (logits_TE + t * stride_t + lane * 0).to(tl.int64)
    ids, logits, largest = tl.inline_asm_elementwise(
        TOP, "=&r,=&f,=&f,l,r", [address, lane], (tl.int32, tl.float32, tl.float32), False, 1
    )
    kept = lane < K
    padding = False
    if HAS_NUM_VALID:
        padding = t >= tl.load(num_valid)
        ids = tl.where(padding, -1, ids)
    tl.store(ids_TK + t * K + lane, ids, mask=kept)
    if SCORING == "sigmoid":
        values = 1.0 / (1.0 + tl.exp(-logits))
    else:
        values = tl.exp(logits - largest)
    if (SCORING != "sigmoid") or RENORMALIZE:
        total = tl.sum(tl.where(kept, values, 0.0), 0)
        values = tl.where(total > 0, values / (total + 1e-20), 1.0 / K)
    values = values * scaling_factor
    if HAS_NUM_VALID:
        values = tl.where(padding, 0.0, values)
    tl.store(weights_TK + t * K + lane, values, mask=kept)
