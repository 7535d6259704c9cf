"""The engine: only owner of device state (weights, KV pages, page table, workspace). Runs one step at a time.

chunks -> inputs -> decoder (eagerly, or a captured graph for decode) -> sampler -> tokens, on their way to the host
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minisgl.attention import AttentionBackend, AttentionBatch, AttentionProblem, LayerCache, make_attention
from minisgl.config import EngineConfig
from minisgl.core import TokenLogprobs
from minisgl.engine.experts import check_can_share, make_moe_factory, share_experts
from minisgl.engine.facts import gather_facts
from minisgl.engine.graphs import DecodeGraphs, graph_sizes, safe_sizes
from minisgl.engine.inputs import PageTable, StepArrays, step_arrays, to_device
from minisgl.engine.memory import (
    DoesNotFit,
    Ledger,
    LedgerLine,
    available_host_bytes,
    check_fits,
    cuda_budget,
    graph_bytes,
    largest_problem,
    limit_device,
    pages_on_cpu,
    pages_on_cuda,
    predict_ledger,
    setup_of,
)
from minisgl.engine.offload import ExpertOffload, pages_for, size_cache
from minisgl.engine.prompt_scores import PromptScores, score_prompts
from minisgl.engine.ranks import Ranks, Setup, start_ranks
from minisgl.engine.sampler import SampleResult, sample
from minisgl.engine.step import Chunk, SampledToken, SampleSpec, ScoreSpec
from minisgl.kvcache import KVPool, bytes_per_page
from minisgl.models.decoder import Decoder, DecoderInput
from minisgl.models.dense import DenseStorage
from minisgl.models.loader import fill_dummy_weights, load_weights
from minisgl.models.sizes import ModelSizes, model_sizes, shard_sizes
from minisgl.models.spec import ModelSpec
from minisgl.moe.store.base import CacheCounters, StoreBytes
from minisgl.moe.store.pinned import CudaPinning, HostFacts, gather_host_facts
from minisgl.moe.trace import RoutingTrace
from minisgl.resolve import resolve

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LaunchedStep:
    """A step on its way. `wait` blocks until its tokens are on the host, and with them the `prompt_scores` of its chunks."""

    specs: Sequence[SampleSpec]
    result: SampleResult | None
    done: torch.cuda.Event | None
    ranks: Ranks
    score_specs: Sequence[ScoreSpec] = ()
    scores: PromptScores | None = None

    def wait(self) -> list[SampledToken]:
        with self.ranks.guard():
            if self.done is not None:
                self.done.synchronize()
        return self.result.fetch(self.specs) if self.result is not None else []

    def prompt_scores(self) -> list[list[TokenLogprobs]]:
        return self.scores.fetch(self.score_specs) if self.scores is not None else []


class Engine:
    """A model on a device. Build it with what the user asked for; `config` is what runs, `decisions` says why.

    ranks: this process's place among several; None starts, or finds, the others where --tp asks for them. Every rank builds
    an engine and runs the same steps: rank 0 by `launch`, the others by `worker.follow`.
    Raises ValueError, with the remedy, for anything that cannot work, and EngineLost where a rank fails.
    """

    def __init__(
        self, requested: EngineConfig, folder: Path, record_routing: bool = False, ranks: Ranks | None = None
    ) -> None:
        self.spec = ModelSpec.from_folder(folder)
        facts = gather_facts(self.spec, folder, requested.parallel.tensor_parallel_size)
        config, self.decisions = resolve(requested, facts)
        check_can_share(self.spec, config.parallel)
        self._storage = DenseStorage.choose(config.model, self.spec)
        self.ranks = ranks or start_ranks(Setup(config, str(folder)))
        self.config, self.group = self.ranks.config, self.ranks.group
        try:
            self._build(folder, record_routing)
        except torch.OutOfMemoryError as error:
            self.ranks.close()
            raise self._out_of_memory(error) from error
        except BaseException:
            self.ranks.close()
            raise

    def _build(self, folder: Path, record_routing: bool) -> None:
        self.device = self.ranks.device(self.config.model.device)
        self.dtype = DTYPES[self.config.model.dtype]
        limit_device(self.device, self.config.cache)
        assert self.config.model.max_seq_len_override is not None
        self.max_seq_len = self.config.model.max_seq_len_override
        self.vocab_size = self.spec.vocab_size
        self._sharing = share_experts(self.spec, self.config.parallel, self.group, self.device)
        self._sizes = self._share_of_sizes()
        self._host = self._share_of_host()
        if self.config.offload.moe_expert_offload:
            self._size_cache()
        self._check_memory()
        self._offload = self._make_offload() if self.config.offload.moe_expert_offload else None
        self.decoder = self._make_decoder()
        if self.config.model.dummy_weight:
            fill_dummy_weights(self.decoder, seed=0)
        else:
            load_weights(self.decoder, folder)
        self._reserve_workspace()
        record = (record_routing or self.config.offload.moe_trace) and not self.ranks.is_follower
        self.trace = self._watch_routing() if record else None
        rows = self.config.scheduler.max_running_requests
        page_size = self.config.cache.page_size
        self._table = PageTable(rows, self.max_seq_len, page_size, self.device)
        self.ranks.wait_ready()
        with self.ranks.guard():
            self.kv_pool = self._make_pool(self.group.smallest(self._num_pages()))
            self._caches = self._layer_caches(self.kv_pool)
            self._graphs = self._make_graphs()
        self._warm_up_counters = self._cache_counters()
        if self.trace is not None:
            self.trace.clear()  # sizing ran tokens of its own

    # --- construction --------------------------------------------------------------------------------------------

    def _share_of_sizes(self) -> ModelSizes:
        """The sizes of what this rank holds."""
        sizes = model_sizes(self.spec)
        if self.group.size == 1:
            return sizes
        sizes = shard_sizes(sizes, self.group.size, self.config.parallel.expert_parallel_size > 1)
        held = len(self._sharing.shard.experts) if self._sharing is not None else 0
        return replace(sizes, num_experts=held)

    def _share_of_host(self) -> HostFacts:
        """What this rank may take of its machine's memory. Asked together, before any rank takes some, and the least anywhere
        counts, so that all decide alike."""
        facts = gather_host_facts().share(self.ranks.num_neighbours)
        with self.ranks.guard():
            return replace(facts, available=self.group.smallest(facts.available))

    def _size_cache(self) -> None:
        """The number of experts a layer keeps on the device becomes part of the configuration."""
        budget = cuda_budget(self.device, self.config.cache) if self.device.type == "cuda" else None
        self.config, decisions = size_cache(self.config, self._sizes, budget)
        self.decisions += decisions

    def _make_offload(self) -> ExpertOffload:
        """Host memory for the experts, pinned on a machine with CUDA."""
        sizes, kernel = self._sizes, self.config.kernel
        record = sizes.record_bytes(
            kernel.moe_expert_quantization, self.dtype, kernel.moe_quantization_group_size
        )
        pinning = CudaPinning() if self.device.type == "cuda" else None
        offload = ExpertOffload(self.config.offload, sizes, record, self.device, self._host, pinning)
        self.decisions += offload.decisions
        planned = replace(self.config.offload, moe_offload_mode=offload.mode)
        self.config = replace(self.config, offload=planned)
        return offload

    def _check_memory(self) -> None:
        """Refuse what cannot fit before loading any of it; DoesNotFit says what is missing."""
        ledger = predict_ledger(self._sizes, setup_of(self.config))
        if self.device.type == "cuda":
            check_fits(ledger, cuda_budget(self.device, self.config.cache))
        else:
            check_fits(ledger, self._host.available, where="host")

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> DoesNotFit:
        """The allocator's refusal in our words: others may have taken memory since it was checked, or fragments remain."""
        ledger = predict_ledger(self._sizes, setup_of(self.config))
        return DoesNotFit(
            f"the device ran out of memory while loading ({str(error).splitlines()[0]}). Lower --memory-ratio or "
            "--max-prefill-length, or quantize with --moe-expert-quantization",
            ledger.on("device"),
            cuda_budget(self.device, self.config.cache),
            ledger,
        )

    def _reserve_workspace(self) -> None:
        """Scratch space of the largest step, before the KV cache takes what is left and graphs point into it."""
        problem = largest_problem(self._sizes, setup_of(self.config))
        for layer in self.decoder.moe_layers().values():
            assert problem is not None
            most = replace(problem, num_tokens=layer.exchange.most_rows(problem.num_tokens))
            layer.backend.reserve(most, self.device)  # one for all layers: the first call does it

    def _make_decoder(self) -> Decoder:
        kernel = self.config.kernel

        def attention(problem: AttentionProblem) -> AttentionBackend:
            return make_attention(kernel.attention_backend, problem, self.device)

        moe_factory = None
        if self._sharing is not None:
            moe_factory = make_moe_factory(
                self.spec, kernel, self.device, self.dtype, self._sharing, self._offload
            )
        return Decoder(
            self.spec,
            attention,
            page_size=self.config.cache.page_size,
            device=self.device,
            dtype=self.dtype,
            moe_factory=moe_factory,
            group=self.group,
            storage=self._storage,
        )

    def _watch_routing(self) -> RoutingTrace | None:
        moe = self.spec.moe
        if moe is None:
            return None
        trace = RoutingTrace(moe.num_experts, moe.rule.top_k)
        for index, layer in self.decoder.moe_layers().items():
            layer.backend = trace.watch(index, layer.backend)
        return trace

    def _make_pool(self, num_pages: int) -> KVPool:
        spec = self.spec
        return KVPool(
            spec.num_layers,
            num_pages,
            self.config.cache.page_size,
            self._sizes.num_kv_heads,
            spec.head_dim,
            self.dtype,
            self.device,
        )

    def _layer_caches(self, pool: KVPool) -> list[LayerCache]:
        return [LayerCache(*pool.layer(i)) for i in range(self.spec.num_layers)]

    def _num_pages(self) -> int:
        """KV pages: the user's number, or what memory leaves."""
        cache, spec = self.config.cache, self.spec
        if cache.num_pages is not None:
            return cache.num_pages
        if cache.max_total_tokens is not None:
            return pages_for(cache.max_total_tokens, cache.page_size)
        page_bytes = bytes_per_page(
            spec.num_layers, self._sizes.num_kv_heads, spec.head_dim, cache.page_size, self.dtype
        )
        if self.device.type == "cpu":
            left = available_host_bytes() // self.ranks.num_neighbours
            return pages_on_cpu(page_bytes, cache.page_size, self.max_seq_len, left)
        self._run_largest_step()
        graphs = graph_bytes(self._sizes, setup_of(self.config))
        return pages_on_cuda(self.device, cache, page_bytes, reserve_bytes=graphs)

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """One prompt of the largest step on the dummy page: its peak memory is what the KV pool must leave free."""
        torch.cuda.reset_peak_memory_stats(self.device)  # what loading took for a moment does not count
        num_tokens = min(self.config.scheduler.step_tokens, self.max_seq_len)
        page_size = self.config.cache.page_size
        caches = self._layer_caches(self._make_pool(2))
        positions_T = torch.arange(num_tokens, device=self.device)
        batch = AttentionBatch(
            cu_q_B1=torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device),
            kv_lens_B=torch.tensor([num_tokens], dtype=torch.int32, device=self.device),
            page_table_BP=torch.zeros(
                (1, -(-num_tokens // page_size)), dtype=torch.int32, device=self.device
            ),
            write_slots_T=positions_T % page_size,
            max_q_len=num_tokens,
            max_kv_len=num_tokens,
        )
        ids_T = positions_T % self.vocab_size
        step = DecoderInput(ids_T, positions_T, batch, self.decoder.plan(batch), positions_T[-1:])
        self.decoder(step, caches)
        # The sampler's temporaries for a full batch, in float64 (its noise), are part of the peak.
        torch.empty(
            (self.config.scheduler.max_running_requests, self.vocab_size),
            dtype=torch.float64,
            device=self.device,
        )
        torch.cuda.synchronize(self.device)

    def _make_graphs(self) -> DecodeGraphs | None:
        limit = self.config.kernel.cuda_graph_max_bs
        if self.device.type != "cuda" or limit == 0:
            return None
        limit = self.config.scheduler.max_running_requests if limit is None else limit
        sizes = graph_sizes(min(limit, self.config.scheduler.max_running_requests))
        parts = [self.group, *self.decoder.backends.values()]
        sizes = safe_sizes(sizes, self.decoder.moe_layers().values(), parts)
        sizes = sizes[
            : self.group.smallest(len(sizes))
        ]  # all replay, or none: padding changes what they send
        if not sizes:
            return None
        return DecodeGraphs(self.decoder, self._caches, self._table, sizes, self.max_seq_len, self.group)

    # --- one step ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> LaunchedStep:
        """Run one step: returns while the device still computes. The chunks' rows are distinct."""
        self.ranks.send(chunks)
        with self.ranks.guard():
            return self._run(chunks)

    def _run(self, chunks: Sequence[Chunk]) -> LaunchedStep:
        self._table.update(chunks)
        arrays, asked = step_arrays(chunks), [c.score for c in chunks if c.score is not None]
        replayed = self._graphs.run(arrays) if self._graphs is not None and not asked else None
        logits_NV, rows_N, scores = (*replayed, None) if replayed else self._run_eagerly(arrays, asked)
        specs, result = [c.sample for c in chunks if c.sample is not None], None
        if specs:
            result = None if self.ranks.is_follower else sample(logits_NV, specs)
            tokens_N = torch.empty_like(rows_N) if result is None else result.tokens_B
            self._table.last_R.index_copy_(0, rows_N, self.group.broadcast(tokens_N))
        result, scores = result and result.to_host(), scores and scores.to_host()
        return LaunchedStep(specs, result, self._mark(), self.ranks, asked, scores)

    def _run_eagerly(
        self, arrays: StepArrays, asked: Sequence[ScoreSpec]
    ) -> tuple[torch.Tensor, torch.Tensor, PromptScores | None]:
        """Logits [N, V] of the rows that are sampled, their rows [N] of the page table, and what was asked of prompts."""
        tensors = to_device(arrays.parts(), self.device)
        ids_T, positions_T, rows_T, *_, wanted_X, targets_S = tensors
        batch, num_logits = self._table.batch(arrays, tensors), len(arrays.logit_rows_N)
        tokens_T = self._table.tokens(ids_T, rows_T)
        step = DecoderInput(tokens_T, positions_T, batch, self.decoder.plan(batch), wanted_X)
        hidden_XD, lm_head = self.decoder.hidden(step, self._caches), self.decoder.lm_head
        scores, most = (
            None,
            self.config.scheduler.max_running_requests,
        )  # the sampler's memory is reserved for so many rows
        if asked:
            num_top = max(spec.num_top for spec in asked)
            scores = score_prompts(lm_head, hidden_XD[num_logits:], targets_S, num_top, most)
        return lm_head(hidden_XD[:num_logits]), rows_T[wanted_X[:num_logits]], scores

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def expert_cache(self) -> dict[int, CacheCounters]:
        """What each layer's cache of experts did so far, by layer; empty without one. Waits for the device."""
        before = self._warm_up_counters
        counted = {index: now - before[index] for index, now in self._cache_counters().items()}
        if self._offload is not None:
            self._offload.tell(counted)
        return counted

    def _cache_counters(self) -> dict[int, CacheCounters]:
        counted = {index: layer.store.counters() for index, layer in self.decoder.moe_layers().items()}
        return {index: counters for index, counters in counted.items() if counters is not None}

    def close(self) -> None:
        """Write the trace that was asked for, give up graphs and pinned memory, end the other ranks. No step may follow."""
        path = self.config.offload.moe_trace
        if path is not None and self.trace is not None:
            self.trace.save(path)
        if self._graphs is not None:
            self._graphs.close()
        if self._offload is not None:
            self._offload.close()
        self.ranks.close()

    def ledger(self) -> Ledger:
        """Everything that was allocated for good."""
        where = "device" if self.device.type == "cuda" else "host"
        moe_layers = self.decoder.moe_layers().values()
        dense, embedding = self.decoder.num_bytes()
        experts = [layer.store.bytes() for layer in moe_layers]
        scratch = {id(layer.backend): layer.backend.scratch_bytes(self.device) for layer in moe_layers}
        shared = self._offload.bytes() if self._offload is not None else StoreBytes()
        table = self._table
        lines = [
            LedgerLine("dense weights", dense, where),
            LedgerLine("embedding on the host", embedding, "host"),
            LedgerLine("experts", sum(e.device for e in experts), where),
            LedgerLine("experts on the host", sum(e.pinned + e.host for e in experts), "host"),
            LedgerLine("transient experts", shared.device, where),
            LedgerLine("expert copies", shared.pinned, "host"),
            LedgerLine("KV pages", self.kv_pool.num_bytes, where),
            LedgerLine("page table", table.pages_RP.nbytes + table.last_R.nbytes, where),
            LedgerLine("workspace", max(scratch.values(), default=0), where),
            LedgerLine("CUDA graphs", self._graphs.num_bytes if self._graphs else 0, where),
        ]
        return Ledger(tuple(line for line in lines if line.num_bytes))
