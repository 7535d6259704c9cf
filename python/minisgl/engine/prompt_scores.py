"""How likely the model finds the tokens of a prompt, beside the sampling of what follows it.

    hidden states [S, D], a slice of rows at a time -> logits [slice, V] -> own and top log-probabilities

A vocabulary of 150,000 makes logits of 600 KB a token, so those of a whole prompt never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minisgl.core import TokenLogprobs
from minisgl.engine.sampler import pinned_copy
from minisgl.engine.step import ScoreSpec


@dataclass(frozen=True)
class PromptScores:
    """Of all scored tokens of a step: own_S float32, and the likeliest ones' top_values_SN float32, top_ids_SN int64."""

    own_S: torch.Tensor
    top_values_SN: torch.Tensor
    top_ids_SN: torch.Tensor

    def to_host(self) -> PromptScores:
        """Start copying to pinned host memory; valid once the stream has come this far. A CPU result is returned as it is."""
        if self.own_S.device.type == "cpu":
            return self
        return PromptScores(*map(pinned_copy, (self.own_S, self.top_values_SN, self.top_ids_SN)))

    def fetch(self, specs: Sequence[ScoreSpec]) -> list[list[TokenLogprobs]]:
        """A host result, one list a spec."""
        own, values, ids = self.own_S.tolist(), self.top_values_SN.tolist(), self.top_ids_SN.tolist()
        out, at = [], 0
        for spec in specs:
            out.append(
                [
                    TokenLogprobs(
                        token, own[i], tuple(zip(ids[i][: spec.num_top], values[i][: spec.num_top]))
                    )
                    for i, token in enumerate(spec.targets, at)
                ]
            )
            at += len(spec.targets)
        return out


def score_prompts(
    lm_head: Callable[[torch.Tensor], torch.Tensor],
    hidden_SD: torch.Tensor,
    targets_S: torch.Tensor,
    num_top: int,
    slice_rows: int,
) -> PromptScores:
    """targets_S: int64, the token after each row. num_top: of the spec that wants most. slice_rows: logits at a time.

    Where ranks share the vocabulary, all of them must call this together.
    """
    assert len(hidden_SD) == len(targets_S) > 0
    parts: list[tuple[torch.Tensor, ...]] = []
    for x_SD, target_S in zip(hidden_SD.split(slice_rows), targets_S.split(slice_rows)):
        logprobs_SV = lm_head(x_SD).log_softmax(dim=-1)
        top = logprobs_SV.topk(num_top, dim=-1)
        parts.append((logprobs_SV.gather(1, target_S[:, None])[:, 0], top.values, top.indices))
    return PromptScores(*(torch.cat(part) for part in zip(*parts)))
