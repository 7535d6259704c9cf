"""One ledger of every byte, the formulas behind its lines, and how many KV pages fit beside the rest.

`Engine.ledger` counts the tensors it holds; `predict_ledger` computes the same lines, under the same names, from sizes alone,
before anything is loaded. The planner and the engine's own check both use it, so a plan and a run can't disagree unnoticed.

    for good     dense weights, experts, KV pages, page table, workspace, CUDA graphs; with offload also what experts stream
                 through: transient slots, or a pinned ring on the host
    for a step   activations of the largest step, or the sampler's scratch, whichever is larger
    not ours     the CUDA context, other processes, the desktop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.table import Table

from minisgl.config import CacheConfig, EngineConfig
from minisgl.engine.graphs import graph_sizes
from minisgl.models.dense import DenseStorage
from minisgl.models.sizes import ModelSizes
from minisgl.moe.base import Problem
from minisgl.moe.formats import get_format
from minisgl.moe.store.early import num_early_slots
from minisgl.moe.store.pinned import gather_host_facts
from minisgl.moe.store.planning import graph_holds
from minisgl.moe.workspace import ALIGNMENT, buffer_specs, next_power_of_two

GIB = 2**30
CUBLAS_WORKSPACE = 32 << 20  # PyTorch's for each stream on Hopper; smaller elsewhere
CONTEXT_BYTES = (
    GIB // 2
)  # CUDA context and libraries of a process, where they can't be told from what others hold
CPU_KV_TOKENS = 32_768  # pages of a CPU run that names no --num-pages: four long conversations
CPU_KV_SHARE = 0.25  # of available host memory, at most


@dataclass(frozen=True)
class LedgerLine:
    """What something occupies. where: "device" or "host"."""

    name: str
    num_bytes: int
    where: str = "device"


@dataclass(frozen=True)
class Ledger:
    """Everything the engine allocated, or will; lines add up to its total."""

    lines: tuple[LedgerLine, ...]

    @property
    def total(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    def on(self, where: str) -> int:
        """Bytes on the "device" or on the "host"."""
        return sum(line.num_bytes for line in self.lines if line.where == where)

    def line(self, name: str) -> int:
        """Bytes of the line called `name`, 0 if there is none."""
        return sum(line.num_bytes for line in self.lines if line.name == name)

    def table(self) -> Table:
        """For people."""
        table = Table(title="Memory", title_justify="left")
        table.add_column("what")
        table.add_column("where")
        table.add_column("MiB", justify="right")
        for line in self.lines:
            table.add_row(line.name, line.where, f"{line.num_bytes / 2**20:,.1f}")
        table.add_row("total", "", f"{self.total / 2**20:,.1f}", style="bold")
        return table


class DoesNotFit(ValueError):
    """The engine needs more memory than there is. ledger: what it needs, None where only the total is known.

    shortage: what is missing, in words; the message itself, unless that goes on with what would fit.
    """

    def __init__(
        self, message: str, needed: int, available: int, ledger: Ledger | None = None, shortage: str = ""
    ) -> None:
        super().__init__(message)
        self.needed, self.available, self.ledger = needed, available, ledger
        self.shortage = shortage or message

    def explained(self, text: str) -> DoesNotFit:
        """The same error with another message."""
        return DoesNotFit(text, self.needed, self.available, self.ledger, self.shortage)


@dataclass(frozen=True)
class Setup:
    """The choices that decide how much memory an engine takes; a resolved configuration in plain numbers.

    weight_format, group_size: of the experts (--moe-expert-quantization). num_slots: experts a layer keeps on the device,
    None for all of them; staged: whether the host plans that cache; wave_size: missing experts that travel together;
    prefetch: whether some travel early (--moe-prefetch). num_pages counts the dummy page. graph_batch: largest captured decode
    batch, 0 for no graphs. fused: whether the fused MoE backend, which has a workspace, computes the experts;
    keeps_workspace: whether it is kept between steps.
    storage: of attention, embedding and lm_head.
    """

    on_cuda: bool
    dtype: torch.dtype
    max_seq_len: int
    num_pages: int = 2
    weight_format: str = "none"
    group_size: int = 128
    num_slots: int | None = None
    staged: bool = False
    wave_size: int = 8
    prefetch: bool = False
    page_size: int = 16
    max_running_requests: int = 256
    max_prefill_length: int = 8192
    graph_batch: int = 256
    fused: bool = True
    keeps_workspace: bool = True
    storage: DenseStorage = field(default_factory=DenseStorage)

    @property
    def offloaded(self) -> bool:
        return self.num_slots is not None

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step."""
        return min(self.max_prefill_length, self.max_seq_len)


def setup_of(config: EngineConfig, num_pages: int = 2) -> Setup:
    """The set-up that a resolved configuration means. num_pages: where the configuration leaves it to memory."""
    model, scheduler, kernel = config.model, config.scheduler, config.kernel
    assert model.max_seq_len_override is not None, "the configuration must be resolved"
    graph_batch, on_cuda = kernel.cuda_graph_max_bs, model.device == "cuda"
    return Setup(
        on_cuda=on_cuda,
        dtype=getattr(torch, model.dtype),
        max_seq_len=model.max_seq_len_override,
        num_pages=config.cache.num_pages or num_pages,
        weight_format=kernel.moe_expert_quantization,
        group_size=kernel.moe_quantization_group_size,
        num_slots=config.offload.num_slots if config.offload.moe_expert_offload else None,
        staged=not on_cuda or config.offload.moe_offload_mode == "staged",
        wave_size=config.offload.moe_expert_offload_wave_size,
        prefetch=config.offload.moe_prefetch,
        page_size=config.cache.page_size,
        max_running_requests=scheduler.max_running_requests,
        max_prefill_length=scheduler.step_tokens,
        graph_batch=scheduler.max_running_requests if graph_batch is None else graph_batch,
        fused=kernel.moe_backend == "fused",
        keeps_workspace=not kernel.disable_moe_workspace_cache,
        storage=DenseStorage.of(model),
    )


# --- formulas ------------------------------------------------------------------------------------------------------------


def kv_pool_bytes(sizes: ModelSizes, setup: Setup) -> int:
    """Bytes of the KV pool: pages x page size x bytes of a token over all layers (2 x kv_heads x head_dim x itemsize each)."""
    return setup.num_pages * setup.page_size * sizes.kv_bytes_per_token(setup.dtype)


def page_table_bytes(num_rows: int, max_seq_len: int, page_size: int) -> int:
    """Bytes of the page table (int32, a page id each) and the last tokens (int64), with one row more for padding."""
    return (num_rows + 1) * (-(-max_seq_len // page_size) * 4 + 8)


def expert_cache_bytes(sizes: ModelSizes, setup: Setup, num_slots: int) -> int:
    """Bytes of `num_slots` experts a layer in every MoE layer: layers x slots x one record (values, scales, padding).

    Qwen3-30B-A3B in fp8 with 8 slots: 48 x 8 x 4,732,928 = 1.69 GiB.
    """
    return (
        sizes.num_sparse * num_slots * sizes.record_bytes(setup.weight_format, setup.dtype, setup.group_size)
    )


def num_transient_slots(wave_size: int, num_experts: int) -> int:
    """Slots through which a prompt's experts stream: enough for the link to be busy while a layer routes and computes."""
    return min(4 * wave_size, num_experts)


def num_ring_records(wave_size: int, num_slots: int) -> int:
    """Pinned records through which the staged store copies what is not pinned itself."""
    return min(2 * wave_size, num_slots)


def largest_problem(sizes: ModelSizes, setup: Setup) -> Problem | None:
    """The MoE problem of the largest step, which decides the workspace; None for a dense model."""
    if sizes.expert is None:
        return None
    weight_format = get_format(setup.weight_format, setup.dtype, setup.group_size)
    return Problem(
        num_tokens=setup.step_tokens,
        top_k=sizes.top_k,
        num_slots=sizes.num_experts,  # kernels are chosen as if all experts were resident
        shape=sizes.expert,
        format=weight_format.name,
        dtype=setup.dtype,
        group_size=weight_format.group_size,
    )


def workspace_bytes(sizes: ModelSizes, setup: Setup) -> int:
    """Bytes of the fused MoE arena for the largest step: routes x D rows, routes x F activated, sorted ids, fp8 codes.

    T tokens make T x K routes: 8,192 tokens of Qwen3-30B-A3B 65,536 routes, whose rows take 268 MB in bf16. The arena is made
    for the next power of two of T.
    """
    problem = largest_problem(sizes, setup)
    if problem is None or not setup.fused:
        return 0
    specs = buffer_specs(problem, next_power_of_two(problem.num_tokens)).values()
    return sum(_rounded(torch.Size(shape).numel() * dtype.itemsize) for shape, dtype in filter(None, specs))


def step_bytes(sizes: ModelSizes, setup: Setup) -> int:
    """Peak bytes of the temporaries of one step of `step_tokens` tokens, outside of the MoE workspace.

    Four [T, D] tensors live through a layer: its input and the residual stream before and after the norm. On top comes the
    largest of: an RMSNorm over D, the projections with the norm or the rotation of q, or a dense MLP. Kernels norm and rotate
    in registers: beside qkv they leave q, attention's result and its projection. Without them a norm holds two float32
    tensors and one in the model's dtype. Read off layers/{norm,attention,mlp}.py; the sampler is `sampler_bytes`.
    """
    item, tokens, dim = setup.dtype.itemsize, setup.step_tokens, sizes.model_dim
    q_dim, kv_dim = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    qkv = (q_dim + 2 * kv_dim) * item
    dense = 5 * item * sizes.hidden_dim if sizes.params["dense MLPs"] else 0
    if setup.on_cuda:
        largest = max(qkv + (2 * q_dim + dim + sizes.head_dim) * item, dense)
    else:
        rotated = (8 + item) * q_dim if sizes.qk_norm else 3 * item * q_dim
        largest = max((8 + item) * dim, qkv + rotated, dense)
    return tokens * (4 * item * dim + largest)


def sampler_bytes(num_rows: int, vocab_size: int) -> int:
    """Bytes of the sampler's noise for a full batch: float64 [rows, V]."""
    return num_rows * vocab_size * 8


def captured_batches(sizes: ModelSizes, setup: Setup) -> list[int]:
    """Decode batches that run as CUDA graphs: none where the host plans the expert cache, and where the device does those
    that few waves of its slots serve.
    """
    if not setup.on_cuda or setup.graph_batch == 0 or (setup.offloaded and setup.staged):
        return []
    batches = graph_sizes(min(setup.graph_batch, setup.max_running_requests))
    if setup.num_slots is None:
        return batches
    return [n for n in batches if graph_holds(n, sizes.top_k, sizes.num_experts, setup.num_slots)]


def graph_bytes(sizes: ModelSizes, setup: Setup) -> int:
    """Bytes that captured decode graphs keep, all of which they share: float32 logits and page table rows of the largest batch,
    its temporaries, and cuBLAS's scratch space for the stream that captures. What the driver keeps a graph is not counted.
    """
    captured = captured_batches(sizes, setup)
    if not captured:
        return 0
    largest = max(captured)
    pages = -(-setup.max_seq_len // setup.page_size)
    item, q_dim = setup.dtype.itemsize, sizes.num_heads * sizes.head_dim
    temporaries = largest * (sizes.vocab_size * item + 8 * item * sizes.model_dim + (8 + 2 * item) * q_dim)
    return largest * (4 * sizes.vocab_size + 4 * pages) + temporaries + CUBLAS_WORKSPACE


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def predict_ledger(sizes: ModelSizes, setup: Setup) -> Ledger:
    """The lines of `Engine.ledger` for a model in a set-up, before anything is loaded, and "one step" beside them: temporaries,
    which the engine only has while it computes. Lines of zero bytes are left out. sizes: of one rank (`shard_sizes`).
    """
    where = "device" if setup.on_cuda else "host"
    record = sizes.record_bytes(setup.weight_format, setup.dtype, setup.group_size)
    everything = expert_cache_bytes(sizes, setup, sizes.num_experts)
    slots = sizes.num_experts if setup.num_slots is None else min(setup.num_slots, sizes.num_experts)
    streams = setup.on_cuda and setup.offloaded
    early = num_early_slots(sizes.num_experts, slots, setup.prefetch and streams and not setup.staged)
    transient = num_transient_slots(setup.wave_size, sizes.num_experts) * (streams and not setup.staged)
    ring = num_ring_records(setup.wave_size, slots) * (streams and setup.staged)
    workspace = workspace_bytes(sizes, setup)
    step = max(
        step_bytes(sizes, setup) + workspace * (not setup.keeps_workspace),
        sampler_bytes(setup.max_running_requests, sizes.vocab_size),
    )
    table = page_table_bytes(setup.max_running_requests, setup.max_seq_len, setup.page_size)
    lines = [
        LedgerLine("dense weights", sizes.dense_bytes(setup.dtype, setup.storage), where),
        LedgerLine(
            "embedding on the host",
            sizes.embedding_bytes(setup.dtype) * setup.storage.embedding_on_host,
            "host",
        ),
        LedgerLine("experts", expert_cache_bytes(sizes, setup, slots + early), where),
        LedgerLine("experts on the host", everything * setup.offloaded, "host"),
        LedgerLine("transient experts", transient * record, where),
        LedgerLine("expert copies", ring * record, "host"),
        LedgerLine("KV pages", kv_pool_bytes(sizes, setup), where),
        LedgerLine("page table", table, where),
        LedgerLine("workspace", workspace * setup.keeps_workspace, where),
        LedgerLine("CUDA graphs", graph_bytes(sizes, setup), where),
        LedgerLine("one step", step, where),
    ]
    return Ledger(tuple(line for line in lines if line.num_bytes))


# --- does it fit ---------------------------------------------------------------------------------------------------------


def limit_device(device: torch.device, cache: CacheConfig) -> None:
    """Let this process allocate no more than a card of --gpu-memory-limit would, its CUDA context included; without a limit
    all there is. Raises ValueError if the device is smaller.
    """
    if device.type != "cuda":
        return
    limit = cache.gpu_limit_bytes
    total = torch.cuda.mem_get_info(device)[1]
    if limit is not None and limit > total:
        raise ValueError(
            f"--gpu-memory-limit of {limit / GIB:.2f} GiB: the device has {total / GIB:.2f}; leave it out"
        )
    share = 1.0 if limit is None else max(limit - CONTEXT_BYTES, 0) / total
    torch.cuda.set_per_process_memory_fraction(share, device.index)  # it refuses a device without an index


def cuda_budget(device: torch.device, cache: CacheConfig) -> int:
    """Bytes this process may allocate: --memory-ratio of the device less what others (and the CUDA context) hold.

    With --gpu-memory-limit as on a card of that size which is this process's alone, if so much is free.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    budget, limit = int(total * cache.memory_ratio) - others, cache.gpu_limit_bytes
    return budget if limit is None else min(budget, int(limit * cache.memory_ratio) - CONTEXT_BYTES)


def check_fits(ledger: Ledger, available: int, where: str = "device") -> None:
    """Raise DoesNotFit, naming the largest lines and the missing bytes, if the ledger needs more than `available` there.

    Call it before loading, with a set-up of the fewest pages that are of use: it costs nothing and saves the wait.
    """
    needed = ledger.on(where)
    if needed <= available:
        return
    largest: Sequence[LedgerLine] = sorted(ledger.lines, key=lambda line: -line.num_bytes)
    parts = ", ".join(
        f"{li.name} {li.num_bytes / GIB:.2f}" for li in largest if li.where == where and li.num_bytes >= 1e6
    )
    raise DoesNotFit(
        f"this needs {needed / GIB:.2f} GiB of {where} memory and {max(available, 0) / GIB:.2f} GiB are available: "
        f"{(needed - available) / GIB:.2f} GiB are missing ({parts} GiB). `minisgl plan` lists what fits",
        needed,
        available,
        ledger,
    )


def pages_on_cuda(device: torch.device, cache: CacheConfig, page_bytes: int, reserve_bytes: int = 0) -> int:
    """KV pages that fit into `cuda_budget` beside the peak of what was allocated so far.

    Call it after a forward pass of the largest step, so that the peak holds weights, workspace and activations. reserve_bytes:
    what will be allocated later, such as CUDA graphs (`graph_bytes`). Memory that other processes hold counts as used. Raises
    DoesNotFit with the missing bytes when not even two pages fit.
    """
    peak = torch.cuda.max_memory_allocated(device) + reserve_bytes
    available = cuda_budget(device, cache)
    if available - peak < 2 * page_bytes:
        raise DoesNotFit(
            f"no memory is left for the KV cache: of {available / GIB:.2f} GiB that --memory-ratio {cache.memory_ratio} and "
            f"other processes leave, weights and workspace take {peak / GIB:.2f} GiB. Raise --memory-ratio, lower "
            "--max-prefill-length or --max-running-requests, or quantize with --moe-expert-quantization",
            peak + 2 * page_bytes,
            available,
        )
    return (available - peak) // page_bytes


def pages_on_cpu(page_bytes: int, page_size: int, max_seq_len: int, available_bytes: int) -> int:
    """KV pages of a CPU run: for CPU_KV_TOKENS or one longest sequence, within a share of the available host memory."""
    wanted = -(-max(CPU_KV_TOKENS, max_seq_len) // page_size) + 1
    return max(2, min(wanted, int(available_bytes * CPU_KV_SHARE) // page_bytes))


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping, in a container within its limit; 8 GiB where it can't be read."""
    return gather_host_facts().available
