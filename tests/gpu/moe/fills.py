"""Cases whose slots have chosen numbers of rows, for kernels that count what a block holds, and their check; and all codes of
mxfp4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from minisgl.moe.base import Placement, Routing
from minisgl.moe.formats.mxfp4 import pack_codes
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.torch_backend import TorchMoeBackend
from tests.interpret.moe.steps import Stored, run_step, store
from tests.moe_oracle import MoeCase, random_case, relative_error

EXTREME_SCALES = [0, 1, 2, 60, 126, 127, 128, 190, 192, 200, 253, 254, 255]


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


def expected(case: MoeCase, stored: Stored, activation: str = "silu") -> torch.Tensor:
    step = TorchMoeBackend().begin(case.x, Routing(case.ids, case.weights), stored.problem(case, activation))
    step.run(Placement(stored.slab, case.ids))
    return step.finish()


def check_from_poison(
    case: MoeCase, stored: Stored, backend: FusedMoeBackend, activation: str = "silu"
) -> None:
    """The second step, in poisoned buffers, gives the definition's rows, zeros where a token has no routes, and leaves the
    counters of tiles as they were."""
    run_step(backend, case, stored, activation)
    backend.workspace(case.x.device).poison(0xFF)
    y = run_step(backend, case, stored, activation)
    assert relative_error(y, expected(case, stored, activation)) < stored.tolerance
    assert backend.workspace(case.x.device).claim(stored.problem(case)).tile_counters.tolist() == [0, 0]
    assert not y[(case.ids < 0).all(1)].any()


def check_every_code(
    scale: int, num_tokens: int, backend_of: Callable[[Stored, MoeCase], FusedMoeBackend]
) -> None:
    """mxfp4, every second block with this scale. Rows of x are some of an identity's, and down is one: the output is the
    weights of up, times silu(1)."""
    model_dim, hidden_dim = 256, 128
    case = cuda_case(num_tokens, 1, 2, (model_dim, hidden_dim), torch.bfloat16, seed=6)
    case.x.copy_(torch.eye(model_dim)[torch.arange(num_tokens) * 17 % model_dim])
    case.weights.fill_(1.0)
    case.gate_up[:, :hidden_dim] = 1.0
    case.down.copy_(torch.eye(hidden_dim).repeat(2, 1))
    stored = store(case, "mxfp4", 32, device="cuda")
    codes = torch.arange(hidden_dim * model_dim).view(hidden_dim, model_dim) // 3 % 16
    up, scales = (stored.slab.parts[name][:, hidden_dim:] for name in ("gate_up", "gate_up_scale"))
    up.copy_(pack_codes(codes.to(torch.uint8)))
    scales.fill_(127)
    scales[:, :, 1::2] = scale  # so that no scale stands in for its neighbour's
    y, wanted = run_step(backend_of(stored, case), case, stored).float(), expected(case, stored).float()
    assert torch.equal(y.isnan(), wanted.isnan())
    near = (y - wanted).abs() <= 0.02 * wanted.abs() + 2.0**-120
    assert bool((near | (y == wanted) | wanted.isnan()).all())  # equal: infinities
