"""config.json to plain numbers: both generations of keys, every deviation, and a clear word about what is
missing.
"""

import json

import pytest
import torch

from minisgl.models import sizes
from minisgl.models.spec import FAMILIES, ModelSpec
from minisgl.moe.base import RoutingRule

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def test_qwen3_30b_sizes():
    spec = ModelSpec.from_config(QWEN3_30B)
    assert sizes.expert_params(spec) == 4_718_592
    assert sizes.num_expert_params(spec) == 48 * 603_979_776
    assert 48 * sizes.attention_params(spec) == pytest.approx(0.906e9, rel=1e-3)
    assert sizes.moe_layer_params(spec, 0) * 48 == pytest.approx(12.6e6, rel=2e-3)
    assert sizes.num_params(spec) == 30_532_122_624
    assert sizes.num_active_params(spec) == pytest.approx(3.35e9, rel=2e-3)
    assert sizes.num_dense_params(spec) + sizes.num_expert_params(spec) == sizes.num_params(spec)
    assert sizes.kv_bytes_per_token(spec) == 98_304
    assert 43_506 * sizes.kv_bytes_per_token(spec) / 2**30 == pytest.approx(3.98, abs=0.005)


def test_mixtral_sizes():
    spec = ModelSpec.from_config(MIXTRAL_8X7B)
    assert sizes.num_params(spec) == pytest.approx(46.7e9, rel=1e-3)
    assert sizes.num_active_params(spec) == pytest.approx(12.9e9, rel=2e-3)


def test_qwen3_30b_fields():
    spec = ModelSpec.from_config(QWEN3_30B)
    assert spec.moe is not None
    assert spec.moe.rule == RoutingRule(top_k=8, renormalize=True)
    assert (spec.moe.num_experts, spec.moe.hidden_dim) == (128, 768)
    assert spec.moe.sparse_layers == frozenset(range(48))
    assert spec.qk_norm
    assert not spec.qkv_bias
    assert spec.windows == (None,) * 48
    assert spec.dtype == torch.bfloat16
    assert (spec.eos_ids, spec.bos_id) == ((151645,), 151643)
    assert (spec.rope.theta, spec.rope.kind, spec.context_length) == (1e6, "default", 40960)
    assert spec.scale == pytest.approx(128**-0.5)


def test_new_style_keys_read_the_same():
    new = {
        **{
            k: v
            for k, v in QWEN3_30B.items()
            if k not in ("rope_theta", "rope_scaling", "torch_dtype", "num_experts")
        },
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "dtype": "bfloat16",
        "num_local_experts": 128,
    }
    assert ModelSpec.from_config(new) == ModelSpec.from_config(QWEN3_30B)


@pytest.mark.parametrize(
    ("step", "only", "sparse"), [(1, [0, 2], {1, 3}), (2, [], {1, 3}), (2, [3], {1}), (1, [0, 1, 2, 3], None)]
)
def test_sparse_layers(step, only, sparse):
    config = {**QWEN3_30B, "num_hidden_layers": 4, "decoder_sparse_step": step, "mlp_only_layers": only}
    spec = ModelSpec.from_config(config)
    assert (spec.moe and set(spec.moe.sparse_layers)) == sparse
    assert [spec.is_sparse(i) for i in range(4)] == [i in (sparse or ()) for i in range(4)]


def test_sliding_windows():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert ModelSpec.from_config(mistral).windows == (4096,) * 3
    assert ModelSpec.from_config({**mistral, "sliding_window": None}).windows == (None,) * 3
    assert ModelSpec.from_config({**mistral, "sliding_window": 16}).windows == (16,) * 3
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}
    assert ModelSpec.from_config(qwen).windows == (None,) * 3
    assert ModelSpec.from_config({**qwen, "use_sliding_window": True}).windows == (None, 8, 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    spec = ModelSpec.from_config({**qwen, "use_sliding_window": True, "layer_types": kinds})
    assert spec.windows == (8, None, 8)


def test_biases_and_head_dims():
    llama = ModelSpec.from_config(LLAMA)
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (False, False, False)
    assert (llama.head_dim, llama.num_kv_heads) == (16, 4)
    llama = ModelSpec.from_config({**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32})
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias, llama.head_dim) == (True, True, True, 32)
    qwen2 = ModelSpec.from_config({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.out_bias) == (True, False)
    assert ModelSpec.from_config({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_rope_scaling(style):
    def rope(**numbers):
        theta = {"rope_theta": 5e5} if style == "rope_parameters" else {}
        return ModelSpec.from_config({**LLAMA, "rope_theta": 5e5, style: {**numbers, **theta}})

    assert rope(rope_type="linear", factor=4.0).context_length == 1024
    assert rope(type="dynamic", factor=2.0).rope.kind == "dynamic"
    yarn = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    assert (yarn.rope.original_max_position, yarn.context_length) == (128, 512)
    assert yarn.rope.attention_factor == pytest.approx(1.1386294)
    llama3 = rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    assert (llama3.rope.theta, llama3.rope.factor, llama3.context_length) == (5e5, 8.0, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not served; known ones: .*Qwen3MoeForCausalLM",
        ),
        ({"architectures": []}, "names no architecture.*LlamaForCausalLM"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "4 heads can't share 3"),
        ({"hidden_act": "relu2"}, "'relu2' is not served; known ones: silu"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not served"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not served; known ones: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
    ],
)
def test_bad_configs(change, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_config({**LLAMA, **change})


def test_moe_config_errors():
    lacking = {k: v for k, v in QWEN3_30B.items() if k != "num_experts_per_tok"}
    with pytest.raises(ValueError, match="lacks 'num_experts_per_tok', which Qwen3MoeForCausalLM needs"):
        ModelSpec.from_config(lacking)
    with pytest.raises(ValueError, match="can't choose 200 of 128 experts"):
        ModelSpec.from_config({**QWEN3_30B, "num_experts_per_tok": 200})


def test_folder(tmp_path):
    with pytest.raises(ValueError, match=r"config.json is missing"):
        ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    assert ModelSpec.from_folder(tmp_path).eos_ids == (151645,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert ModelSpec.from_folder(tmp_path).eos_ids == (151645, 151643)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelSpec.from_folder(tmp_path)


def test_every_family_is_named_after_its_architecture():
    assert all(name == family.architecture for name, family in FAMILIES.items())
