"""The teacher: a Llama-architecture model that writes thousands of texts at once, as fast as one GPU reads its cache.

transformers' `generate` takes about 27 ms a step whatever the batch, stops a batch when its longest text ends, and sorts the
vocabulary for top-p. Here one CUDA graph holds a whole step for every row, and everything that decides what a row does next
(prompt or sampled token, end of text, next prompt) happens on the device; see `ring_attention` for the cache.

Sampling is by min-p instead of top-p: a token is allowed when its probability is at least `min_p` times the likeliest one's.
It cuts the same tail, but needs a maximum where top-p needs a sort of 49,152 logits a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from .ring_attention import ring_attention


@dataclass(frozen=True)
class SamplingRules:
    """How the teacher writes. Texts end at one of `end_tokens`, or when prompt and answer together fill `window` tokens."""

    end_tokens: tuple[int, ...]
    window: int = 384
    temperature: float = 0.65
    min_p: float = 0.1
    repetition_penalty: float = 1.08


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer; `qkv` and `gate_up` are the checkpoint's matrices stacked by rows."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Teacher:
    """A Llama checkpoint in Hugging Face layout, loaded for lockstep decoding."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.num_layers = config["num_hidden_layers"]
        self.num_heads, self.num_kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["head_dim"]
        self.eps, self.theta = config["rms_norm_eps"], config["rope_theta"]
        weights = {name: w.to(device, dtype) for name, w in load_file(folder / "model.safetensors").items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = [_layer(weights, f"model.layers.{index}.") for index in range(self.num_layers)]

    def rotary_table(self, length: int) -> torch.Tensor:
        """[length, 2, dim] fp32: cosines and sines of every position, halves repeated."""
        frequency = self.theta ** (-torch.arange(0, self.dim, 2, device=self.embedding.device) / self.dim)
        angle = torch.outer(torch.arange(length, device=self.embedding.device).float(), frequency).repeat(
            1, 2
        )
        return torch.stack([angle.cos(), angle.sin()], dim=1)


def _layer(weights: dict[str, torch.Tensor], prefix: str) -> Layer:
    part = {
        name.removeprefix(prefix).removesuffix(".weight"): w
        for name, w in weights.items()
        if name.startswith(prefix)
    }
    return Layer(
        attention_norm=part["input_layernorm"],
        qkv=torch.cat([part[f"self_attn.{x}_proj"] for x in "qkv"]),
        output=part["self_attn.o_proj"],
        mlp_norm=part["post_attention_layernorm"],
        gate_up=torch.cat([part["mlp.gate_proj"], part["mlp.up_proj"]]),
        down=part["mlp.down_proj"],
    )


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _before_attention(
    hidden: torch.Tensor,
    layer: tuple[torch.Tensor, torch.Tensor],
    rotary: torch.Tensor,
    eps: float,
    num_values: int,
) -> torch.Tensor:
    """Norm, projections and rotary embedding: hidden [B, D] -> qkv [B, (H + 2 KV) * dim]. rotary [B, 2, dim]."""
    norm, weight = layer
    batch, dim = hidden.shape[0], rotary.shape[-1]
    heads = F.linear(_rms_norm(hidden, norm, eps), weight).view(batch, -1, dim)
    turned, values = heads[:, :-num_values].float(), heads[:, -num_values:]
    cos, sin = rotary[:, None, 0], rotary[:, None, 1]
    swapped = torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], dim=-1)
    return torch.cat([(turned * cos + swapped * sin).to(hidden.dtype), values], dim=1).view(batch, -1)


def _after_attention(
    hidden: torch.Tensor, attended: torch.Tensor, layer: tuple[torch.Tensor, ...], eps: float
) -> torch.Tensor:
    """Output projection and the MLP, with both residual additions: [B, D] -> [B, D]."""
    output, norm, gate_up, down = layer
    hidden = hidden + F.linear(attended, output)
    gate, up = F.linear(_rms_norm(hidden, norm, eps), gate_up).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, down)


def _choose(
    logits: torch.Tensor, seen: torch.Tensor, start: torch.Tensor, noise: torch.Tensor, rules: SamplingRules
) -> torch.Tensor:
    """Sample a token a row [B]. seen [B, V]: the last step at which the row held that token; noise [B, V]: exponential."""
    scores = logits.float()
    penalised = torch.where(scores > 0, scores / rules.repetition_penalty, scores * rules.repetition_penalty)
    scores = torch.where(seen >= start[:, None], penalised, scores) / rules.temperature
    top = scores.max(dim=-1, keepdim=True).values
    probability = torch.exp(scores - top)
    return torch.where(probability >= rules.min_p, probability / noise, 0.0).argmax(dim=-1)


class Sampler:
    """All rows' state on the device, and one decode step over it.

    Records, one line a step, are what the host reads: the token each row was fed, and a mark: the prompt's index + 1 where a
    text starts, -1 where it ends by an end token, -2 where it filled the window, 0 elsewhere.
    """

    def __init__(
        self, teacher: Teacher, prompts: list[list[int]], batch: int, chunk: int, rules: SamplingRules
    ) -> None:
        device, dtype = teacher.embedding.device, teacher.embedding.dtype
        self.teacher, self.rules, self.chunk = teacher, rules, chunk
        if max(map(len, prompts)) >= rules.window:
            raise ValueError(
                f"a prompt does not fit the window of {rules.window} tokens: shorten it or widen the window"
            )
        width = max(map(len, prompts))
        padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
        self.prompts = padded.to(device)
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.ends = torch.tensor(rules.end_tokens, device=device)
        self.prompt = torch.zeros(batch, dtype=torch.int64, device=device)
        self.next_prompt = torch.zeros(1, dtype=torch.int64, device=device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.start = torch.zeros(batch, dtype=torch.int64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen = torch.full((batch, len(teacher.embedding)), -1, dtype=torch.int32, device=device)
        self.noise = torch.empty(batch, len(teacher.embedding), device=device)
        ring = (batch, teacher.num_kv, rules.window, teacher.dim)
        self.rings = [
            (torch.zeros(ring, dtype=dtype, device=device), torch.zeros(ring, dtype=dtype, device=device))
            for _ in teacher.layers
        ]
        self.rotary = teacher.rotary_table(rules.window)
        self.record_token = torch.zeros(chunk, batch, dtype=torch.int32, device=device)
        self.record_mark = torch.zeros(chunk, batch, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self.before = torch.compile(_before_attention) if on_gpu else _before_attention
        self.after = torch.compile(_after_attention) if on_gpu else _after_attention
        self.choose = torch.compile(_choose) if on_gpu else _choose
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rewind()

    def rewind(self) -> None:
        """Back to step 0: row b begins prompt b. Cached keys need no clearing, as no row looks behind its start."""
        batch = len(self.prompt)
        self.prompt.copy_(torch.arange(batch, device=self.prompt.device) % len(self.prompts))
        self.next_prompt.fill_(batch)
        self.token.copy_(self.prompts[self.prompt, 0])
        self.start.zero_()
        self.step.zero_()
        self.seen.fill_(-1)

    def logits(self) -> torch.Tensor:
        """Feed every row its current token; logits [B, V] for the next one."""
        teacher = self.teacher
        hidden = teacher.embedding[self.token]
        rotary = self.rotary[self.step - self.start]
        for layer, rings in zip(teacher.layers, self.rings, strict=True):
            qkv = self.before(hidden, (layer.attention_norm, layer.qkv), rotary, teacher.eps, teacher.num_kv)
            attended = ring_attention(qkv, rings, self.start, self.step)
            hidden = self.after(
                hidden, attended, (layer.output, layer.mlp_norm, layer.gate_up, layer.down), teacher.eps
            )
        return F.linear(_rms_norm(hidden, teacher.norm, teacher.eps), teacher.embedding)

    @torch.no_grad()
    def advance(self) -> None:
        """One step of every row, without a word to the host: it can be captured in a CUDA graph."""
        line = self.step % self.chunk
        self.record_token.index_copy_(0, line, self.token[None].int())
        self.seen.scatter_(1, self.token[:, None], self.step.int().expand(len(self.token), 1))
        sampled = self.choose(self.logits(), self.seen, self.start, self.noise.exponential_(), self.rules)

        length = self.step - self.start + 1  # tokens of the text so far
        in_prompt = length < self.prompt_lengths[self.prompt]
        forced = self.prompts[self.prompt, length.clamp(max=self.prompts.shape[1] - 1)]
        token = torch.where(in_prompt, forced, sampled)
        ended = ~in_prompt & (token[:, None] == self.ends).any(-1)
        full = ~ended & (length + 1 >= self.rules.window)
        mark = torch.where(length == 1, self.prompt + 1, 0) - ended.long() - 2 * full.long()
        self.record_mark.index_copy_(0, line, mark[None].int())

        done = ended | full
        order = self.next_prompt + torch.cumsum(done, 0) - 1
        self.prompt.copy_(torch.where(done, order % len(self.prompts), self.prompt))
        self.next_prompt.add_(done.sum())
        self.start.copy_(torch.where(done, self.step + 1, self.start))
        self.token.copy_(torch.where(done, self.prompts[self.prompt, 0], token))
        self.step.add_(1)

    def launch_chunk(self) -> None:
        """Queue `chunk` steps on the device; returns before they are done."""
        for _ in range(self.chunk):
            if self.graph is None:
                self.advance()
            else:
                self.graph.replay()

    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait, and return the last chunk's records on the host, two int32 [chunk, B]: tokens and marks."""
        return self.record_token.to("cpu", copy=True), self.record_mark.to("cpu", copy=True)

    def capture(self) -> None:
        """Record `advance` as a CUDA graph; call it after a few steps, which compile what is compiled."""
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.advance()


@dataclass
class Written:
    """One text of the teacher: which prompt it answers, its tokens without prompt and end token, and whether it was cut off."""

    prompt: int
    tokens: list[int]
    cut: bool


class Splitter:
    """Turns records into texts; texts that run on into the next chunk are kept until they end."""

    def __init__(self, prompt_lengths: list[int], batch: int) -> None:
        self.prompt_lengths = prompt_lengths
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.prompt = [-1] * batch

    def split(self, tokens: torch.Tensor, marks: torch.Tensor) -> Iterator[Written]:
        """Yield the texts that ended in this chunk. Both records [chunk, B]."""
        by_row, marks_by_row = tokens.t().contiguous(), marks.t().contiguous()
        events = marks_by_row.nonzero().tolist()
        rows: list[list[int]] = [[] for _ in self.tokens]
        for row, line in events:
            rows[row].append(line)
        for row, lines in enumerate(rows):
            line_tokens, line_marks, begin = by_row[row].tolist(), marks_by_row[row].tolist(), 0
            for line in lines:
                if line_marks[line] > 0:
                    self.prompt[row], self.tokens[row], begin = line_marks[line] - 1, [], line
                else:
                    text = self.tokens[row] + line_tokens[begin : line + 1]
                    yield Written(
                        self.prompt[row],
                        text[self.prompt_lengths[self.prompt[row]] :],
                        line_marks[line] == -2,
                    )
                    self.tokens[row], begin = [], line + 1
            self.tokens[row] += line_tokens[begin:]
