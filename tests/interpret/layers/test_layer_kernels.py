"""The layers' Triton kernels in the interpreter, against the layers' own torch code; outputs start as NaN or poison."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton

from minisgl.attention import AttentionBatch, AttentionProblem, LayerCache
from minisgl.attention.torch_sdpa import TorchAttention
from minisgl.layers import launch
from minisgl.layers.attention import Attention
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeSpec, Rotary
from minisgl.moe.base import activate

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = sorted(TOLERANCE, key=str)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
    empty = torch.empty

    def poisoned(*args, **options):
        out = empty(*args, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(launch.torch, "empty", poisoned)
    monkeypatch.setattr(launch.torch, "empty_like", lambda x: poisoned(x.shape, dtype=x.dtype))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def random_norm(dim: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(dim, 1e-5, device=CPU, dtype=dtype)
    norm.weight.copy_(torch.randn(dim))
    return norm


class TestAddRmsNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(3, 64), (2, 100), (1, 1), (2, 3, 16), (0, 64)])
    def test_equals_torch(self, dtype, shape):
        norm = random_norm(shape[-1], dtype)
        x, residual = (torch.randn(2, *shape) * 3).to(dtype)
        for left in (None, residual):
            y, total = launch.add_rms_norm(x, left, norm.weight, norm.eps)
            expected_y, expected_total = norm.add(x, left)
            assert torch.equal(total, expected_total)
            close(y, expected_y)

    def test_strided_rows_and_large_values(self):
        norm = random_norm(32, torch.float16)
        x = (torch.randn(4, 96) * 1e4).half()[:, 32:64]
        y, _ = launch.add_rms_norm(x, None, norm.weight, norm.eps)
        close(y, norm(x))


def attention_layer(dtype: torch.dtype, qk_norm: bool, heads: int, kv_heads: int, dim: int) -> Attention:
    problem = AttentionProblem(heads, kv_heads, dim, page_size=4, dtype=dtype, scale=1.0)
    eps = 1e-6 if qk_norm else None
    layer = Attention(8, problem, TorchAttention(), qk_norm_eps=eps, device=CPU)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return layer


def poisoned_cache(problem: AttentionProblem, pages: int) -> LayerCache:
    shape = (pages, problem.page_size, problem.num_kv_heads, problem.head_dim)
    return LayerCache(*(torch.full(shape, float("nan"), dtype=problem.dtype) for _ in range(2)))


class TestRotateAndStore:
    def check(self, layer: Attention, rope: RopeSpec, tokens: int) -> None:
        problem = layer.problem
        width = (problem.num_heads + 2 * problem.num_kv_heads) * problem.head_dim
        qkv_TX = torch.randn(tokens, width + 8).to(problem.dtype)[:, :width]  # rows need not be adjacent
        positions_T = torch.randint(0, 5000, (tokens,))
        rotation = Rotary(rope, CPU)(positions_T, problem.dtype)
        pages = 3 + tokens
        slots_T = torch.randperm(pages * problem.page_size)[:tokens]
        ours, theirs = poisoned_cache(problem, pages), poisoned_cache(problem, pages)
        q_THC = launch.rotate_and_store(qkv_TX, problem, layer.head_norms(), rotation, ours, slots_T)
        lens = torch.ones(tokens, dtype=torch.int32)
        batch = AttentionBatch(torch.arange(tokens + 1), lens, lens[:, None], slots_T, 1, 1)
        close(q_THC, layer.rotate_and_store(qkv_TX, rotation, theirs, batch))
        for pool, expected in ((ours.k_PSGC, theirs.k_PSGC), (ours.v_PSGC, theirs.v_PSGC)):
            assert torch.equal(pool.isnan(), expected.isnan())
            close(pool.nan_to_num(), expected.nan_to_num())
        assert torch.equal(ours.v_PSGC.nan_to_num(), theirs.v_PSGC.nan_to_num())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("qk_norm", [False, True])
    def test_equals_torch(self, dtype, qk_norm):
        self.check(attention_layer(dtype, qk_norm, 4, 2, 16), RopeSpec(16), tokens=3)

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "dim", "rotary_dim"),
        [(3, 1, 24, 24), (2, 2, 20, 12), (5, 1, 8, 4), (1, 1, 80, 80)],
    )
    def test_shapes(self, heads, kv_heads, dim, rotary_dim):
        """Heads and head_dims that are no powers of two, and heads that rotate in part."""
        self.check(attention_layer(torch.float32, True, heads, kv_heads, dim), RopeSpec(rotary_dim), tokens=2)

    def test_every_kind_of_rotation(self):
        layer = attention_layer(torch.float32, False, 2, 1, 16)
        for kind in ("linear", "dynamic", "llama3", "yarn"):
            rope = RopeSpec(16, kind=kind, factor=4.0, original_max_position=64, attention_factor=1.2)
            self.check(layer, rope, tokens=2)

    def test_many_tokens_and_none(self):
        layer = attention_layer(torch.float32, True, 2, 1, 8)
        self.check(layer, RopeSpec(8), tokens=launch.FEW_TOKENS + 1)
        self.check(layer, RopeSpec(8), tokens=0)


@pytest.mark.parametrize("activation", launch.FUSED_ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(activation, dtype):
    for shape in ((3, 24), (2, 700), (70, 6), (0, 4)):
        gate_up_TF = (torch.randn(shape[0], shape[1] + 4) * 4).to(dtype)[:, : shape[1]]
        close(launch.gated_activation(gate_up_TF, activation), activate(gate_up_TF, activation))


VECTOR = launch.LinearTile(tensor_cores=False, block_n=4, block_k=32, num_warps=1)
SKINNY = launch.LinearTile(tensor_cores=True, block_n=16, block_k=32, num_warps=1)


class TestFewRows:
    @pytest.mark.parametrize(("tile", "rows"), [(VECTOR, 1), (SKINNY, 1), (SKINNY, 3), (SKINNY, 16)])
    @pytest.mark.parametrize(("out_dim", "in_dim"), [(20, 64), (33, 40), (3, 100)])
    def test_equals_torch(self, tile, rows, out_dim, in_dim):
        x = torch.randn(rows, in_dim + 3)[:, :in_dim]
        weight, bias = torch.randn(out_dim, in_dim), torch.randn(out_dim)
        for b in (None, bias):
            y = launch.few_rows_linear(x, weight, b, tile)
            torch.testing.assert_close(y, F.linear(x, weight, b), rtol=1e-5, atol=2e-5)

    @pytest.mark.parametrize("tile", [VECTOR, SKINNY], ids=["vector", "skinny"])
    def test_half_precision_rounds_once(self, tile):
        x, weight = torch.randn(1, 64).half(), torch.randn(16, 64).half()
        expected = (x.double() @ weight.double().T).half()
        y = launch.few_rows_linear(x, weight, None, tile)
        torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)

    def test_a_row_does_not_depend_on_the_others(self):
        x, weight = torch.randn(8, 64), torch.randn(24, 64)
        whole = launch.few_rows_linear(x, weight, None, SKINNY)
        for rows in (1, 2, 5):
            assert torch.equal(launch.few_rows_linear(x[:rows], weight, None, SKINNY), whole[:rows])


def test_a_tile_is_chosen_only_where_it_wins():
    def kind(rows: int, out_dim: int, in_dim: int = 2048, dtype: torch.dtype = torch.bfloat16) -> str:
        tile = launch.choose_tile(rows, out_dim, in_dim, dtype)
        return "cublas" if tile is None else "skinny" if tile.tensor_cores else "vector"

    assert {kind(1, n) for n in (128, 2048, 5120, 151_936)} == {"vector"}
    assert [kind(8, n) for n in (128, 2048, 5120, 151_936)] == ["skinny", "cublas", "cublas", "skinny"]
    assert kind(0, 128) == kind(9, 128) == kind(1, 128, dtype=torch.float32) == "cublas"
    for out_dim in (128, 151_936):
        assert len({launch.choose_tile(rows, out_dim, 2048, torch.bfloat16) for rows in range(2, 9)}) == 1
