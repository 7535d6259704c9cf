"""--quantize-dense fp8 and --embedding-on-host, whole: bits of fp8 files are kept, ranks share, the ledger counts all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minisgl import LLM, SamplingParams
from minisgl.engine.memory import predict_ledger, setup_of
from minisgl.layers.fp8 import Fp8Storage
from minisgl.models.checkpoints import ExpertChoice
from minisgl.models.converting import convert
from minisgl.models.decoder import Decoder
from minisgl.models.dense import DenseStorage, stored_group
from minisgl.models.loader import load_weights
from minisgl.models.sizes import model_sizes
from minisgl.models.spec import ModelSpec
from tests.checkpoint_writers import encode_fp8, gptq_config, gptq_encoder, quantize_folder
from tests.e2e.model_factory import make_model, make_prompts
from tests.unit.models.decoder_harness import CPU, PAGE_SIZE, Session, cpu_attention
from tests.unit.parallel.threads import on_ranks

SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 64}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TOKENS = [5, 17, 200, 3, 99, 42, 7]
QUERY = "model.layers.1.self_attn.q_proj"


def load(folder: Path, storage: DenseStorage | None = None, **options) -> Decoder:
    spec = ModelSpec.from_folder(folder)
    made: dict[str, Any] = {"page_size": PAGE_SIZE, "device": CPU, "dtype": torch.float32, **options}
    decoder = Decoder(spec, cpu_attention, storage=storage, **made)
    load_weights(decoder, folder)
    return decoder


def logits_of(decoder: Decoder) -> torch.Tensor:
    return Session(decoder, 1, 16).step([(0, TOKENS)])


def fp8(group: int = 0, on_host: bool = False) -> DenseStorage:
    return DenseStorage(Fp8Storage(group), on_host)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_bias", "qwen2"])
def test_logits_are_those_of_the_quantized_weights(tmp_path: Path, name: str) -> None:
    """The weights that fp8 means, given to a plain decoder, give the same logits."""
    make_model(tmp_path, name)
    quantized, plain = load(tmp_path, fp8()), load(tmp_path)
    places = plain.places()
    before = logits_of(plain)
    weights = quantized.fp8_weights()
    layers = quantized.spec.num_layers
    projections = [f"layers.{i}.attention.{n}.weight" for i in range(layers) for n in ("q", "k", "v", "out")]
    assert sorted(weights) == sorted([*projections, "lm_head.weight"])
    for place, weight in weights.items():
        places[place].copy_(weight.dequantize())
    torch.testing.assert_close(logits_of(quantized), logits_of(plain), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(before, logits_of(plain), rtol=1e-4, atol=1e-3), "nothing was quantized"


def test_an_fp8_file_keeps_its_codes_and_scales(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    quantize_folder(tmp_path, encode_fp8, FP8_BLOCKS)
    assert stored_group(tmp_path) == 128
    decoder = load(tmp_path, fp8(128))
    tensors = load_file(tmp_path / "model.safetensors")
    weight = decoder.fp8_weights()["layers.1.attention.q.weight"]
    assert torch.equal(weight.codes_NK.view(torch.uint8), tensors[f"{QUERY}.weight"].view(torch.uint8))
    blocks = tensors[f"{QUERY}.weight_scale_inv"].float()
    assert torch.equal(weight.scale_NG, blocks.repeat_interleave(128, dim=0)[: len(weight.scale_NG)])
    head = decoder.fp8_weights()["lm_head.weight"]  # plain in the file: quantized, once
    assert head.scale_NG.shape == (272, 1) and bool((head.codes_NK.float().abs().amax(1) == 448).all())


@pytest.mark.parametrize("form", ["rows", "tensor"])
def test_scales_of_rows_are_kept_too(tmp_path: Path, form: str) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)

    def encode(base: str, weight: torch.Tensor):
        scale = weight.abs().amax(1, keepdim=True) / 300  # not what we would choose
        scale = scale if form == "rows" else scale.amax()
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {f"{base}.weight": codes, f"{base}.weight_scale_inv": scale}, codes.float() * scale

    quantize_folder(tmp_path, encode, {"quant_method": "fp8"})
    tensors = load_file(tmp_path / "model.safetensors")
    weight = load(tmp_path, fp8(stored_group(tmp_path))).fp8_weights()["layers.1.attention.q.weight"]
    assert torch.equal(weight.codes_NK.view(torch.uint8), tensors[f"{QUERY}.weight"].view(torch.uint8))
    stored = tensors[f"{QUERY}.weight_scale_inv"].reshape(-1, 1)
    assert torch.equal(weight.scale_NG, stored.expand(weight.scale_NG.shape))


def test_a_converted_fp8_file_is_still_the_same_bits(tmp_path: Path) -> None:
    make_model(tmp_path / "source", "qwen3_moe", **SIZES)
    quantize_folder(tmp_path / "source", encode_fp8, FP8_BLOCKS)
    convert(tmp_path / "source", tmp_path / "out", ExpertChoice("fp8_block"), CPU)
    assert stored_group(tmp_path / "out") == 128
    stored = load_file(tmp_path / "out" / "dense.safetensors")
    source = load_file(tmp_path / "source" / "model.safetensors")
    for suffix in ("weight", "weight_scale_inv"):
        a, b = stored[f"{QUERY}.{suffix}"], source[f"{QUERY}.{suffix}"]
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    texts = []
    for folder in ("source", "out"):
        for quantize in ("none", "fp8"):
            llm = LLM(str(tmp_path / folder), device="cpu", num_pages=50, quantize_dense=quantize)
            texts.append([o.token_ids for o in llm.generate(make_prompts([5, 12]), params)])
    assert texts[0] == texts[2] and texts[1] == texts[3]


def test_other_encodings_are_dequantized_and_quantized(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    meant = quantize_folder(tmp_path, gptq_encoder(32), gptq_config(32))
    weight = load(tmp_path, fp8()).fp8_weights()["layers.1.attention.q.weight"]
    value = meant[f"{QUERY}.weight"]
    assert (weight.dequantize() - value).norm() < 0.04 * value.norm()


def test_scales_of_other_groups_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", hidden_size=256)
    quantize_folder(tmp_path, encode_fp8, FP8_BLOCKS)
    with pytest.raises(
        ValueError, match=r"k_proj.weight in .*scales are of 128 columns each.*--quantize-dense"
    ):
        load(tmp_path, fp8(64))


# --- the embedding -----------------------------------------------------------------------------------------------------


def test_an_embedding_on_the_host_gives_the_same_tokens(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for on_host in (False, True):
        llm = LLM(str(tmp_path), device="cpu", num_pages=50, embedding_on_host=on_host)
        texts.append([o.token_ids for o in llm.generate(make_prompts([5, 12]), params)])
    assert texts[0] == texts[1]


def test_a_tied_model_needs_a_head_of_its_own(tmp_path: Path) -> None:
    make_model(tmp_path, "llama_tied")
    with pytest.raises(ValueError, match=r"--embedding-on-host saves nothing.*or add --quantize-dense fp8"):
        LLM(str(tmp_path), device="cpu", embedding_on_host=True)
    plain, both = load(tmp_path), load(tmp_path, fp8(on_host=True))
    assert "lm_head.weight" not in load(tmp_path, fp8()).places(), "shared, so plain"
    head = both.fp8_weights()["lm_head.weight"].dequantize()
    embedding = plain.places()["embedding.weight"]
    assert torch.equal(both.places()["embedding.weight"], embedding)
    assert 0 < (head - embedding).norm() < 0.04 * embedding.norm()
    assert both.num_bytes()[1] == embedding.nbytes


# --- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_tied", "llama_bias", "qwen3"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"quantize_dense": "fp8"}, "float32"),
        ({"quantize_dense": "fp8", "quantize_dense_group_size": 32}, "bfloat16"),
        ({"quantize_dense": "fp8", "embedding_on_host": True}, "bfloat16"),
        ({"embedding_on_host": True}, "float32"),
    ],
)
def test_the_ledger_counts_what_was_predicted(tmp_path: Path, name: str, options: dict, dtype: str) -> None:
    make_model(tmp_path, name)
    if "tied" in name and "quantize_dense" not in options:
        pytest.skip("refused, as tested above")
    llm = LLM(str(tmp_path), device="cpu", dtype=dtype, num_pages=20, dummy_weight=True, **options)
    found = llm.engine.ledger()
    predicted = predict_ledger(model_sizes(ModelSpec.from_folder(tmp_path)), setup_of(llm.config))
    for line in ("dense weights", "embedding on the host"):
        assert found.line(line) == predicted.line(line)
    assert (found.line("embedding on the host") > 0) == ("embedding_on_host" in options)
    plain = LLM(str(tmp_path), device="cpu", dtype=dtype, num_pages=20, dummy_weight=True)
    assert found.line("dense weights") < plain.engine.ledger().line("dense weights")


def test_dummy_weights_are_quantized(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    llm = LLM(
        str(tmp_path),
        device="cpu",
        num_pages=20,
        dummy_weight=True,
        quantize_dense="fp8",
        embedding_on_host=True,
    )
    weight = llm.engine.decoder.fp8_weights()["layers.0.attention.q.weight"].dequantize()
    assert 0.015 < weight.std() < 0.025
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert len(llm.generate(make_prompts([4]), params)[0].token_ids) == 2


def test_the_engine_takes_the_checkpoints_groups(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", **SIZES)
    quantize_folder(tmp_path, encode_fp8, FP8_BLOCKS)
    llm = LLM(str(tmp_path), device="cpu", num_pages=20, quantize_dense="fp8")
    assert llm.config.model.quantize_dense_group_size == 128
    (decision,) = [d for d in llm.decisions if d.flag == "--quantize-dense-group-size"]
    assert (decision.value, decision.reason) == ("128", "the checkpoint's own blocks, kept as they are")


# --- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "on_host"), [("qwen3_moe", False), ("qwen3_moe_tied", True), ("llama_bias", True)]
)
def test_ranks_share_groups_of_columns(tmp_path: Path, name: str, on_host: bool) -> None:
    """Groups that no rank cuts mean the same weights on one rank and on two; the vocabulary is odd."""
    make_model(tmp_path, name, vocab_size=271)
    storage = fp8(16, on_host)
    expected = logits_of(load(tmp_path, storage))
    for logits in on_ranks(2, lambda group: logits_of(load(tmp_path, storage, group=group))):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_ranks_cut_the_blocks_of_a_file_where_they_end(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", **{**SIZES, "num_key_value_heads": 4})
    quantize_folder(tmp_path, encode_fp8, FP8_BLOCKS, choose=lambda name: "self_attn" in name)
    expected = logits_of(load(tmp_path, fp8(128)))
    for logits in on_ranks(2, lambda group: logits_of(load(tmp_path, fp8(128), group=group))):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(
        ValueError, match=r"o_proj.weight in .*--tp=4: a rank's part of its columns ends inside of 128"
    ):
        on_ranks(4, lambda group: load(tmp_path, fp8(128), group=group))
