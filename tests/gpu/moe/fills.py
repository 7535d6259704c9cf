"""Cases whose slots have chosen numbers of rows, for kernels that count what a block holds, and their check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl.moe.base import Placement, Routing
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.interpret.moe.steps import Stored, run_step
from tests.moe_oracle import MoeCase, random_case, relative_error


def cuda_case(
    num_tokens: int, top_k: int, experts: int, dims: tuple[int, int], dtype: torch.dtype, seed: int
) -> MoeCase:
    case = random_case(num_tokens, top_k, experts, *dims, dtype=dtype, seed=seed)
    tensors = {name: getattr(case, name) for name in vars(case)}
    return MoeCase(**{name: t.cuda() if t is not None else None for name, t in tensors.items()})


def case_of_fills(
    num_tokens: int, fills: Sequence[int], dims: tuple[int, int], dtype: torch.dtype
) -> MoeCase:
    """Slots with so many rows, in any order; the other routes of num_tokens x 4 have none."""
    num_routes = 4 * num_tokens
    case = cuda_case(num_tokens, 4, len(fills), dims, dtype, seed=1)
    ids = torch.full((num_routes,), -1, dtype=torch.int32)
    ids[: sum(fills)] = torch.repeat_interleave(torch.arange(len(fills)), torch.tensor(fills)).int()
    order = torch.randperm(num_routes, generator=torch.Generator().manual_seed(2))
    return replace(case, ids=ids[order].view(num_tokens, 4).cuda())


def expected(case: MoeCase, stored: Stored) -> torch.Tensor:
    step = TorchMoeBackend().begin(case.x, Routing(case.ids, case.weights), stored.problem(case))
    step.run(Placement(stored.slab, case.ids))
    return step.finish()


def check_from_poison(case: MoeCase, stored: Stored, backend: FusedMoeBackend) -> None:
    """The second step, in poisoned buffers, gives the definition's rows, zeros where a token has no routes, and leaves the
    counters of tiles as they were."""
    run_step(backend, case, stored)
    backend.workspace(case.x.device).poison(0xFF)
    y = run_step(backend, case, stored)
    assert relative_error(y, expected(case, stored)) < stored.tolerance
    assert backend.workspace(case.x.device).claim(stored.problem(case)).tile_counters.tolist() == [0, 0]
    assert not y[(case.ids < 0).all(1)].any()
