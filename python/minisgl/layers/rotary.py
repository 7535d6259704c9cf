"""Rotary position embedding with every frequency scaling the served families use.

Cosines and sines are computed from the positions once a step and shared by all layers. Rejected: a table of
all positions. It costs 67 MB at 131,072 positions and head_dim 128, more than the KV cache of 600 tokens of
Qwen3-30B-A3B, to save about three tiny launches in a captured step, and it ends where the table ends.

Shape letters: T tokens, H heads, C head_dim, J rotated pairs (rotary_dim / 2).

Sources: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071; the numbers' names are those of Hugging Face's
config.json.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True)
class RopeSpec:
    """How a position becomes angles.

    rotary_dim: leading elements of a head that rotate (head_dim unless the model rotates a part only).
    theta: base of the geometric series of frequencies.
    kind: how the series is stretched for long contexts; factor: by how much.
    max_position: positions the dynamic kind serves unscaled. original_max_position: context before
    stretching (llama3, yarn).
    low_freq_factor, high_freq_factor: band that llama3 blends. beta_fast, beta_slow, truncate: band that
    yarn blends.
    attention_factor: multiplies cosines and sines (yarn's temperature; 1 elsewhere).
    """

    rotary_dim: int
    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    max_position: int = 2048
    original_max_position: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """Angle per position of each pair, float32 [J] on the CPU. For the dynamic kind: those of unscaled
    positions.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device="cpu") / spec.rotary_dim
    periods = spec.theta**exponents
    if spec.kind == "yarn":
        return _yarn(spec, periods)
    inv_freq = 1.0 / periods
    if spec.kind == "linear":
        return inv_freq / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, inv_freq)
    return inv_freq


def _llama3(spec: RopeSpec, inv_freq: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    wavelength = 2 * math.pi / inv_freq
    longest_kept = spec.original_max_position / spec.high_freq_factor
    shortest_divided = spec.original_max_position / spec.low_freq_factor
    band = spec.high_freq_factor - spec.low_freq_factor
    keep = (spec.original_max_position / wavelength - spec.low_freq_factor) / band
    blended = (1 - keep) * inv_freq / spec.factor + keep * inv_freq
    scaled = torch.where(wavelength > shortest_divided, inv_freq / spec.factor, blended)
    return torch.where(wavelength < longest_kept, inv_freq, scaled)


def _yarn(spec: RopeSpec, periods: torch.Tensor) -> torch.Tensor:
    """Keep pairs that turn often within the original context, divide those that hardly turn, ramp between."""

    def pair_turning(times: float) -> float:
        turns = spec.original_max_position / (times * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    pairs = torch.arange(spec.rotary_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (spec.factor * periods) * (1 - keep) + 1.0 / periods * keep


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Temperature that goes with a yarn factor, or the ratio of two of them where the config names both."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


class Rotary(nn.Module):
    """Positions to cosines and sines; no parameters.

    The dynamic kind raises theta with the sequence length. Keys are cached rotated and shared between
    requests, so a token's rotation may depend on nothing but its own position: position p uses the theta of
    a sequence of p + 1 tokens. Hugging Face does the same while decoding; it differs only for a prompt that
    is itself longer than max_position, all of which it rotates with the theta of the whole prompt (which
    neither chunked prefill nor a prefix cache can reproduce).
    """

    inv_freq_J: torch.Tensor

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("inv_freq_J", inverse_frequencies(spec).to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [T, 1, J] in `dtype`, computed in float32. Capturable; no host sync."""
        inv_freq = self.inv_freq_J
        if self.spec.kind == "dynamic":
            inv_freq = self._dynamic_inv_freq(positions_T)
        # An integer times a float32 is computed in float32, without a launch for the conversion.
        angles_T1J = (positions_T[:, None] * inv_freq).unsqueeze(1)
        cos_T1J = torch.empty(angles_T1J.shape, dtype=dtype, device=angles_T1J.device)
        sin_T1J = torch.empty_like(cos_T1J)
        scale = self.spec.attention_factor
        if scale == 1.0:  # rounded to dtype on the way out: three launches in all
            torch.cos(angles_T1J, out=cos_T1J)
            torch.sin(angles_T1J, out=sin_T1J)
        else:
            torch.mul(angles_T1J.cos(), scale, out=cos_T1J)
            torch.mul(angles_T1J.sin(), scale, out=sin_T1J)
        return cos_T1J, sin_T1J

    def _dynamic_inv_freq(self, positions_T: torch.Tensor) -> torch.Tensor:
        """[T, J]: frequencies of a sequence that ends at each position."""
        spec, dim = self.spec, self.spec.rotary_dim
        length_T = (positions_T + 1).clamp(min=spec.max_position)
        stretch_T = (spec.factor * length_T / spec.max_position) - (spec.factor - 1)
        theta_T = spec.theta * stretch_T ** (dim / (dim - 2))
        exponents_J = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_T.device) / dim
        return 1.0 / (theta_T[:, None] ** exponents_J)


def apply_rotary(x_THC: torch.Tensor, cos_T1J: torch.Tensor, sin_T1J: torch.Tensor) -> torch.Tensor:
    """Rotate pair (j, j + J) of every head by its angle; elements beyond 2J pass. Returns a new tensor, x's
    dtype.

    The products are rounded in x's dtype, as Hugging Face does, so that bf16 results agree bit for bit.
    """
    pairs = cos_T1J.shape[-1]
    first, second, rest = x_THC[..., :pairs], x_THC[..., pairs : 2 * pairs], x_THC[..., 2 * pairs :]
    return torch.cat(
        (first * cos_T1J - second * sin_T1J, second * cos_T1J + first * sin_T1J, rest),
        dim=-1,
    )
