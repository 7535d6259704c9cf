"""Router logits to expert ids and weights in one launch: scores, top-k, renormalisation, scaling, padding rows.

Equal to `moe.base.apply_rule` for rules without groups. Two ways to choose: RANK compares every expert with
every other one and keeps those that fewer than K beat, which has no chain of dependent reductions (a decode
step waits for this kernel, so its latency is what counts); otherwise K rounds of argmax, which do less work
and serve many tokens. Where `router_warp` fits, it is faster than either.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _finite(x):
    x = tl.where(x != x, -_LARGEST, x)
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def _scores_and_choice(
    logits_TE, bias_E, t, stride_t, E: tl.constexpr, EXPERTS: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scores of one token's experts, and what the choice goes by (-inf past E): logits, which keep apart what a softmax
    in float32 rounds to one score, or biased scores."""
    expert = tl.arange(0, EXPERTS)
    inside = expert < E
    logits = _finite(tl.load(logits_TE + t * stride_t + expert, mask=inside, other=0.0).to(tl.float32))
    logits = tl.where(inside, logits, -float("inf"))
    if SCORING == "softmax":
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = logits
    choice = logits
    if HAS_BIAS:
        choice = _finite(scores + tl.load(bias_E + expert, mask=inside, other=0.0).to(tl.float32))
    return scores, tl.where(inside, choice, -float("inf"))


@triton.jit
def _ranks(choice, EXPERTS: tl.constexpr):
    """How many experts beat each one; a tie goes to the lower index."""
    expert = tl.arange(0, EXPERTS)
    other, mine = choice[:, None], choice[None, :]
    beats = (other > mine) | ((other == mine) & (expert[:, None] < expert[None, :]))
    return tl.sum(beats.to(tl.int32), 0)


@triton.jit
def router_kernel(
    logits_TE,
    bias_E,
    num_valid,  # int32 [1]: rows from here on are padding
    ids_TK,  # out int32
    weights_TK,  # out float32
    stride_t,
    scaling_factor,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two >= E
    CHOICES: tl.constexpr,  # power of two >= K
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NUM_VALID: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    start_next(PDL)
    scores, choice = _scores_and_choice(logits_TE, bias_E, t, stride_t, E, EXPERTS, SCORING, HAS_BIAS)
    expert = tl.arange(0, EXPERTS)
    k = tl.arange(0, CHOICES)
    if RANK:
        places = _ranks(choice, EXPERTS)
        kept = (places < K) & (expert < E)
        ids, values = expert, scores
    else:
        ids = tl.zeros((CHOICES,), tl.int32)
        values = tl.zeros((CHOICES,), tl.float32)
        for i in tl.static_range(K):
            best = tl.argmax(choice, 0)
            ids = tl.where(k == i, best, ids)
            values = tl.where(k == i, tl.sum(tl.where(expert == best, scores, 0.0), 0), values)
            choice = tl.where(expert == best, -float("inf"), choice)
        places, kept = k, k < K
    if SCORING == "softmax_of_topk":
        values = tl.exp(values - tl.max(tl.where(kept, values, -float("inf")), 0))
        values = values / tl.sum(tl.where(kept, values, 0.0), 0)
    if RENORMALIZE:
        total = tl.sum(tl.where(kept, values, 0.0), 0)
        values = tl.where(total > 0, values / (total + 1e-20), 1.0 / K)
    values = values * scaling_factor
    if HAS_NUM_VALID:
        padding = t >= tl.load(num_valid)
        ids = tl.where(padding, -1, ids)
        values = tl.where(padding, 0.0, values)
    tl.store(ids_TK + t * K + places, ids, mask=kept)
    tl.store(weights_TK + t * K + places, values, mask=kept)
