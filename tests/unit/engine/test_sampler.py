"""The sampler: distributions, restrictions, penalties, and independence from the rest of the batch."""

from __future__ import annotations

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.engine.sampler import exponential_noise, sample
from minisgl.engine.step import SampleSpec

VOCAB = 50


def spec(
    seed: int = 0, position: int = 3, tokens=(1, 2, 3), num_prompt: int = 2, eos=(), **params
) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), seed, position, list(tokens), num_prompt, frozenset(eos))


def draws(logits: torch.Tensor, count: int, **params) -> torch.Tensor:
    """Histogram of `count` draws, made as one batch with different seeds."""
    specs = [spec(seed=i, **params) for i in range(count)]
    tokens = sample(logits.expand(count, -1), specs).tokens_B
    return torch.bincount(tokens, minlength=logits.shape[-1]).float() / count


def test_greedy_is_argmax_and_ties_go_to_the_lower_index() -> None:
    logits = torch.randn(5, VOCAB)
    assert sample(logits, [spec(temperature=0.0)] * 5).tokens_B.tolist() == logits.argmax(-1).tolist()
    assert sample(torch.zeros(1, VOCAB), [spec(temperature=0.0)]).tokens_B.item() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.randn(VOCAB) * 2
    observed = draws(logits, 20_000, temperature=temperature)
    expected = (logits / temperature).softmax(-1)
    assert (observed - expected).abs().max() < 0.012


def test_top_k_top_p_and_min_p_keep_what_they_promise() -> None:
    logits = torch.randn(VOCAB) * 2
    probs, order = logits.softmax(-1).sort(descending=True)
    assert set(draws(logits, 3000, top_k=4).nonzero()[:, 0].tolist()) == set(order[:4].tolist())
    nucleus = int((probs.cumsum(-1) < 0.6).sum()) + 1
    kept = draws(logits, 5000, top_p=0.6).nonzero()[:, 0].tolist()
    assert set(kept) == set(order[:nucleus].tolist())
    kept = draws(logits, 5000, min_p=0.3).nonzero()[:, 0].tolist()
    assert set(kept) == set(order[: int((probs >= 0.3 * probs[0]).sum())].tolist())
    assert draws(logits, 100, top_k=1)[order[0]] == 1.0
    both = set(draws(logits, 5000, top_k=3, top_p=0.5).nonzero()[:, 0].tolist())
    renormalised = probs[:3] / probs[:3].sum()
    assert both == set(order[: int((renormalised.cumsum(-1) < 0.5).sum()) + 1].tolist())


def test_same_seed_same_token_whatever_else_runs() -> None:
    logits = torch.randn(1, VOCAB)
    alone = sample(logits, [spec(seed=42)]).tokens_B.item()
    for at in range(4):
        specs = [spec(seed=i, top_k=3) for i in range(4)]
        specs[at] = spec(seed=42)
        batch = torch.randn(4, VOCAB)
        batch[at] = logits
        assert sample(batch, specs).tokens_B[at].item() == alone


def test_noise_is_exponential_and_differs_by_seed_and_position() -> None:
    noise = exponential_noise([0, 1, 0, 2**62], [0, 0, 1, 0], 100_000, torch.device("cpu"))
    assert (noise > 0).all()
    assert noise.isfinite().all()
    assert (noise.mean(-1) - 1).abs().max() < 0.02
    assert (noise.var(-1) - 1).abs().max() < 0.05
    assert noise[:, ::2].corrcoef().fill_diagonal_(0).abs().max() < 0.02
    assert torch.stack([noise[0, :-1], noise[0, 1:]]).corrcoef()[0, 1].abs() < 0.02


def test_penalties_and_bias() -> None:
    logits = torch.full((1, VOCAB), 1.0)
    logits[0, [1, 3]] = torch.tensor([2.0, -2.0])
    seen = sample(logits, [spec(temperature=0.0, repetition_penalty=4.0, tokens=(1, 3), num_prompt=2)])
    assert seen.tokens_B.item() == 0, "token 1 fell to 0.5"
    counted = spec(temperature=0.0, frequency_penalty=0.6, tokens=(9, 1, 1), num_prompt=1)
    assert sample(logits, [counted]).tokens_B.item() == 0, "2.0 - 2 * 0.6 < 1.0"
    once = spec(temperature=0.0, presence_penalty=0.6, tokens=(9, 1, 1), num_prompt=1)
    assert sample(logits, [once]).tokens_B.item() == 1, "2.0 - 0.6 > 1.0"
    prompt_only = spec(temperature=0.0, presence_penalty=1.9, tokens=(1, 1, 1), num_prompt=3)
    assert sample(logits, [prompt_only]).tokens_B.item() == 1, "the prompt does not count"
    assert sample(logits, [spec(temperature=0.0, logit_bias={7: 5.0, 1: -100.0})]).tokens_B.item() == 7


def test_min_tokens_suppresses_ends() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 9.0
    logits[:, 6] = 8.0
    early = spec(temperature=0.0, min_tokens=2, num_prompt=2, position=3, eos=(5,), stop_token_ids=(6,))
    late = spec(temperature=0.0, min_tokens=2, num_prompt=2, position=4, eos=(5,))
    assert sample(logits, [early, late]).tokens_B.tolist() == [0, 5]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, VOCAB)
    specs = [
        spec(temperature=0.0, logprobs=3, logit_bias={4: 50.0}),
        spec(),
        spec(temperature=0.0, logprobs=0),
    ]
    tokens = sample(logits, specs).fetch(specs)
    reference = logits.log_softmax(-1)
    first = tokens[0].logprobs
    assert first is not None
    assert first.token_id == 4
    assert first.logprob == pytest.approx(reference[0, 4].item(), abs=1e-5)
    assert [t for t, _ in first.top] == reference[0].topk(3).indices.tolist()
    assert tokens[1].logprobs is None
    assert tokens[2].logprobs is not None
    assert tokens[2].logprobs.top == ()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_row_without_usable_logits_fails_alone(bad: float) -> None:
    logits = torch.randn(2, VOCAB)
    logits[0] = bad
    specs = [spec(), spec(temperature=0.0)]
    broken, fine = sample(logits, specs).fetch(specs)
    assert broken.error is not None
    assert fine.error is None
    assert fine.token_id == logits[1].argmax().item()


class OnlyToken:
    terminated = False

    def __init__(self, token: int) -> None:
        self.token = token

    def fill_bitmask(self, row: torch.Tensor) -> None:
        row[self.token // 32] |= 1 << (self.token % 32)

    def accept(self, token_id: int) -> bool:
        return token_id == self.token


def test_a_grammar_decides() -> None:
    logits = torch.randn(2, VOCAB)
    base = spec(seed=1)
    constrained = SampleSpec(base.params, 1, 3, [1], 1, frozenset(), OnlyToken(37))
    assert sample(logits, [constrained, base]).tokens_B[0].item() == 37


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", float("inf")),
        ("top_k", -2),
        ("max_tokens", -1),
        ("repetition_penalty", 0.0),
        ("logprobs", 99),
        ("stop", [""]),
        ("seed", -1),
        ("logit_bias", {3: float("nan")}),
        ("temperature", True),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field.split("_")[0]):
        SamplingParams(**{field: value})
