"""The teacher's ring attention kernel against its definition in torch, under Triton's interpreter (fp32)."""

import torch

from tools.demo.ring_attention import _ring_attention_kernel, ring_attention_torch


def test_kernel_equals_definition():
    torch.manual_seed(0)
    batch, num_kv, group, window, dim, step = 5, 2, 3, 96, 16, 250
    width = (group + 2) * num_kv * dim
    qkv = torch.randn(batch, width)
    keys, values = torch.randn(2, batch, num_kv, window, dim)
    start = step - torch.tensor(
        [0, 1, 63, 70, window - 1]
    )  # a first token, short texts, one that fills the ring
    expected_rings = (keys.clone(), values.clone())
    expected = ring_attention_torch(qkv, expected_rings, start, torch.tensor([step]))

    out = torch.full((batch, num_kv * group * dim), float("nan"))
    heads = num_kv * group * dim
    _ring_attention_kernel[(batch, num_kv)](
        qkv, qkv[:, heads:], qkv[:, heads + num_kv * dim :], keys, values, out, start, torch.tensor([step]), dim**-0.5, width,
        NUM_KV=num_kv, GROUP=group, WINDOW=window, DIM=dim, BLOCK=64,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, expected_rings[0], rtol=0, atol=0)
    torch.testing.assert_close(values, expected_rings[1], rtol=0, atol=0)
