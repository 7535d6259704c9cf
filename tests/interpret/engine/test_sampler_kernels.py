"""The sampler's kernels in the interpreter, against the sampler's torch code: tokens, races, ties, unusable rows."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from minisgl.core import SamplingParams
from minisgl.engine import kernels, sampler
from minisgl.engine.step import SampleSpec


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch) -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
    monkeypatch.setattr(sampler, "CHUNK", 64)


def spec(seed: int = 0, position: int = 7, **params) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed, position, [1, 2], 1, frozenset())


@triton.jit
def noise_kernel(keys_ptr, out_ptr, BLOCK: tl.constexpr):
    token = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + tl.program_id(0)).to(tl.uint32)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + token, kernels.exponential(key, token.to(tl.uint32)))


def test_noise_equals_the_definition_to_float32():
    seeds, positions = [0, 1, 2**63 - 1, 77], [0, 5, 2**31, 4096]
    keys = torch.tensor([sampler._key(s, p) for s, p in zip(seeds, positions)])
    ours = torch.full((4, 8192), math.nan)
    noise_kernel[(4,)](keys, ours, BLOCK=8192)
    expected = sampler.exponential_noise(seeds, positions, 8192, torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert expected.min() < 1e-4 and expected.max() > 8, "both branches, far into their tails"


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_choices_equal_the_definition(vocab):
    logits = torch.randn(6, vocab) * 3
    specs = [
        spec(temperature=0.0),
        spec(seed=1, temperature=1.0),
        spec(seed=2, temperature=0.3, position=9),
        spec(seed=3, temperature=1.0, top_k=5),  # not the kernels' to draw
        spec(seed=2**62, temperature=2.5),
        spec(temperature=0.0),
    ]
    tokens_B, valid_B = sampler.race(logits, specs)
    expected = sampler.sample(logits, specs).tokens_B
    expected[3] = logits[3].argmax()
    assert torch.equal(tokens_B, expected)
    assert valid_B.tolist() == [True] * 6


def test_many_draws_equal_the_definition():
    logits = torch.randn(1, 100).expand(40, -1)
    specs = [spec(seed=i, temperature=1.3) for i in range(40)]
    tokens_B, _ = sampler.race(logits.contiguous(), specs)
    assert torch.equal(tokens_B, sampler.sample(logits, specs).tokens_B)
    assert len(set(tokens_B.tolist())) > 10


def test_ties_go_to_the_lower_index():
    logits = torch.zeros(2, 200)
    logits[1, [70, 150]] = 1.0
    assert sampler.race(logits, [])[0].tolist() == [0, 70]


def test_masked_logits_are_never_chosen():
    logits = torch.full((3, 300), -math.inf)
    logits[:, 131] = -50.0
    specs = [spec(seed=i, temperature=t) for i, t in enumerate([0.0, 1.0, 0.01])]
    assert sampler.race(logits, specs)[0].tolist() == [131] * 3


def test_rows_without_usable_logits_are_named():
    logits = torch.randn(4, 150)
    logits[0, 140] = math.nan
    logits[1] = -math.inf
    logits[2, :149] = -math.inf
    tokens_B, valid_B = sampler.race(logits, [spec(seed=i) for i in range(4)])
    assert valid_B.tolist() == [False, False, True, True]
    assert tokens_B[2] == 149 and bool(((tokens_B >= 0) & (tokens_B < 150)).all())
