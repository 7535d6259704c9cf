"""Global expert ids to those of this rank's store, in one launch where torch's operators take seven.

    id of a replicated expert    its local id for tokens of which this rank is the origin, else -1
    id of another expert         its local id if this rank owns it, else -1

Which rank is a token's origin: `exchange.reduce.Reduce`, whose `local_ids` is the definition.
"""

import torch
import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.launch import pdl_options

BLOCK = 256


@triton.jit(do_not_specialize=["num_routes", "rank"])
def local_ids_kernel(
    ids_R,  # int32 [R], -1: no expert
    owned_E1,  # int32 [E + 1]
    home_E1,  # int32 [E + 1]
    local_R,  # out: int32 [R]
    num_routes,
    rank,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    REPLICATED: tl.constexpr,  # whether any expert is
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = route < num_routes
    wait_for_previous(PDL)
    start_next(PDL)
    expert = tl.load(ids_R + route, mask=inside, other=-1)
    expert = tl.where(expert < 0, E, expert)
    local = tl.load(owned_E1 + expert)
    if REPLICATED:
        at_home = route // TOP_K % RANKS == rank
        local = tl.where(at_home, tl.load(home_E1 + expert), local)
    tl.store(local_R + route, local, mask=inside)


def local_ids(
    ids_TK: torch.Tensor,
    owned_E1: torch.Tensor,
    home_E1: torch.Tensor,
    rank: int,
    size: int,
    replicated: bool,
) -> torch.Tensor:
    """int32 [T, K] of int32 ids_TK [T, K]; the tables are those of `store.shard.SpreadTables`."""
    ids_TK = ids_TK.contiguous()
    local_TK, num_routes = torch.empty_like(ids_TK), ids_TK.numel()
    if num_routes:
        local_ids_kernel[(triton.cdiv(num_routes, BLOCK),)](
            ids_TK,
            owned_E1,
            home_E1,
            local_TK,
            num_routes,
            rank,
            E=len(owned_E1) - 1,
            TOP_K=ids_TK.shape[1],
            RANKS=size,
            REPLICATED=replicated,
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_options(ids_TK.device),
        )
    return local_TK
