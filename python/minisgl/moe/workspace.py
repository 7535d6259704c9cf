"""One grow-only arena for everything a MoE step writes between its first kernel and its output.

Without it a step allocates nine tensors a layer, in some formats more. The arena is sized for a power of two of tokens, so a
handful of growths serve every later call. A replaced arena is kept alive, because a captured CUDA graph may
still point into it. Nothing in here outlives a step: a backend runs one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from minisgl.moe.base import Problem

ALIGNMENT = 256  # bytes, of every buffer in the arena
MIN_BLOCK_M, MAX_BLOCK_M = 16, 128
FEW_ROWS_BLOCK_M = (
    8  # the smallest block of the kernels for few rows, which are used up to a number of tokens
)
FEW_ROWS_MAX_TOKENS = 512
FEW_ROWS_GROUP = 128  # weights that share a scale; smaller groups were wrong on the device when tried
DIRECT_MAX_TOKENS = 64  # up to here a direct kernel may be chosen, whose rows are float32
ALIGN_CHUNK = 256  # routes that one program of the two-launch alignment counts and places
FP8_FORMATS = ("fp8", "fp8_block")
SUM_UNIT = 32  # the fewest columns that a sum of a row covers (int4)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def largest_block_m(num_tokens: int) -> int:
    """The largest BLOCK_M that may be used: a slot has at most one route of a token, so at most num_tokens rows."""
    return min(max(next_power_of_two(num_tokens), MIN_BLOCK_M), MAX_BLOCK_M)


def max_blocks(num_routes: int, num_slots: int, block_m: int) -> int:
    """Blocks that routes can fill at worst, whatever their slots: min(R, S) runs, each with a partial block."""
    runs = min(num_routes, num_slots)
    return runs + (num_routes - runs) // block_m


def num_bins(num_slots: int) -> int:
    """Bins of a histogram of slots: a power of two."""
    return max(next_power_of_two(num_slots), 32)


def num_chunks(num_routes: int) -> int:
    return max(-(-num_routes // ALIGN_CHUNK), 1)


@dataclass(frozen=True)
class Buffers:
    """What one step writes. R routes, P positions in sorted order (padding included)."""

    sorted_R: torch.Tensor  # int32, long enough for any BLOCK_M
    block_slots: torch.Tensor  # int32
    tiles_done_B: torch.Tensor  # int32: parts of each block's gate_up that are done
    num_blocks: torch.Tensor  # int32 [1]
    served_R: torch.Tensor  # int8
    activated_PF: torch.Tensor
    rows: torch.Tensor  # bytes: [R, D] in the activations' dtype, or float32 for the direct kernel
    counts_CB: torch.Tensor  # int32: routes of each slot in each chunk, flat
    rank_R: torch.Tensor  # int32: earlier routes of the same slot in a route's chunk
    x_ready_TD: (
        torch.Tensor
    )  # bytes: rows of x as fp8 codes, or in another order of columns (int8, few rows); else empty
    x_scale_T: torch.Tensor  # fp8 formats only, else empty, as the two below
    activated_codes_PF: torch.Tensor
    activated_scale_P: torch.Tensor
    x_sums: (
        torch.Tensor
    )  # float32, int4 only, flat: sums of each row of x over so many columns, as the launch says
    activated_sums: torch.Tensor
    tile_counters: torch.Tensor  # int32 [2]: gate_up, down; zero between launches, so not in the arena

    def rows_RD(self, num_routes: int, model_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return self.rows[: num_routes * model_dim * dtype.itemsize].view(dtype).view(num_routes, model_dim)

    def x_ready(self, x_TD: torch.Tensor, format_name: str) -> torch.Tensor:
        """The buffer for rows of x made ready for a format: fp8 codes, or rows in x's dtype."""
        dtype = torch.float8_e4m3fn if format_name in FP8_FORMATS else x_TD.dtype
        return self.x_ready_TD[: x_TD.numel() * dtype.itemsize].view(dtype).view(x_TD.shape)

    def check_room(self, num_routes: int, num_slots: int, block_m: int) -> None:
        """BLOCK_M 128 in buffers meant for 64 writes past their end; never again silently."""
        blocks = max_blocks(num_routes, num_slots, block_m)
        assert blocks * block_m <= self.sorted_R.numel(), "sorted_R is too small for this BLOCK_M"
        assert blocks * block_m <= self.activated_PF.shape[0], "activated_PF is too small for this BLOCK_M"
        assert blocks <= self.block_slots.numel(), "block_slots is too small for this BLOCK_M"


Spec = tuple[tuple[int, ...], torch.dtype]


def buffer_specs(problem: Problem, capacity: int) -> dict[str, Spec]:
    """Shape and dtype of every buffer for up to `capacity` tokens."""
    routes, slots = capacity * problem.top_k, problem.num_slots
    few_rows = problem.format == "int4" and problem.group_size == FEW_ROWS_GROUP
    few_rows = few_rows and capacity <= FEW_ROWS_MAX_TOKENS
    block_sizes = [FEW_ROWS_BLOCK_M if few_rows else MIN_BLOCK_M]
    while block_sizes[-1] < largest_block_m(capacity):
        block_sizes.append(2 * block_sizes[-1])
    positions = max(max_blocks(routes, slots, block_m) * block_m for block_m in block_sizes)
    blocks = max(max_blocks(routes, slots, block_m) for block_m in block_sizes)
    row_bytes = 4 if capacity <= DIRECT_MAX_TOKENS else problem.dtype.itemsize
    fp8 = int(problem.format in FP8_FORMATS)  # without fp8 there are zero rows of codes
    int4 = int(problem.format == "int4")
    ready_bytes = problem.dtype.itemsize if problem.format == "int8" or few_rows else fp8
    model_dim, hidden_dim = problem.shape.model_dim, problem.shape.hidden_dim
    return {
        "sorted_R": ((positions,), torch.int32),
        "block_slots": ((blocks,), torch.int32),
        "tiles_done_B": ((blocks,), torch.int32),
        "num_blocks": ((1,), torch.int32),
        "served_R": ((routes,), torch.int8),
        "activated_PF": ((positions, hidden_dim), problem.dtype),
        "rows": ((routes * model_dim * row_bytes,), torch.uint8),
        "counts_CB": ((num_chunks(routes) * num_bins(slots),), torch.int32),
        "rank_R": ((routes,), torch.int32),
        "x_ready_TD": ((capacity * model_dim * ready_bytes,), torch.uint8),
        "x_scale_T": ((capacity * fp8,), torch.float32),
        "activated_codes_PF": ((positions * fp8, hidden_dim), torch.float8_e4m3fn),
        "activated_scale_P": ((positions * fp8,), torch.float32),
        "x_sums": ((capacity * (model_dim // SUM_UNIT) * int4,), torch.float32),
        "activated_sums": ((positions * (hidden_dim // SUM_UNIT) * int4,), torch.float32),
    }


def _num_bytes(spec: Spec) -> int:
    size = spec[1].itemsize
    for dim in spec[0]:
        size *= dim
    return -(-size // ALIGNMENT) * ALIGNMENT


class Workspace:
    """The arena of one device. `cached=False` allocates every buffer anew at every step, for comparison.

    num_allocations counts device allocations, num_bytes what the current arena holds.
    """

    def __init__(self, device: torch.device, cached: bool = True) -> None:
        self.device, self.cached = device, cached
        self.num_allocations = 0
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._retired: list[torch.Tensor] = []
        self._buffers: dict[tuple[Problem, int], Buffers] = {}
        self._tile_counters = torch.zeros(2, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return self._arena.numel()

    def claim(self, problem: Problem) -> Buffers:
        """Buffers for one step of this problem; what they hold is undefined."""
        capacity = next_power_of_two(problem.num_tokens)
        if not self.cached:
            return self._allocate_each(buffer_specs(problem, capacity))
        key = (replace(problem, num_tokens=0), capacity)
        if key not in self._buffers:
            self._buffers[key] = self._carve(buffer_specs(problem, capacity))
        return self._buffers[key]

    def _carve(self, specs: dict[str, Spec]) -> Buffers:
        total = sum(_num_bytes(spec) for spec in specs.values())
        if total > self._arena.numel():
            if self._arena.numel():
                self._retired.append(self._arena)
            self._arena = torch.empty(total, dtype=torch.uint8, device=self.device)
            self.num_allocations += 1
            self._buffers.clear()  # views of the old arena: small problems move to the new one, too
        views: dict[str, torch.Tensor] = {}
        offset = 0
        for name, spec in specs.items():
            flat = self._arena[offset : offset + _num_bytes(spec)].view(spec[1])
            count = 1
            for dim in spec[0]:
                count *= dim
            views[name] = flat[:count].view(spec[0])
            offset += _num_bytes(spec)
        return Buffers(**views, tile_counters=self._tile_counters)

    def _allocate_each(self, specs: dict[str, Spec]) -> Buffers:
        made = {name: torch.empty(spec[0], dtype=spec[1], device=self.device) for name, spec in specs.items()}
        self.num_allocations += sum(tensor.numel() > 0 for tensor in made.values())
        return Buffers(**made, tile_counters=self._tile_counters)

    def poison(self, byte: int) -> None:
        """Fill the arena with a byte, so that a read of something nothing wrote shows (tests)."""
        self._arena.fill_(byte)
