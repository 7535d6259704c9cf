"""Sizes of real models from config.json alone: totals as published, and every quirk that changes them."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.memory import Setup, workspace_bytes
from minisgl.models.sizes import (
    ModelSizes,
    kv_bytes_per_token,
    model_sizes,
    num_active_params,
    num_dense_params,
    num_params,
    shard_sizes,
)
from minisgl.models.spec import ModelSpec
from minisgl.planner.numbers import read_numbers
from tests.unit.planner import configs

BF16 = torch.bfloat16


def sizes_of(config: dict) -> ModelSizes:
    return read_numbers(config).sizes


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (configs.QWEN3_30B_A3B, 30.53e9, 3.35e9),
        (configs.MIXTRAL_8X7B, 46.7e9, 12.9e9),
        (configs.OLMOE_1B_7B, 6.92e9, 1.28e9),
        (configs.GPT_OSS_20B, 20.9e9, None),
        (configs.DEEPSEEK_V2_LITE, 15.7e9, None),
        (configs.DEEPSEEK_V3, 671e9, 37.6e9),
        (configs.QWEN15_MOE_A27B, 14.3e9, 2.7e9),
        (configs.QWEN3_NEXT_80B, 79.7e9, None),
        (configs.ERNIE_45_21B, 21.8e9, None),
        (configs.MINIMAX_M2, 228.7e9, 11.0e9),
        (configs.GLM_45_AIR, 106.85e9, None),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else None,
)
def test_totals_are_the_published_ones(config: dict, total: float, active: float | None) -> None:
    sizes = sizes_of(config)
    assert sizes.total_params == pytest.approx(total, rel=0.01)
    if active is not None:
        assert sizes.active_params == pytest.approx(active, rel=0.01)


def test_a_missing_head_dim_is_hidden_size_by_heads() -> None:
    """GLM-4.5-Air without its head_dim key (128) is a smaller model: 103.5 G instead of 106.9 G."""
    config = {key: value for key, value in configs.GLM_45_AIR.items() if key != "head_dim"}
    assert sizes_of(config).total_params == pytest.approx(103.5e9, rel=0.01)
    assert sizes_of(config).active_params == pytest.approx(10.1e9, rel=0.01)


def test_qwen3_30b_by_the_byte() -> None:
    sizes = sizes_of(configs.QWEN3_30B_A3B)
    assert sizes.expert_params == 28_991_029_248
    assert sizes.params["attention"] == pytest.approx(0.906e9, rel=1e-3)
    assert sizes.params["router"] == 48 * 128 * 2048
    assert (sizes.params["embedding"], sizes.params["head"]) == (151_936 * 2048,) * 2
    weights = sizes.dense_bytes(BF16) + sizes.record_bytes("none", BF16) * 128 * 48
    assert weights / 2**30 == pytest.approx(56.9, abs=0.05)
    assert sizes.record_bytes("fp8", BF16) == 4_732_928
    assert sizes.record_bytes("fp8", BF16) * 128 * 48 / 2**30 == pytest.approx(27, abs=0.1)
    assert sizes.record_bytes("fp8", BF16) * 8 * 48 / 2**30 == pytest.approx(1.69, abs=0.005)
    assert sizes.kv_bytes_per_token(BF16) == 98_304
    assert sizes.kv_bytes_per_token(BF16) * 43_506 / 2**30 == pytest.approx(3.98, abs=0.005)


def test_workspace_of_a_large_prompt() -> None:
    """8,192 tokens are 65,536 routes, whose rows of D = 2048 take 268 MB in bf16."""
    sizes = sizes_of(configs.QWEN3_30B_A3B)
    setup = Setup(on_cuda=True, dtype=BF16, max_seq_len=40_960)
    rows = 8192 * 8 * 2048 * 2
    assert rows == pytest.approx(268e6, rel=0.01)
    assert rows < workspace_bytes(sizes, setup) < rows + 1.3 * 65_536 * 768 * 2 + 1e6
    assert workspace_bytes(sizes, Setup(on_cuda=True, dtype=BF16, max_seq_len=40_960, fused=False)) == 0


def test_a_served_family_is_counted_by_its_spec() -> None:
    for config in (configs.QWEN3_30B_A3B, configs.MIXTRAL_8X7B):
        spec, numbers = ModelSpec.from_config(config), read_numbers(config)
        assert numbers.sizes == model_sizes(spec)
        assert numbers.served is None and numbers.dtype is BF16
        assert numbers.sizes.total_params == num_params(spec)
        assert numbers.sizes.active_params == num_active_params(spec)
        assert numbers.sizes.dense_params == num_dense_params(spec)


@pytest.mark.parametrize("config", [configs.QWEN3_30B_A3B, configs.MIXTRAL_8X7B])
def test_the_tolerant_reading_agrees_with_the_exact_one(config: dict) -> None:
    other = sizes_of({**config, "architectures": ["SomebodyElsesForCausalLM"]})
    exact = sizes_of(config)
    assert other.params == exact.params and other.expert_params == exact.expert_params
    assert other.kv_elements_L == exact.kv_elements_L and other.num_sparse == exact.num_sparse


def test_unknown_architectures_say_what_is_not_served_and_not_counted() -> None:
    numbers = read_numbers({**configs.OLMOE_1B_7B, "vision_config": {"depth": 3}})
    assert numbers.served is not None and "OlmoeForCausalLM" in numbers.served
    assert numbers.unknown == ("the vision tower",)
    odd = {**configs.OLMOE_1B_7B, "sliding_window": 64}
    assert any("sliding window" in what for what in read_numbers(odd).unknown)
    nested = {"architectures": ["X"], "text_config": configs.OLMOE_1B_7B}
    assert read_numbers(nested).sizes == sizes_of(configs.OLMOE_1B_7B)


def test_quirks_of_the_cache() -> None:
    deepseek = sizes_of(configs.DEEPSEEK_V2_LITE)
    assert deepseek.kv_bytes_per_token(BF16) == (512 + 64) * 2 * 27
    assert (deepseek.num_sparse, deepseek.params["dense MLPs"]) == (26, 3 * 2048 * 10_944)
    assert deepseek.params["shared experts"] == 26 * 3 * 2048 * 2 * 1408
    gpt_oss = sizes_of(configs.GPT_OSS_20B)
    assert gpt_oss.windows_L == (128, None) * 12 and gpt_oss.expert is not None and gpt_oss.expert.bias
    following = sizes_of(configs.QWEN3_NEXT_80B)
    assert sum(n > 0 for n in following.kv_elements_L) == 12 and following.state_elements > 0
    assert read_numbers(configs.DEEPSEEK_V3).stored_format == "fp8_block"
    assert read_numbers(configs.GPT_OSS_20B).stored_format == "mxfp4"
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert read_numbers({**configs.OLMOE_1B_7B, "quantization_config": packed}).stored_format == "int4"
    assert (
        read_numbers({**configs.OLMOE_1B_7B, "quantization_config": {"quant_method": "vptq"}}).stored_format
        == "vptq"
    )


def test_mtp_layers_and_tied_embeddings_are_not_counted() -> None:
    assert sizes_of({**configs.GLM_45_AIR, "num_nextn_predict_layers": 0}) == sizes_of(configs.GLM_45_AIR)
    assert sizes_of(configs.ERNIE_45_21B).params["head"] == 0
    assert sizes_of(configs.DEEPSEEK_V3).wide_params == 58 * 256


def test_shards_add_up() -> None:
    whole = sizes_of(configs.QWEN3_30B_A3B)
    assert shard_sizes(whole, 1) is whole
    for ranks in (2, 4):
        by_width, by_expert = shard_sizes(whole, ranks), shard_sizes(whole, ranks, expert_parallel=True)
        assert by_width.expert_params * ranks == by_expert.expert_params * ranks == whole.expert_params
        assert by_width.kv_bytes_per_token(BF16) * ranks == whole.kv_bytes_per_token(BF16)
        repeated = whole.params["norms"] + whole.params["router"] + whole.whole["attention"]
        divided = by_width.dense_params - repeated
        assert divided * ranks == pytest.approx(whole.dense_params - repeated, rel=1e-6)
        spec = ModelSpec.from_config(configs.QWEN3_30B_A3B)
        assert by_width.kv_bytes_per_token(BF16) == kv_bytes_per_token(spec, 2, ranks)
    eight = shard_sizes(whole, 8)
    assert eight.kv_bytes_per_token(BF16) * 4 == whole.kv_bytes_per_token(BF16), "ceil(4 / 8) = 1 head a rank"
    with pytest.raises(ValueError, match="can't be divided among 5 GPUs"):
        shard_sizes(whole, 5)
    latent = sizes_of(configs.DEEPSEEK_V2_LITE)
    assert shard_sizes(latent, 2).kv_elements_L == latent.kv_elements_L, (
        "a compressed cache is kept whole by every rank"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["X"]}, "lacks 'num_hidden_layers'"),
        ({**configs.OLMOE_1B_7B, "num_experts": 0}, "num_experts is 0"),
        ({**configs.QWEN3_30B_A3B, "num_experts": 0}, "num_experts is 0"),
        ({**configs.OLMOE_1B_7B, "num_experts": None}, "no number of experts"),
        ({**configs.OLMOE_1B_7B, "hidden_size": "2048"}, "hidden_size must be a whole number"),
        ({**configs.OLMOE_1B_7B, "hidden_size": -1}, "hidden_size must be a whole number"),
        ({**configs.OLMOE_1B_7B, "num_experts_per_tok": 65}, "can't choose 65 of 64"),
        ({**configs.OLMOE_1B_7B, "num_experts_per_tok": None}, "lacks 'num_experts_per_tok'"),
        ({**configs.DEEPSEEK_V2_LITE, "v_head_dim": None}, "lacks 'v_head_dim'"),
        ({**configs.QWEN3_30B_A3B, "hidden_size": None}, "lacks 'hidden_size'"),
    ],
)
def test_bad_configs_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_numbers(config)
