"""The plan's lines are the engine's lines, byte by byte: tiny engines of several families and formats on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import CacheConfig, EngineConfig
from minisgl.engine import memory
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import graph_sizes
from minisgl.engine.memory import (
    DoesNotFit,
    Ledger,
    LedgerLine,
    Setup,
    captured_batches,
    check_fits,
    expert_cache_bytes,
    graph_bytes,
    kv_pool_bytes,
    page_table_bytes,
    pages_on_cpu,
    predict_ledger,
    sampler_bytes,
    setup_of,
    step_bytes,
    workspace_bytes,
)
from minisgl.engine.offload import size_cache
from minisgl.kvcache import bytes_per_page
from minisgl.models.sizes import ModelSizes, model_sizes
from minisgl.models.spec import ModelSpec
from minisgl.moe.base import Problem
from minisgl.moe.workspace import Workspace
from minisgl.planner.numbers import read_numbers
from minisgl.resolve import Facts, resolve
from tests.unit.planner import configs

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 512,
}
MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama_tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **MOE},
    "qwen3_moe_mixed": {"architectures": ["Qwen3MoeForCausalLM"], **MOE, "mlp_only_layers": [1]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
}
WIDE = {"architectures": ["Qwen3MoeForCausalLM"], **MOE, "hidden_size": 128, "moe_intermediate_size": 128}
ONLY_PREDICTED = {"one step"}  # what an engine has while it computes


def start(folder: Path, config: dict[str, Any], **options: Any) -> Engine:
    (folder / "config.json").write_text(json.dumps({**TINY, **config}))
    requested = EngineConfig.from_kwargs(
        model=str(folder), device="cpu", dummy_weight=True, num_pages=17, page_size=4, **options
    )
    return Engine(requested, folder)


def compare(engine: Engine, config: dict[str, Any]) -> None:
    sizes = read_numbers({**TINY, **config}).sizes
    setup = setup_of(engine.config)
    predicted = predict_ledger(sizes, setup)
    actual = engine.ledger()
    for line in actual.lines:
        assert (line.name, predicted.line(line.name)) == (line.name, line.num_bytes)
    names = {line.name for line in predicted.lines} - ONLY_PREDICTED
    assert names == {line.name for line in actual.lines} - ONLY_PREDICTED
    assert all(line.where == "host" for line in predicted.lines)
    assert predicted.total - predicted.line("one step") == actual.total


@pytest.mark.parametrize("name", MODELS)
def test_every_line_of_a_family(name: str, tmp_path: Path) -> None:
    compare(start(tmp_path, MODELS[name], max_running_requests=7), MODELS[name])


@pytest.mark.parametrize("weight_format", ["none", "int8", "fp8", "fp8_block", "int4", "mxfp4"])
def test_every_line_of_a_format(weight_format: str, tmp_path: Path) -> None:
    compare(start(tmp_path, WIDE, moe_expert_quantization=weight_format), WIDE)


@pytest.mark.parametrize("weight_format", ["none", "int8", "fp8", "int4"])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_every_line_with_experts_on_the_host(num_slots: int, weight_format: str, tmp_path: Path) -> None:
    options = {"moe_expert_offload": True, "moe_expert_cache_size": num_slots}
    engine = start(tmp_path, WIDE, moe_expert_quantization=weight_format, **options)
    compare(engine, WIDE)
    assert engine.ledger().line("experts on the host") * num_slots == engine.ledger().line("experts") * 8
    assert engine.config.offload.moe_offload_mode == "staged", "what runs is in the configuration"
    engine.close()


def test_every_line_in_half_precision(tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "max_seq_len_override": 100, "moe_expert_quantization": "int8"}
    compare(start(tmp_path, MODELS["qwen3_moe"], **options), MODELS["qwen3_moe"])


def test_pool_bytes_are_pages_times_page_bytes() -> None:
    spec = ModelSpec.from_config(configs.QWEN3_30B_A3B)
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=4096, num_pages=100)
    page = bytes_per_page(spec.num_layers, spec.num_kv_heads, spec.head_dim, setup.page_size, setup.dtype)
    assert kv_pool_bytes(model_sizes(spec), setup) == 100 * page


@pytest.mark.parametrize(("weight_format", "tokens"), [("none", 8192), ("fp8", 1000), ("int8", 1)])
def test_workspace_is_the_arena_that_a_step_claims(weight_format: str, tokens: int) -> None:
    sizes = small_moe()
    setup = Setup(
        on_cuda=True,
        dtype=torch.bfloat16,
        max_seq_len=9000,
        weight_format=weight_format,
        max_prefill_length=tokens,
    )
    assert sizes.expert is not None
    name = "bf16" if weight_format == "none" else weight_format
    problem = Problem(tokens, sizes.top_k, sizes.num_experts, sizes.expert, name, torch.bfloat16)
    arena = Workspace(torch.device("cpu"))
    arena.claim(problem)
    assert workspace_bytes(sizes, setup) == arena.num_bytes > 0


def small_moe() -> ModelSizes:
    return read_numbers({**TINY, **MODELS["qwen3_moe"]}).sizes


def test_lines_of_a_cache_of_experts() -> None:
    sizes = small_moe()
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=512, num_pages=10, num_slots=3)
    ledger = predict_ledger(sizes, setup)
    record = sizes.record_bytes("none", torch.bfloat16)
    assert ledger.line("experts") == record * 3 * sizes.num_sparse == expert_cache_bytes(sizes, setup, 3)
    assert ledger.line("experts on the host") == record * 8 * sizes.num_sparse == ledger.on("host")
    assert ledger.line("transient experts") == record * 8, "four waves, or all experts"
    assert ledger.total == ledger.on("device") + ledger.on("host")
    staged = predict_ledger(sizes, replace(setup, staged=True))
    assert staged.line("transient experts") == 0 == staged.line("CUDA graphs")
    assert staged.line("expert copies") == record * 3, "two waves, or all slots"
    assert staged.on("device") < ledger.on("device")


def test_graphs_hold_what_few_waves_of_a_cache_serve() -> None:
    sizes = read_numbers(configs.QWEN3_30B_A3B).sizes
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=4096)
    assert captured_batches(sizes, setup) == graph_sizes(256)
    assert captured_batches(sizes, replace(setup, num_slots=32)) == graph_sizes(64), (
        "128 experts in four waves"
    )
    assert captured_batches(sizes, replace(setup, num_slots=8)) == [1, 2, 4], (
        "five tokens use up to 40 experts"
    )
    assert captured_batches(sizes, replace(setup, num_slots=30, staged=True)) == []


def test_lines_that_only_a_gpu_has() -> None:
    sizes = small_moe()
    setup = Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=512, num_pages=10)
    ledger = predict_ledger(sizes, setup)
    assert ledger.line("CUDA graphs") == graph_bytes(sizes, setup) >= 256 * 272 * 4
    assert graph_bytes(sizes, Setup(on_cuda=True, dtype=torch.bfloat16, max_seq_len=512, graph_batch=0)) == 0
    assert ledger.line("one step") == max(step_bytes(sizes, setup), sampler_bytes(256, 272))
    assert page_table_bytes(256, 512, 16) == 257 * (32 * 4 + 8)


def test_a_step_needs_more_with_more_tokens_or_wider_types() -> None:
    sizes = read_numbers({**TINY, **MODELS["qwen3"]}).sizes

    def step(**changes: Any) -> int:
        return step_bytes(
            sizes, Setup(**{"on_cuda": True, "dtype": torch.bfloat16, "max_seq_len": 512, **changes})
        )

    assert step(max_prefill_length=256) * 2 == step(max_prefill_length=512) == step(max_prefill_length=8192)
    assert step(dtype=torch.float32) > step()


def test_check_fits_names_what_is_missing() -> None:
    ledger = Ledger(
        (LedgerLine("dense weights", 3 * 2**30), LedgerLine("experts on the host", 2**40, "host"))
    )
    check_fits(ledger, 3 * 2**30)
    with pytest.raises(DoesNotFit, match=r"1\.00 GiB are missing \(dense weights 3\.00 GiB\)") as error:
        check_fits(ledger, 2 * 2**30)
    assert (error.value.needed, error.value.available, error.value.ledger) == (3 * 2**30, 2 * 2**30, ledger)
    assert isinstance(error.value, ValueError)


def test_pages_on_cuda_leaves_room_for_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * gib, 12 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * gib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * gib)
    device = torch.device("cuda")
    half = CacheConfig(memory_ratio=0.5)
    assert memory.cuda_budget(device, half) == 5 * gib, "1 GiB of the 12 belongs to others"
    assert memory.pages_on_cuda(device, half, 2**20) == 1024
    assert memory.pages_on_cuda(device, half, 2**20, reserve_bytes=gib // 2) == 512
    with pytest.raises(DoesNotFit, match=r"4\.00 GiB.*--memory-ratio") as error:
        memory.pages_on_cuda(device, CacheConfig(memory_ratio=0.4), 2**20)
    assert error.value.needed - error.value.available > 0


class Card:
    """A faked device: 80 GiB, of which `others` are taken by its context and other processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: int) -> None:
        self.fraction = 1.0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((80 * 2**30) - others, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)

    def set_fraction(self, fraction: float, device: int | None) -> None:
        assert not isinstance(device, torch.device), "torch refuses a device without an index here"
        self.fraction = fraction


def test_a_limit_makes_a_large_card_look_small(monkeypatch: pytest.MonkeyPatch) -> None:
    device, gib = torch.device("cuda"), 2**30
    card = Card(monkeypatch, others=gib)
    limited = CacheConfig(memory_ratio=0.9, gpu_memory_limit="12GiB")
    memory.limit_device(device, limited)
    assert card.fraction == 11.5 / 80, "the context takes its part of the 12 GiB"
    assert memory.cuda_budget(device, limited) == int(12 * gib * 0.9) - gib // 2
    assert memory.cuda_budget(device, CacheConfig(memory_ratio=0.9)) == int(80 * gib * 0.9) - gib
    memory.limit_device(device, CacheConfig())
    assert card.fraction == 1.0, "a later engine has the whole card again"
    with pytest.raises(ValueError, match=r"81\.00 GiB: the device has 80\.00; leave it out"):
        memory.limit_device(device, CacheConfig(gpu_memory_limit="81GiB"))


def test_a_limit_does_not_conjure_memory_that_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    device, gib = torch.device("cuda"), 2**30
    Card(monkeypatch, others=70 * gib)
    limited = CacheConfig(memory_ratio=1.0, gpu_memory_limit="12GiB")
    assert memory.cuda_budget(device, limited) == 10 * gib


def test_a_limit_decides_how_many_experts_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, gib = torch.device("cuda"), 2**30
    Card(monkeypatch, others=gib)
    facts = Facts(has_cuda=True, has_bf16=True, checkpoint_dtype="bfloat16", context_length=4096)
    options = {"moe_expert_quantization": "int4", "moe_expert_offload": True, "gpu_memory_limit": "12GiB"}
    config, _ = resolve(EngineConfig.from_kwargs(model="x", **options), facts)
    sizes = read_numbers(configs.QWEN3_30B_A3B).sizes
    small = size_cache(config, sizes, memory.cuda_budget(device, config.cache))[0].offload.num_slots
    assert small is not None
    assert 30 < small < 70
    whole = size_cache(config, sizes, memory.cuda_budget(device, CacheConfig()))[0]
    assert not whole.offload.moe_expert_offload, "80 GiB hold every expert"


def test_pages_on_cpu_stay_within_a_share_of_memory() -> None:
    assert pages_on_cpu(2**20, 16, 512, 2**40) == 2048 + 1
    assert pages_on_cpu(2**20, 16, 64_000, 2**40) == 4000 + 1
    assert pages_on_cpu(2**20, 16, 512, 2**30) == 256
    assert pages_on_cpu(2**30, 16, 512, 2**20) == 2


def test_setup_of_a_resolved_configuration() -> None:
    facts = Facts(has_cuda=True, has_bf16=True, checkpoint_dtype="bfloat16", context_length=4096)
    config, _ = resolve(
        EngineConfig.from_kwargs(model="x", moe_expert_quantization="fp8", cuda_graph_max_bs=8), facts
    )
    setup = setup_of(config, num_pages=5)
    assert setup == Setup(
        on_cuda=True, dtype=torch.bfloat16, max_seq_len=4096, num_pages=5, weight_format="fp8", graph_batch=8
    )
    assert setup.step_tokens == 4096
    options = {"moe_expert_offload": True, "moe_expert_cache_size": 9, "moe_expert_offload_wave_size": 3}
    for mode, staged in (("auto", False), ("device", False), ("staged", True)):
        config, _ = resolve(EngineConfig.from_kwargs(model="x", moe_offload_mode=mode, **options), facts)
        setup = setup_of(config)
        assert (setup.num_slots, setup.staged, setup.wave_size) == (9, staged, 3)
