"""Two 4-bit codes a byte, in the order that kernels read. (mxfp4 has the same words, with their bits in another order.)

Sixteen consecutive bytes hold thirty-two consecutive values along K, as eight 16-bit words:

    word j of the run (j = 0 .. 7)      nibble i of the word, lowest first, = value 8 i + j

Why this order. One 16-byte vector load gives a thread 32 neighbouring weights of one row, which is one whole
quantization group of the smallest kind (32) and therefore has one scale. A tile of words is a tile of 16-bit
numbers, so it travels from shared memory to the tensor cores' registers the way a tile of bf16 does; and two
neighbouring words in a 32-bit register unpack, nibble by nibble with one mask, straight into pairs of bf16
that are neighbours along K. The activations that meet nibble i are runs of eight, which is again 16 bytes. K
has to be a multiple of 32 and nothing more, so tails (2880, 1408, 704) need no special case.

Rejected: the usual order (value 2j low, 2j + 1 high), which has to interleave registers; and nibbles split by
byte (value j low, j + 16 high in byte j), which was measured first: tiles of bytes reach the tensor cores in
another order than the activations, and one register move a weight went into putting that right.
"""

from __future__ import annotations

import torch

RUN = 32  # values whose codes share 16 bytes
WORDS = 8  # 16-bit words a run


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [..., N, K] (each 0..15) into uint8 [..., N, K / 2].

    Raises ValueError when K is no multiple of 32 or the dtype is not uint8.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % RUN:
        raise ValueError(
            f"4-bit codes must be uint8 with a last dimension divisible by {RUN}, "
            f"got {codes.dtype} of shape {tuple(codes.shape)}"
        )
    nibbles = codes.unflatten(-1, (-1, 4, WORDS))  # [..., runs, nibble, word]
    low = nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)
    high = nibbles[..., 2, :] | (nibbles[..., 3, :] << 4)
    return torch.stack((low, high), dim=-1).flatten(-3)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes uint8 [..., N, K] of packed uint8 [..., N, K / 2]; inverse of `pack_nibbles`."""
    if packed.dtype != torch.uint8 or packed.shape[-1] % (RUN // 2):
        raise ValueError(
            f"packed codes must be uint8 with a last dimension divisible by {RUN // 2}, "
            f"got {packed.dtype} of shape {tuple(packed.shape)}"
        )
    low, high = packed.unflatten(-1, (-1, WORDS, 2)).unbind(-1)
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=-2).flatten(-3)
