"""Kernels of 4-bit weights whose warps have roles compile for Hopper as they are meant: weights stay in the registers they were
loaded into, and products overlap."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from minisgl.moe.base import ExpertShape, Problem  # noqa: E402
from minisgl.moe.kernels.precompile import CompileTask, compile_choice  # noqa: E402
from minisgl.moe.select import Choice, has_gluon, roles_tiles  # noqa: E402
from tests.unit.moe.test_place_compile import spilled_bytes  # noqa: E402
from tests.unit.moe.test_words_compile import compiled  # noqa: E402, F401

pytestmark = pytest.mark.skipif(
    not has_gluon(), reason="needs the Triton for whose Gluon the kernel is written"
)


def remarks(kernel: Any, tmp_path) -> str:
    """What ptxas says about a kernel."""
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.asm["ptx"])
    ptxas = triton.knobs.nvidia.ptxas.path
    command = [ptxas, "-v", "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "again.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize(
    ("format_name", "group", "symmetric"), [("int4", 128, True), ("int4", 128, False), ("mxfp4", 32, True)]
)
@pytest.mark.parametrize("block_m", [16, 32, 128])
def test_weights_go_from_loads_into_products_that_overlap(
    block_m,
    format_name,
    group,
    symmetric,
    compiled,  # noqa: F811
    tmp_path,
):
    wanted = Problem(4096, 8, 128, ExpertShape(2048, 768), format_name, torch.bfloat16, "silu", group)
    compile_choice(CompileTask(wanted, Choice("grouped", block_m, *roles_tiles(wanted, block_m)), symmetric))
    assert set(compiled) == {"gate_up_words_kernel", "down_words_kernel"}
    for kernel in compiled.values():
        said = remarks(kernel, tmp_path)
        assert "Used" in said
        assert "serialized" not in said  # it would wait after each product
        assert spilled_bytes(kernel, tmp_path) <= 64
        assert kernel.metadata.shared <= 232_448
        # One lane's number goes to its warp, and results are transposed through shared memory: nothing of the weights.
        assert kernel.asm["ptx"].count("shfl.") <= 1
        assert kernel.asm["ptx"].count("wgmma.mma_async") >= 16
