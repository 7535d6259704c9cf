"""fp8 dense weights and an embedding in host memory on a GPU: every way gives what the definition says, also in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.layers.embedding import Embedding
from minisgl.layers.fp8 import (
    Fp8Storage,
    Fp8Weight,
    computes_fp8,
    dequantized_linear,
    few_rows_linear,
    fp8_linear,
    plainly_quantize_rows,
    quantize_rows,
    scaled_linear,
)
from tests.checkpoint_writers import encode_fp8, quantize_folder
from tests.e2e.model_factory import make_model, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = [(5120, 2048), (2048, 4096), (151_936, 2048), (272, 128)]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def fp8_arithmetic() -> None:
    if not computes_fp8(CUDA):
        pytest.skip("this GPU does not compute in fp8")


def filled(num_out: int, num_in: int, group: int = 0) -> Fp8Weight:
    scale = torch.full((num_out, Fp8Storage(group).num_groups(num_in)), float("nan"), device=CUDA)
    codes = torch.zeros(num_out, num_in, dtype=torch.float8_e4m3fn, device=CUDA)
    weight = Fp8Weight(codes, scale, group or num_in)
    weight.quantize(torch.randn(num_out, num_in, device=CUDA) * 0.05)
    return weight


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.usefixtures("fp8_arithmetic")
def test_few_rows(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    weight, bias = filled(*shape, group), torch.randn(shape[0], device=CUDA).to(dtype)
    for rows in (1, 7, 16):
        x = torch.randn(rows, shape[1], device=CUDA).to(dtype)
        exact = dequantized_linear(x.float(), weight, bias.float())
        assert relative(few_rows_linear(x, weight, bias), exact) < 4e-3
        assert torch.equal(few_rows_linear(x, weight, bias)[:1], few_rows_linear(x[:1], weight, bias))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [17, 300, 1024])
@pytest.mark.usefixtures("fp8_arithmetic")
def test_many_rows(shape: tuple[int, int], rows: int) -> None:
    weight, bias = filled(*shape), torch.randn(shape[0], device=CUDA).to(BF16)
    x = torch.randn(rows, shape[1], device=CUDA).to(BF16) * torch.logspace(-3, 3, rows, device=CUDA)[
        :, None
    ].to(BF16)
    exact = dequantized_linear(x, weight, None)
    by_row = (scaled_linear(x, weight, None).double() - exact.double()).norm(dim=1) / exact.double().norm(
        dim=1
    )
    assert float(by_row.max()) < 0.05, "each row has a scale of its own"
    with_bias = scaled_linear(x, weight, bias)
    torch.testing.assert_close(with_bias, scaled_linear(x, weight, None) + bias)


@pytest.mark.parametrize("width", [64, 100, 2048, 4096])
@pytest.mark.usefixtures("fp8_arithmetic")
def test_rows_are_quantized_as_torch_does(width: int) -> None:
    x = torch.randn(33, 2 * width, device=CUDA).to(BF16)[:, :width]
    x[5] = 0
    codes, scale = quantize_rows(x)
    expected, expected_scale = plainly_quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert (
        relative(codes.float() * scale, expected.float() * expected_scale) < 1e-2
    )  # a division may round across a step
    assert not codes[5].float().any()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("group", [0, 128])
def test_products_in_a_graph(rows: int, group: int) -> None:
    weight, x = filled(512, 256, group), torch.randn(rows, 256, device=CUDA).to(BF16)
    fp8_linear(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8_linear(x, weight, None)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, fp8_linear(x, weight, None))


# --- the embedding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 2048, 5120])
@pytest.mark.parametrize("ids_type", [torch.int64, torch.int32])
def test_rows_come_from_pinned_memory(dim: int, ids_type: torch.dtype) -> None:
    layer = Embedding(1000, dim, device=CUDA, dtype=BF16, on_host=True)
    assert layer.weight.device.type == "cpu"
    layer.weight.copy_(torch.randn(1000, dim))
    ids = torch.tensor([3, 0, 999, 3], device=CUDA, dtype=ids_type)
    assert torch.equal(layer(ids), layer.weight.to(CUDA)[ids.long()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(ids)
    ids.copy_(torch.tensor([7, 8, 9, 10]))
    graph.replay()
    assert torch.equal(y, layer.weight.to(CUDA)[7:11])


# --- whole -----------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def tokens(folder: Path, **options) -> list[list[int]]:
    llm = LLM(str(folder), **{"device": "cuda", "dtype": "bfloat16", "num_pages": 300, **options})
    out = [output.token_ids for output in llm.generate(make_prompts([3, 40, 16, 70]), GREEDY)]
    llm.close()
    return out


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_bias"])
def test_an_embedding_on_the_host_changes_no_token(tmp_path: Path, name: str) -> None:
    make_model(tmp_path, name)
    assert tokens(tmp_path, embedding_on_host=True) == tokens(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_tied", "fp8_file"])
def test_fp8_engine(tmp_path: Path, name: str) -> None:
    """Graphs change no token; the first logits are near those of the definition in float32 on a CPU."""
    if name == "fp8_file":
        make_model(tmp_path, "qwen3_moe", hidden_size=128, head_dim=64)
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        quantize_folder(tmp_path, encode_fp8, config, choose=lambda name: "self_attn" in name)
    else:
        make_model(tmp_path, name)
    both = {"quantize_dense": "fp8", "embedding_on_host": True}
    assert tokens(tmp_path, **both) == tokens(tmp_path, cuda_graph_max_bs=0, **both)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    found = []
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        llm = LLM(str(tmp_path), device=device, dtype=dtype, num_pages=50, **both)
        (output,) = llm.generate(make_prompts([9]), params)
        assert output.logprobs
        found.append(dict(output.logprobs[0].top))
        llm.close()
    common = found[0].keys() & found[1].keys()
    assert len(common) > 10 and sum(abs(found[0][t] - found[1][t]) for t in common) / len(common) < 0.5
