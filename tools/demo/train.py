"""Training by the clock: the schedule knows how many seconds there are, not how many steps.

A rented GPU is paid by the minute and its speed is not known beforehand, so warm-up, cosine decay and the end all follow the
time that has passed. Batches are random windows of one long token stream that stays on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .student import Student, token_loss


@dataclass(frozen=True)
class TrainRules:
    """Everything a training run chooses. Times in seconds."""

    seconds: float
    batch: int = 64
    length: int = 1024
    peak_rate: float = 4e-3
    final_fraction: float = 0.01
    warmup_fraction: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    balance_weight: float = 0.01
    log_every: int = 100
    max_steps: int = 1_000_000


@dataclass
class TrainLog:
    """What a run reports: a line every `log_every` steps, and the totals."""

    lines: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    start_seconds: float = 0.0  # until the second step was done: compilation


def learning_rate(rules: TrainRules, progress: float) -> float:
    """Rate at a progress of 0 to 1: linear warm-up, then a cosine down to `final_fraction` of the peak."""
    if progress < rules.warmup_fraction:
        return rules.peak_rate * max(progress / rules.warmup_fraction, 0.01)
    rest = (progress - rules.warmup_fraction) / (1 - rules.warmup_fraction)
    cosine = 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))
    return rules.peak_rate * (rules.final_fraction + (1 - rules.final_fraction) * cosine)


def make_optimizer(model: Student, rules: TrainRules) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": rules.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=rules.peak_rate, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda
    )


def train(
    model: Student,
    stream: np.ndarray,
    held_out: np.ndarray,
    rules: TrainRules,
    say: Callable[[str], None] = print,
) -> TrainLog:
    """Train `model` in place on a uint16 token stream; `held_out` is a second stream for the losses in the log.

    The clock starts after the first two steps, so that compilation does not shorten the schedule.
    """
    device = model.embedding.device
    tokens = torch.from_numpy(stream.astype(np.int32)).to(device)
    optimizer, log = make_optimizer(model, rules), TrainLog()
    if device.type == "cuda":
        for block in model.blocks:  # all blocks share one compiled function
            block.compile()
    loss_of = torch.compile(token_loss) if device.type == "cuda" else token_loss
    generator = torch.Generator(device=device).manual_seed(1)
    offsets = torch.arange(rules.length + 1, device=device)
    begin = clock = time.monotonic()
    progress = 0.0
    while progress < 1.0 and log.steps < rules.max_steps:
        rate = learning_rate(rules, progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(
            len(tokens) - rules.length - 1, (rules.batch, 1), device=device, generator=generator
        )
        window = tokens[starts + offsets].long()
        hidden, balance, _ = model.hidden(window[:, :-1])
        loss = loss_of(hidden, model.embedding, window[:, 1:])
        (loss + rules.balance_weight * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), rules.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.steps += 1
        if log.steps == 2:
            loss.item()  # wait for the device
            clock = time.monotonic()
            log.start_seconds = clock - begin
        if log.steps % rules.log_every == 0 or log.steps % 10 == 0:
            value = loss.item()  # also keeps the host from running ahead of the clock
            if not math.isfinite(value):
                raise ValueError(f"the loss is {value} at step {log.steps}: lower the peak rate")
        if log.steps % rules.log_every == 0:
            line = {"step": log.steps, "seconds": time.monotonic() - clock, "rate": rate, "loss": loss.item()}
            line |= {"balance": balance.item(), "gradient": norm.item()}
            if log.steps % (10 * rules.log_every) == 0:
                line["held_out"] = held_out_loss(model, held_out, rules)
            log.lines.append(line)
            say(" ".join(f"{name} {value:.5g}" for name, value in line.items()))
        progress = (time.monotonic() - clock) / rules.seconds if log.steps >= 2 else 0.0
    log.seconds = time.monotonic() - clock
    log.tokens = log.steps * rules.batch * rules.length
    return log


def held_out_loss(model: Student, stream: np.ndarray, rules: TrainRules, batches: int = 4) -> float:
    """Mean loss in nats a token over the first windows of `stream`.

    Gradients stay enabled, unused: switching them off would compile every block a second time.
    """
    device, size = model.embedding.device, rules.batch * rules.length
    losses = []
    for index in range(min(batches, (len(stream) - 1) // size)):
        part = torch.from_numpy(stream[index * size : (index + 1) * size + 1].astype(np.int64)).to(device)
        inputs, targets = part[:-1].view(rules.batch, -1), part[1:].view(rules.batch, -1)
        losses.append(model(inputs, targets)[0].item())
    if not losses:
        raise ValueError(
            f"the held-out stream has only {len(stream)} tokens, one batch needs {size + 1}: hold out more"
        )
    return sum(losses) / len(losses)
