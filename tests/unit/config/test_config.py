"""Configuration: generated flags, validation at the edge, and what `resolve` decides."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from minisgl.config import EngineConfig, add_engine_flags, engine_options
from minisgl.flags import add_flags, flag_names, iter_flags
from minisgl.resolve import Facts, resolve

CPU = Facts(has_cuda=False, has_bf16=False, checkpoint_dtype="bfloat16", context_length=4096)
GPU = dataclasses.replace(CPU, has_cuda=True, has_bf16=True)


LINEAGE = """--model --model-path --dtype --tp --tensor-parallel-size --max-running-requests --max-seq-len-override
    --memory-ratio --max-prefill-length --num-pages --page-size --attention-backend --attn --cache --cache-type
    --moe-backend --model-source --dummy-weight --cache-eviction-policy --moe-expert-quantization"""


def test_lineage_flags_exist() -> None:
    names = {name for _, item in iter_flags(EngineConfig) for name in flag_names(item)}
    for name in LINEAGE.split():
        assert name in names, name


def test_flags_and_keywords_are_the_same_fields() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, [item for _, item in iter_flags(EngineConfig)], "engine")
    line = (
        "--model m --page-size 4 --memory-ratio 0.5 --dummy-weight --cache naive --adaptive-experts lru,lfu"
    )
    namespace = vars(parser.parse_args(line.split()))
    assert set(namespace) == {
        "model", "page_size", "memory_ratio", "dummy_weight", "cache_type", "adaptive_experts"
    }  # fmt: skip
    config = EngineConfig.from_kwargs(**namespace)
    assert (config.model.model, config.cache.page_size, config.cache.memory_ratio) == ("m", 4, 0.5)
    assert config.model.dummy_weight


def test_auto_is_as_if_a_number_were_not_given() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    line = ["--max-prefill-length", "auto", "--num-pages", "40", "--max-running-requests", "4"]
    assert engine_options(parser.parse_args(line)) == {"num_pages": 40, "max_running_requests": 4}
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-running-requests", "auto"])


def test_resolve_returns_a_new_tree_and_reasons() -> None:
    config = EngineConfig.from_kwargs(model="m")
    done, decisions = resolve(config, CPU)
    assert config.model.device == "auto", "the request itself is never changed"
    assert (done.model.device, done.model.dtype, done.kernel.attention_backend) == ("cpu", "float32", "sdpa")
    assert done.model.max_seq_len_override == 4096
    assert {d.flag for d in decisions} >= {"--device", "--dtype", "--moe-backend"}
    assert all(d.reason for d in decisions)
    again, nothing = resolve(done, CPU)
    assert (again, nothing) == (done, [])
    done, _ = resolve(config, GPU)
    assert (done.model.dtype, done.kernel.moe_backend) == ("bfloat16", "fused")
    done, _ = resolve(config, dataclasses.replace(GPU, has_bf16=False))
    assert done.model.dtype == "float16"


EP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 0}, "page-size"),
        ({"num_pages": 1}, "num-pages"),
        ({"memory_ratio": 1.5}, "memory-ratio"),
        ({"max_running_requests": 0}, "max-running-requests"),
        ({"max_prefill_length": 0}, "max-prefill-length"),
        ({"cache_type": "tree"}, "radix"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"tensor_parallel_size": 0}, "--tp=0 must be at least 1"),
        (
            {"tensor_parallel_size": 4, "expert_parallel_size": 2},
            "expert-parallel-size=2 must be 1 or .* --tp=4",
        ),
        ({"moe_ep_dispatch": "static"}, "--moe-ep-dispatch needs --expert-parallel-size"),
        ({"moe_replicated_experts": (1,)}, "--moe-replicated-experts needs --expert-parallel-size"),
        ({"moe_expert_placement": "round-robin", "tensor_parallel_size": 2}, "--moe-expert-placement needs"),
        ({**EP2, "moe_replicated_experts": (3, 1, 3)}, "names expert 3 twice"),
        ({**EP2, "moe_replicated_experts": (-1,)}, "negative"),
        (
            {**EP2, "moe_ep_dispatch": "dynamic", "cuda_graph_max_bs": 8},
            "dynamic .* leave out --cuda-graph-max-bs 8",
        ),
        ({**EP2, "disable_moe_communication_overlap": True}, "dynamic or static; add one"),
        ({**EP2, "collective_timeout": 0.0}, "--collective-timeout=0.0"),
        ({"moe_small_m_threshold": "x"}, "whole number"),
        ({"max_seq_len_override": 1}, "max-seq-len-override"),
        ({"pagesize": 4}, "page_size"),
        ({"cache_eviction_policy": "mru"}, "lru"),
    ],
)
def test_bad_options_name_the_flag_and_the_remedy(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig.from_kwargs(model="m", **options)


def test_what_the_machine_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="--device cpu"):
        resolve(EngineConfig.from_kwargs(model="m", device="cuda"), CPU)
    with pytest.raises(ValueError, match="float16"):
        resolve(
            EngineConfig.from_kwargs(model="m", dtype="bfloat16"), dataclasses.replace(GPU, has_bf16=False)
        )


def test_a_memory_limit_is_a_size_and_needs_a_gpu() -> None:
    assert EngineConfig.from_kwargs(model="m", gpu_memory_limit="12GiB").cache.gpu_limit_bytes == 12 * 2**30
    assert EngineConfig.from_kwargs(model="m").cache.gpu_limit_bytes is None
    with pytest.raises(
        ValueError, match=r"--gpu-memory-limit 'twelve' is not a size: write for example 12GiB"
    ):
        EngineConfig.from_kwargs(model="m", gpu_memory_limit="twelve")
    asked = EngineConfig.from_kwargs(model="m", gpu_memory_limit="12GiB", device="cpu")
    facts = Facts(has_cuda=True, has_bf16=True, checkpoint_dtype="bfloat16", context_length=512)
    with pytest.raises(ValueError, match="this runs on the CPU: leave it out"):
        resolve(asked, facts)


@pytest.mark.parametrize(
    ("memory", "limit", "expected"),
    [(140 << 30, None, 256), (12 << 30, None, 128), (140 << 30, "12GiB", 128), (1 << 28, None, 4)],
)
def test_graphs_are_captured_for_batches_that_memory_has_room_for(
    memory: int, limit: str | None, expected: int
) -> None:
    facts = Facts(True, True, "bfloat16", 4096, device_bytes=memory, vocab_size=151_936)
    config, made = resolve(EngineConfig.from_kwargs(model="m", gpu_memory_limit=limit), facts)
    assert config.kernel.cuda_graph_max_bs == expected
    assert any(decision.flag == "--cuda-graph-max-bs" for decision in made)
    asked, _ = resolve(EngineConfig.from_kwargs(model="m", cuda_graph_max_bs=7), facts)
    assert asked.kernel.cuda_graph_max_bs == 7
    dynamic = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "moe_ep_dispatch": "dynamic"}
    without, _ = resolve(EngineConfig.from_kwargs(model="m", **dynamic), facts)
    assert without.kernel.cuda_graph_max_bs == 0, "no graph holds it, and no memory is kept for one"
