"""Two 4-bit codes a byte, in the order that every 4-bit kernel reads.

Sixteen consecutive bytes hold thirty-two consecutive values along K:

    byte j of the run      low nibble = value j      high nibble = value j + 16        (j = 0 .. 15)

Why this order. One 16-byte vector load gives a thread 32 neighbouring weights of one row, which is one whole
quantization group of the smallest kind (32) and therefore has one scale. Masking the low or the high nibbles
of a 32-bit word yields codes that are neighbours along K, so they unpack in pairs straight into two packed
16-bit numbers, and the activations that meet them are two contiguous runs of 16. K has to be a multiple of 32
and nothing more, so tails (2880, 1408, 704) need no special case. The usual order (value 2j in the low
nibble, 2j + 1 in the high one) was rejected: there the two halves of a byte meet neighbouring activations,
and unpacking has to interleave registers. Longer runs were rejected because they would tie the bytes to one
tile width.
"""

from __future__ import annotations

import torch

RUN = 32  # values whose codes share 16 bytes


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [..., N, K] (each 0..15) into uint8 [..., N, K / 2].

    Raises ValueError when K is no multiple of 32 or the dtype is not uint8.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % RUN:
        raise ValueError(
            f"4-bit codes must be uint8 with a last dimension divisible by {RUN}, "
            f"got {codes.dtype} of shape {tuple(codes.shape)}"
        )
    runs = codes.unflatten(-1, (-1, 2, RUN // 2))
    return (runs[..., 0, :] | (runs[..., 1, :] << 4)).flatten(-2)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes uint8 [..., N, K] of packed uint8 [..., N, K / 2]; inverse of `pack_nibbles`."""
    if packed.dtype != torch.uint8 or packed.shape[-1] % (RUN // 2):
        raise ValueError(
            f"packed codes must be uint8 with a last dimension divisible by {RUN // 2}, "
            f"got {packed.dtype} of shape {tuple(packed.shape)}"
        )
    runs = packed.unflatten(-1, (-1, RUN // 2))
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)
