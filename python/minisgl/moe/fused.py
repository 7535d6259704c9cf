"""FusedMoeBackend: the MoE layer as Triton kernels on a workspace that is allocated once.

    grouped   align -> gate_up with activation -> down -> reduce          any number of tokens
    few_rows  the same with GEMMs for blocks of 8 to 32 rows              int4 in groups of 128
    direct    gate_up with activation -> down, summed over k              decode
    persistent  the same with both GEMMs in one launch                    16-bit, fp8, int8 on Hopper
    fp8 adds a quantization of the rows before each GEMM of the grouped kernels; the direct ones need none.

Which of them, and with which tiles, `select` decides when a step begins, so that a step served in one wave
and one served in many compute the same bits. Waves write the rows of their own routes; one reduce adds them
up. When the placement is the routing itself (all experts resident, so surely one wave), the direct kernel adds
up in registers, in the order and rounding of the reduce. So it does where records are still on their way, and it waits for
them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from triton import knobs

from minisgl.moe.autotune import Tuner, TuningCase
from minisgl.moe.backend import PlainForward
from minisgl.moe.base import ExpertShape, Placement, Problem, Routing, RoutingRule, apply_rule
from minisgl.moe.kernels import launch, launch_direct, launch_few_rows, launch_persistent
from minisgl.moe.records import Records
from minisgl.moe.select import (
    PACKED_FORMATS,
    Choice,
    DeviceLimits,
    Record,
    Threshold,
    select,
)
from minisgl.moe.workspace import FP8_FORMATS, Workspace, max_blocks

NATIVE_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNEL_FORMATS = (*NATIVE_FORMATS, *FP8_FORMATS, *PACKED_FORMATS, "int8")


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    return bool(knobs.runtime.interpret)


class FusedMoeBackend(PlainForward):
    """See the module. One instance an engine and device: it owns the workspace, and runs one step at a time.

    small_m_threshold: up to how many tokens the direct kernels are forced (0: never); "auto" chooses.
    workspace_cache: False allocates all intermediates anew at every step, for comparison.
    records: measured choices of a problem, or None for none; by default those shipped and those in the user's cache.
    tuner: measures a bucket of tokens on the first step that has it, outside graph capture; None measures nothing.
    """

    name = "fused"
    graph_safe = True

    def __init__(
        self,
        *,
        small_m_threshold: Threshold = "auto",
        workspace_cache: bool = True,
        records: Callable[[Problem, DeviceLimits], Record | None] | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.small_m_threshold: Threshold = small_m_threshold
        self.workspace_cache = workspace_cache
        self.tuner = tuner
        if records is None:
            records = tuner.records.lookup if tuner else Records(Records.default_folder()).lookup
        self.records = records
        self._workspaces: dict[torch.device, Workspace] = {}
        self._choices: dict[tuple[Problem, torch.device], Choice] = {}

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        if device.type != "cuda" and not interpreting():
            return f"Triton kernels need a CUDA device, not {device.type}: use --moe-backend torch, or set TRITON_INTERPRET=1"
        if problem.dtype not in NATIVE_FORMATS.values():
            return f"activations must be bfloat16, float16 or float32, not {problem.dtype}"
        if interpreting() and (problem.dtype == torch.bfloat16 or problem.format == "bf16"):
            return "Triton's interpreter computes bfloat16 wrongly: use float16 or float32"
        if problem.format not in KERNEL_FORMATS:
            return f"no kernel for experts stored as {problem.format}; there are {', '.join(KERNEL_FORMATS)}"
        if problem.format in NATIVE_FORMATS and NATIVE_FORMATS[problem.format] != problem.dtype:
            return f"experts stored as {problem.format} need activations of that dtype, not {problem.dtype}"
        if device.type == "cuda" and problem.format in FP8_FORMATS:
            major, minor = torch.cuda.get_device_capability(device)
            if (major, minor) < (8, 9):
                return f"fp8 needs compute capability 8.9, this device has {major}.{minor}: use int8"
        if problem.format == "int8" and (problem.shape.model_dim % 2 or problem.shape.hidden_dim % 2):
            return "int8 needs even dimensions, because two codes are read at a time"
        if problem.format == "int4" and problem.group_size not in (0, 32, 64, 128):
            return f"int4 groups of {problem.group_size} have no kernel: use 32, 64 or 128"
        return None

    def route(
        self,
        logits_TE: torch.Tensor,
        rule: RoutingRule,
        bias_E: torch.Tensor | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> Routing:
        """One launch; rules with groups, and more experts than one program can hold, go through the definition."""
        num_experts = logits_TE.shape[-1]
        on_device = logits_TE.is_cuda or (interpreting() and logits_TE.dtype != torch.bfloat16)
        plain = rule.num_groups == 1 and num_experts <= 4096 and logits_TE.ndim == 2
        if not (on_device and plain and 0 < rule.top_k <= num_experts and logits_TE.stride(-1) == 1):
            return apply_rule(logits_TE, rule, bias_E, num_valid)
        return launch.route(logits_TE, rule, bias_E, num_valid)

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> FusedStep:
        choice = self.choose(problem, x_TD.device)
        return FusedStep(self, x_TD, routing, problem, choice)

    def choose(self, problem: Problem, device: torch.device) -> Choice:
        key = (problem, device)
        if key not in self._choices:
            limits = DeviceLimits.of(device)
            self._choices[key] = select(
                problem, limits, self.records(problem, limits), self.small_m_threshold
            )
        return self._choices[key]

    def tune_if_wanted(
        self, problem: Problem, x_TD: torch.Tensor, routing: Routing, placement: Placement
    ) -> None:
        """Measure this bucket on the routes at hand, for the steps after this one."""
        if self.tuner is not None and self.tuner.wants(problem, placement.slots_TK):
            self.tuner.tune(TuningCase(problem, x_TD, placement, routing.weights_TK))
            self._choices.clear()

    def reserve(self, problem: Problem, device: torch.device) -> None:
        if self.workspace_cache:
            self.workspace(device).claim(problem)

    def scratch_bytes(self, device: torch.device) -> int:
        return self.workspace(device).num_bytes

    def workspace(self, device: torch.device) -> Workspace:
        if device not in self._workspaces:
            self._workspaces[device] = Workspace(device, self.workspace_cache)
        return self._workspaces[device]


class FusedStep:
    """One layer call in flight; see `backend.MoeStep`."""

    def __init__(
        self, backend: FusedMoeBackend, x_TD: torch.Tensor, routing: Routing, problem: Problem, choice: Choice
    ) -> None:
        assert x_TD.shape == (problem.num_tokens, problem.shape.model_dim), "x_TD doesn't fit the problem"
        self.x_TD = x_TD if x_TD.is_contiguous() else x_TD.contiguous()
        self.backend, self.routing, self.problem, self.choice = backend, routing, problem, choice
        self.buffers = backend.workspace(x_TD.device).claim(problem)
        self.num_routes = routing.ids_TK.numel()
        self.weights_TK = routing.weights_TK.contiguous()
        self.y_TD = torch.empty_like(self.x_TD)
        self.num_waves, self.finished = 0, False
        rows_dtype = torch.float32 if choice.kernel == "direct" else problem.dtype
        self.rows_RD = self.buffers.rows_RD(self.num_routes, problem.shape.model_dim, rows_dtype)

    @property
    def awaits_records(self) -> bool:
        return launch_direct.awaits_records(self.x_TD, self.problem, self.choice)

    def run(self, placement: Placement) -> None:
        slots_TK = placement.slots_TK
        assert not self.finished, "the step added up all its rows already"
        assert slots_TK.numel() == self.num_routes
        assert slots_TK.dtype == torch.int32, "slots must be int32"
        if self.num_routes:
            contiguous = replace(placement, slots_TK=slots_TK.contiguous())
            if self.num_waves == 0:
                self.backend.tune_if_wanted(self.problem, self.x_TD, self.routing, contiguous)
            run = self._run_direct if self.choice.kernel == "direct" else self._run_grouped
            only_wave = slots_TK is self.routing.ids_TK or placement.arrival is not None
            run(contiguous, only_wave)
        self.num_waves += 1

    def _run_direct(self, placement: Placement, only_wave: bool) -> None:
        problem, choice, buffers = self.problem, self.choice, self.buffers
        launch_direct.direct_gate_up(self.x_TD, placement, problem, choice, self.num_waves == 0, buffers)
        placement.before_down()
        if choice.down.wide:
            launch_direct.wide_down(self.rows_RD, placement, problem, choice.down, buffers)
            return
        out = self.y_TD if only_wave else self.rows_RD
        launch_direct.direct_down(out, placement, self.weights_TK, problem, choice, buffers, only_wave)
        self.finished = only_wave

    def _run_grouped(self, placement: Placement, only_wave: bool) -> None:
        problem, choice, buffers, slab = self.problem, self.choice, self.buffers, placement.slab
        block_m, first_wave = choice.block_m, self.num_waves == 0
        buffers.check_room(self.num_routes, problem.num_slots, block_m)
        units = launch.sum_units(problem, choice)
        launch.align(
            self.x_TD, placement.slots_TK, slab.num_slots, problem, block_m, first_wave, buffers, units
        )
        if choice.kernel == "persistent":
            self._run_persistent(placement)
            return
        interpreted = launch.interpreted_fp8(problem, self.x_TD)
        if interpreted and first_wave:
            codes = buffers.x_ready(self.x_TD, problem.format)
            _quantize_interpreted(self.x_TD, codes, buffers.x_scale_T)
        few_rows = choice.kernel == "few_rows"
        (launch_few_rows if few_rows else launch).gate_up(
            self.x_TD, slab, problem, choice, self.num_routes, buffers
        )
        placement.before_down()
        if interpreted:
            _quantize_interpreted(buffers.activated_PF, buffers.activated_codes_PF, buffers.activated_scale_P)
        elif problem.format in FP8_FORMATS and not launch.codes_in_down(problem, block_m, self.x_TD):
            launch.quantize_activated(problem, block_m, self.num_routes, buffers)
        if few_rows:
            arriving = placement.in_two_parts
            launch_few_rows.down(self.rows_RD, slab, problem, choice, self.num_routes, buffers, arriving)
        else:
            launch.down(self.rows_RD, slab, problem, choice, self.num_routes, buffers)

    def _run_persistent(self, placement: Placement) -> None:
        """Both GEMMs at once, unless something has to happen between them."""
        given = (
            self.rows_RD,
            self.x_TD,
            placement.slab,
            self.problem,
            self.choice,
            self.num_routes,
            self.buffers,
        )
        if not placement.in_two_parts:
            launch_persistent.gate_up_and_down(*given)
            return
        launch_persistent.gate_up_and_down(*given, gemms="gate_up")
        placement.before_down()
        launch_persistent.gate_up_and_down(*given, gemms="down")

    def finish(self) -> torch.Tensor:
        if self.finished or self.num_routes == 0:
            return self.y_TD
        if self.num_waves == 0:
            return self.y_TD.zero_()
        launch.reduce(self.rows_RD, self.weights_TK, self.buffers, self.y_TD)
        return self.y_TD


def _quantize_interpreted(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """In the interpreter, whose conversion to fp8 loses a carry, the definition stands in for the kernel."""
    codes[: len(x)], scale[: len(x)] = quantize_rows_torch(x)


def quantize_rows_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of the row quantization: codes float8_e4m3fn like x, scale float32 [rows] (1 for a zero row)."""
    x = x.float()
    amax = x.abs().amax(dim=-1)
    scale = torch.where(amax > 0, amax / 448.0, 1.0)
    return (x / scale[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def moe_align_block_size(
    topk_ids: torch.Tensor, block_m: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes sorted by expert, each expert's run padded to a multiple of block_m with the number of routes.

    topk_ids: int [T, K]; ids of -1 are dropped. Returns sorted_ids int32 [blocks * block_m], routes ascending
    within an expert, and expert_ids int32 [blocks]. Trimming them to size waits for the device; a step
    doesn't. Raises ValueError for ids outside -1..num_experts-1 and for a block_m that is no power of two.
    """
    if block_m < 1 or block_m & (block_m - 1):
        raise ValueError(f"block_m must be a power of two, not {block_m}")
    ids_R = topk_ids.reshape(-1).int().contiguous()
    if ids_R.numel() and not -1 <= int(ids_R.min()) <= int(ids_R.max()) < num_experts:
        raise ValueError(
            f"topk_ids hold {int(ids_R.min())}..{int(ids_R.max())}; allowed are -1..{num_experts - 1}"
        )
    if not ids_R.numel() or not (ids_R.is_cuda or interpreting()):
        return align_torch(ids_R, block_m, num_experts)
    shape = ExpertShape(model_dim=1, hidden_dim=1)
    problem = Problem(ids_R.numel(), 1, num_experts, shape, "fp32", torch.float32)
    buffers = Workspace(ids_R.device).claim(problem)
    positions = max_blocks(ids_R.numel(), num_experts, block_m) * block_m
    made = {name: ids_R.new_empty(positions) for name in ("sorted_R", "block_slots", "tiles_done_B")}
    buffers = replace(buffers, **made)
    launch.align(torch.empty(0, 1, device=ids_R.device), ids_R, num_experts, problem, block_m, True, buffers)
    used = int(buffers.num_blocks)
    return buffers.sorted_R[: used * block_m], buffers.block_slots[:used]


def align_torch(ids_R: torch.Tensor, block_m: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`moe_align_block_size` in plain torch: the definition."""
    num_routes = ids_R.numel()
    sorted_ids, expert_ids = [], []
    for expert in range(num_experts):
        routes = (ids_R == expert).nonzero().squeeze(1)
        blocks = -(-len(routes) // block_m)
        padding = routes.new_full((blocks * block_m - len(routes),), num_routes)
        sorted_ids.append(torch.cat((routes, padding)))
        expert_ids.append(routes.new_full((blocks,), expert))
    return torch.cat(sorted_ids).int(), torch.cat(expert_ids).int()
