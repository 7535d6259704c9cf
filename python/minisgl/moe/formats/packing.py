"""The order of four-bit codes inside bytes: one pair of functions that formats, kernels and importers share.

Two neighbours along K share a byte, the even one in the low nibble.
"""

from __future__ import annotations

import torch


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., N, K] -> uint8 [..., N, K / 2]."""
    return codes_NK[..., 0::2] | (codes_NK[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., N, K / 2] -> uint8 codes 0..15 [..., N, K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
