"""The kernels of layers and sampler compile for GPUs that aren't here, with dependent launch, and spill nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from minisgl.attention import AttentionProblem, LayerCache
from minisgl.core import SamplingParams
from minisgl.engine import sampler
from minisgl.engine.step import SampleSpec
from minisgl.layers import launch
from minisgl.layers.embedding import gather_rows
from minisgl.layers.fp8 import Fp8Storage, Fp8Weight, few_rows_linear, quantize_rows
from tests.unit.attention.test_attention_compile import LIMITS, NamedTarget, spilled_bytes

DTYPE = torch.bfloat16


@pytest.fixture(params=sorted(LIMITS), ids=lambda capability: f"sm_{capability}")
def compiled(request, monkeypatch) -> tuple[int, list[Any]]:
    """Shared memory of the device, and the list that collects what would have been launched."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(function, *args, grid, warmup, **options):
        found.append(run(function, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(triton.runtime.driver, "_active", NamedTarget(request.param))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch, "has_dependent_launch", lambda device: True)
    return LIMITS[request.param].shared_bytes, found


def check(compiled: tuple[int, list[Any]], folder, names: list[str]) -> None:
    shared_bytes, found = compiled
    assert [kernel.metadata.name for kernel in found] == names
    for kernel in found:
        assert kernel.metadata.shared <= shared_bytes, kernel.metadata.name
        assert spilled_bytes(kernel, folder) == 0, kernel.metadata.name


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=DTYPE)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 100], ids=["decode", "prefill"])
def test_layers(compiled, tmp_path, tokens):
    problem = AttentionProblem(32, 4, 128, page_size=16, dtype=DTYPE, scale=0.1)
    norms = launch.HeadNorms(rows(128), rows(128), 1e-6)
    cache = LayerCache(rows(2, 16, 4, 128), rows(2, 16, 4, 128))
    slots_T = torch.zeros(tokens, dtype=torch.int64)
    launch.add_rms_norm(rows(tokens, 5120), rows(tokens, 5120), rows(5120), 1e-6)
    rotation = (rows(tokens, 1, 64), rows(tokens, 1, 64))
    launch.rotate_and_store(rows(tokens, 40 * 128), problem, norms, rotation, cache, slots_T)
    launch.gated_activation(rows(tokens, 2 * 17_408), "silu")
    launch.gated_activation(rows(tokens, 2 * 17_408), "gelu")
    names = ["add_rms_norm_kernel", "rotate_and_store_kernel", *["gated_activation_kernel"] * 2]
    check(compiled, tmp_path, names)


@pytest.mark.slow
def test_products_of_few_rows(compiled, tmp_path):
    for rows_m, out_dim, in_dim in (
        (1, 5120, 2048),
        (1, 2048, 4096),
        (1, 5120, 17_408),
        (8, 128, 2048),
        (8, 70_000, 2048),
    ):
        tile = launch.choose_tile(rows_m, out_dim, in_dim, DTYPE)
        assert tile is not None
        launch.few_rows_linear(rows(rows_m, in_dim), rows(out_dim, in_dim), None, tile)
    check(compiled, tmp_path, ["vector_linear_kernel"] * 3 + ["skinny_linear_kernel"] * 2)


@pytest.mark.slow
def test_sampler(compiled, tmp_path):
    spec = SampleSpec(SamplingParams(temperature=0.7), 0, 1, [1], 1, frozenset())
    sampler.race(torch.zeros(2, 151_936), [spec, spec])
    sampler.race(torch.zeros(2, 151_936), [])
    check(compiled, tmp_path, ["scan_kernel", "choose_kernel"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 128], ids=["rows", "groups"])
def test_fp8_products_and_rows_on_the_host(compiled, tmp_path, group):
    storage = Fp8Storage(group)
    for out_dim, in_dim in ((5120, 2048), (2048, 4096), (151_936, 2048)):
        codes = torch.zeros(out_dim, in_dim, dtype=torch.float8_e4m3fn)
        weight = Fp8Weight(codes, torch.zeros(out_dim, storage.num_groups(in_dim)), group or in_dim)
        few_rows_linear(rows(4, in_dim), weight, None)
    quantize_rows(rows(40, 4096))
    gather_rows(rows(16, 2048), torch.zeros(3, dtype=torch.int64))
    check(compiled, tmp_path, ["fp8_linear_kernel"] * 3 + ["quantize_rows_kernel", "gather_rows_kernel"])
