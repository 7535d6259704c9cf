"""Dense weights as fp8 (--quantize-dense fp8): e4m3 codes, and float32 scales of rows or of groups of columns in them.

    value[n, k] = code[n, k] * scale[n, k // group]

One scale a row is how plain weights are quantized: the largest magnitude of a row becomes 448. Groups are how a published fp8
file has it (blocks of 128 x 128, whose scale each of its rows repeats), so that its codes and scales stay as they are.

`dequantized_linear` says what a product is. On a GPU that computes in fp8 (compute capability 8.9 and later) two ways are
faster: few rows are multiplied by a kernel that reads the codes and is exact but for the order of its sum; many by
torch._scaled_mm, which quantizes every row of x too, and so adds an error of its own, about that of the weights.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F

from minisgl.layers import launch
from minisgl.moe.formats.base import scale_for
from minisgl.moe.formats.fp8 import E4M3_MAX, Fp8Format

# Any: Triton's launch syntax is beyond type checkers.
kernels: Any = importlib.import_module("minisgl.layers.dense_kernels") if launch.HAS_TRITON else None

CODES = torch.float8_e4m3fn
CHUNK = (
    2**22
)  # weights that are dequantized or quantized at a time: 40 MB of temporaries however large the matrix
FP8_CAPABILITY = (8, 9)
FEW_ROWS = 16  # columns of the tensor cores' tile that the kernel pads to
SCALED_MM_MULTIPLE = 16  # of both sizes of a weight, which torch._scaled_mm asks for

_FORMAT = Fp8Format()
_scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
Way = Literal["kernel", "scaled_mm", "dequantize"]


@dataclass(frozen=True)
class Fp8Storage:
    """How a layer's weights are stored. group: columns that share a scale, 0 for all of a row."""

    group: int = 0

    def num_groups(self, in_dim: int) -> int:
        return -(-in_dim // self.group) if self.group else 1


@dataclass(frozen=True)
class Fp8Weight:
    """codes_NK e4m3 [N, K], scale_NG float32 [N, G]. group: columns that share a scale, K where a row has one."""

    codes_NK: torch.Tensor
    scale_NG: torch.Tensor
    group: int

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Views of rows start .. stop - 1."""
        return Fp8Weight(self.codes_NK[start:stop], self.scale_NG[start:stop], self.group)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K]: the product in float32, rounded to dtype."""
        values_NK = self.codes_NK.float()
        if self.scale_NG.shape[1] == 1:
            return (values_NK * self.scale_NG).to(dtype)
        scale_NK = self.scale_NG.repeat_interleave(self.group, dim=1)[:, : values_NK.shape[1]]
        return (values_NK * scale_NK).to(dtype)

    def quantize(self, weight_NK: torch.Tensor) -> None:
        """Fill the codes and scales with weight_NK, of any float type on any device. ValueError for NaN and infinities."""
        for start, stop in row_chunks(weight_NK):
            chunk_NK = weight_NK[start:stop].to(self.codes_NK.device).float()
            num_cols, num_groups = chunk_NK.shape[1], self.scale_NG.shape[1]
            padded_NK = F.pad(chunk_NK, (0, num_groups * self.group - num_cols))
            parts = _FORMAT.quantize("weight", padded_NK.unflatten(1, (num_groups, self.group)))
            self.codes_NK[start:stop] = parts["weight"].flatten(1)[:, :num_cols]
            self.scale_NG[start:stop] = parts["weight_scale"]


def row_chunks(weight_NK: torch.Tensor) -> list[tuple[int, int]]:
    """(first row, last + 1) of pieces of at most CHUNK weights, or of one row."""
    num_rows, step = len(weight_NK), max(1, CHUNK // max(weight_NK.shape[1], 1))
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


@lru_cache
def computes_fp8(device: torch.device) -> bool:
    """Whether the device multiplies fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def choose_way(num_rows: int, weight: Fp8Weight, dtype: torch.dtype, has_fp8: bool) -> Way:
    """How x of num_rows rows in `dtype` meets a weight. has_fp8: whether the device computes in fp8."""
    if not has_fp8:
        return "dequantize"
    few = 1 <= num_rows <= FEW_ROWS and dtype in (torch.bfloat16, torch.float16)
    if few and kernel_block(weight) is not None:
        return "kernel"
    sizes_fit = not any(size % SCALED_MM_MULTIPLE for size in weight.codes_NK.shape)
    by_row = weight.scale_NG.shape[1] == 1
    return "scaled_mm" if by_row and sizes_fit and num_rows and dtype == torch.bfloat16 else "dequantize"


def fp8_linear(x: torch.Tensor, weight: Fp8Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] @ weight.T + bias -> [..., N] in x's dtype, in the way that suits x and its device."""
    rows_MK = x.reshape(-1, x.shape[-1])
    way = choose_way(len(rows_MK), weight, x.dtype, computes_fp8(x.device))
    product = {"kernel": few_rows_linear, "scaled_mm": scaled_linear, "dequantize": dequantized_linear}[way]
    return product(rows_MK, weight, bias_N).view(*x.shape[:-1], -1)


def dequantized_linear(x_MK: torch.Tensor, weight: Fp8Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The definition: x @ W.T + bias with W dequantized to x's dtype, some rows of it at a time."""
    y_MN = torch.empty((len(x_MK), len(weight.codes_NK)), dtype=x_MK.dtype, device=x_MK.device)
    for start, stop in row_chunks(weight.codes_NK):
        chunk_NK = weight.rows(start, stop).dequantize(x_MK.dtype)
        y_MN[:, start:stop] = F.linear(x_MK, chunk_NK, None if bias_N is None else bias_N[start:stop])
    return y_MN


def scaled_linear(x_MK: torch.Tensor, weight: Fp8Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    """fp8 by fp8: every row of x, bfloat16, gets a scale of its own."""
    assert x_MK.dtype == torch.bfloat16 and weight.scale_NG.shape[1] == 1
    quantize = quantize_rows if launch.use_kernels(x_MK) else plainly_quantize_rows
    codes_MK, scale_M1 = quantize(x_MK)
    scale_1N, out_dtype = weight.scale_NG.view(1, -1), x_MK.dtype
    y_MN = _scaled_mm(codes_MK, weight.codes_NK.t(), scale_a=scale_M1, scale_b=scale_1N, out_dtype=out_dtype)
    return y_MN if bias_N is None else y_MN + bias_N


def plainly_quantize_rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [M, K], float32 scales [M, 1]): what `quantize_rows` gives, by torch. A row of zeros has scale 1."""
    x_MK = x_MK.float()
    scale_M1 = scale_for(x_MK.abs().amax(dim=1, keepdim=True), E4M3_MAX)
    return (x_MK / scale_M1).clamp(-E4M3_MAX, E4M3_MAX).to(CODES), scale_M1


def quantize_rows(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in one launch without float32 copies."""
    num_rows, in_dim = x_MK.shape
    assert x_MK.stride(1) == 1
    codes_MK = torch.empty((num_rows, in_dim), dtype=CODES, device=x_MK.device)
    scale_M1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_MK.device)
    block = 1 << (in_dim - 1).bit_length()
    kernels.quantize_rows_kernel[(num_rows,)](
        x_MK,
        codes_MK,
        scale_M1,
        x_MK.stride(0),
        K=in_dim,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        **launch.dependent_options(x_MK.device),
    )
    return codes_MK, scale_M1


def few_rows_linear(x_MK: torch.Tensor, weight: Fp8Weight, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Up to FEW_ROWS rows by one launch, which reads the codes once; the sum is in float32."""
    (num_rows, in_dim), num_out = x_MK.shape, len(weight.codes_NK)
    assert 0 < num_rows <= FEW_ROWS and x_MK.stride(1) == 1
    assert weight.codes_NK.is_contiguous() and weight.scale_NG.is_contiguous()
    y_MN = torch.empty((num_rows, num_out), dtype=x_MK.dtype, device=x_MK.device)
    block_n = 64 if num_out >= 65_536 else 32
    block_k = kernel_block(weight)
    assert block_k is not None
    kernels.fp8_linear_kernel[(-(-num_out // block_n),)](
        x_MK,
        weight.codes_NK,
        weight.scale_NG,
        weight.scale_NG if bias_N is None else bias_N,
        y_MN,
        num_rows,
        num_out,
        x_MK.stride(0),
        K=in_dim,
        GROUP=weight.group,
        NUM_GROUPS=weight.scale_NG.shape[1],
        HAS_BIAS=bias_N is not None,
        BLOCK_M=FEW_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4,
        **launch.dependent_options(x_MK.device),
    )
    return y_MN


def kernel_block(weight: Fp8Weight) -> int | None:
    """Columns the kernel takes at a time: as many as fit evenly into a group; None where fewer than 16 do."""
    if weight.scale_NG.shape[1] == 1:
        return 128
    return next((block for block in (128, 64, 32, 16) if weight.group % block == 0), None)
