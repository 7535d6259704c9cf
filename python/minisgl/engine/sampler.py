"""From logits to tokens, on the device, for a whole batch at once.

Order of operations, the usual one: logit bias, repetition / presence / frequency penalties, suppressed end tokens, grammar,
then (unless greedy) temperature, top-k, top-p, min-p, and one draw. Log-probabilities are those of the model: they are taken
before any of this.

The draw is a race of exponentials (argmax of p / e, e ~ Exp(1)), which needs neither a cumulative sum nor a sort, so the
vocabulary is sorted only for rows that use top-k or top-p. The random numbers are a hash of (seed, position, token id):
no generator state to carry, the same numbers on every device, in every batch composition, and after preemption.

On CUDA two launches (`engine.kernels`) do all of this for greedy rows and for rows that only have a temperature; what is
written here in torch is the definition, and serves the CPU and rows with top-k, top-p or min-p.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.core import TokenLogprobs
from minisgl.engine.step import SampledToken, SampleSpec

_MASK32 = 0xFFFFFFFF
HAS_TRITON = importlib.util.find_spec("triton") is not None  # platforms without it have no CUDA either
# Any: Triton's launch syntax is beyond type checkers.
kernels: Any = importlib.import_module("minisgl.engine.kernels") if HAS_TRITON else None
CHUNK = 2048  # logits a program of the scan reads: a row of 150,000 keeps half of a large GPU busy


@dataclass(frozen=True)
class SampleResult:
    """One step's outcome, still on the device: tokens_B int64, valid_B bool (False: no usable logits in that row),
    and log-probabilities where any request asked for them: own_B, top_values_BN, top_ids_BN."""

    tokens_B: torch.Tensor
    valid_B: torch.Tensor
    own_B: torch.Tensor | None = None
    top_values_BN: torch.Tensor | None = None
    top_ids_BN: torch.Tensor | None = None

    def to_host(self) -> SampleResult:
        """Start copying to pinned host memory; valid once the stream has come this far. A CPU result is returned as it is."""
        if self.tokens_B.device.type == "cpu":
            return self
        parts = (self.tokens_B, self.valid_B, self.own_B, self.top_values_BN, self.top_ids_BN)
        return SampleResult(*(None if part is None else pinned_copy(part) for part in parts))  # type: ignore[arg-type]

    def fetch(self, specs: Sequence[SampleSpec]) -> list[SampledToken]:
        """A host result as one SampledToken a row."""
        tokens, valid = self.tokens_B.tolist(), self.valid_B.tolist()
        own = self.own_B.tolist() if self.own_B is not None else None
        values = self.top_values_BN.tolist() if self.top_values_BN is not None else None
        ids = self.top_ids_BN.tolist() if self.top_ids_BN is not None else None
        out = []
        for i, spec in enumerate(specs):
            logprobs, count = None, spec.params.logprobs
            if count is not None:
                assert own is not None and values is not None and ids is not None
                top = tuple(zip(ids[i][:count], values[i][:count]))
                logprobs = TokenLogprobs(tokens[i], own[i], top)
            error = None if valid[i] else "the model produced no usable logits for this request"
            out.append(SampledToken(tokens[i], logprobs, error))
        return out


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the host once the stream has come this far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def sample(logits_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> SampleResult:
    """Choose one token a row. logits_BV: any floating type, [B, V]; row i belongs to specs[i]. No host synchronisation."""
    assert logits_BV.shape[0] == len(specs) > 0
    raw_BV = logits_BV.float()
    scores_BV = _constrain(raw_BV, specs)
    random_rows = [i for i, spec in enumerate(specs) if spec.params.temperature > 0]
    if HAS_TRITON and raw_BV.is_cuda:
        drawn = [i for i in random_rows if _is_restricted(specs[i])]
        tokens_B, valid_B = race(scores_BV, specs)
        if scores_BV is not raw_BV:
            _, valid_B = race(raw_BV, [])
    else:
        drawn = random_rows
        tokens_B = scores_BV.argmax(dim=-1)
        valid_B = ~torch.isnan(raw_BV).any(dim=-1) & (raw_BV.amax(dim=-1) > -torch.inf)
    if drawn:
        chosen = _draw(_rows(scores_BV, drawn), [specs[i] for i in drawn])
        if len(drawn) == len(specs):
            tokens_B = chosen
        else:
            tokens_B = tokens_B.index_copy(0, _to_device(drawn, torch.int64, raw_BV.device), chosen)
    top = max((spec.params.logprobs for spec in specs if spec.params.logprobs is not None), default=None)
    if top is None:
        return SampleResult(tokens_B, valid_B)
    logprobs_BV = raw_BV.log_softmax(dim=-1)
    values, ids = logprobs_BV.topk(max(top, 1), dim=-1)
    own_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    return SampleResult(tokens_B, valid_B, own_B, values, ids)


def _is_restricted(spec: SampleSpec) -> bool:
    """Whether the draw needs more than one look at the distribution."""
    p = spec.params
    return p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0


def race(scores_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens int64 [B], valid bool [B] by the kernels: the draw for rows with no more than a temperature, else the argmax.

    scores_BV: float32, rows contiguous. No specs: argmax for all.
    """
    assert scores_BV.dtype == torch.float32 and scores_BV.stride(1) == 1
    rows, vocab = scores_BV.shape
    device, chunks = scores_BV.device, -(-vocab // CHUNK)
    racing = [spec.params.temperature > 0 and not _is_restricted(spec) for spec in specs]
    keys_B = temperatures_B = scores_BV  # not read unless a row races
    if any(racing):
        temperatures = [spec.params.temperature if runs else 0.0 for spec, runs in zip(specs, racing)]
        temperatures_B = _to_device(temperatures, torch.float32, device)
        keys_B = _to_device([_key(spec.seed, spec.position) for spec in specs], torch.int64, device)
    values = torch.empty((2, rows, chunks), dtype=torch.float32, device=device)
    places = torch.empty((2, rows, chunks), dtype=torch.int32, device=device)
    parts = (values[0], places[0], values[1], places[1])
    tokens_B = torch.empty(rows, dtype=torch.int64, device=device)
    valid_B = torch.empty(rows, dtype=torch.uint8, device=device)
    options = {"RACE": any(racing), "num_warps": 4}
    kernels.scan_kernel[(rows, chunks)](
        scores_BV, keys_B, temperatures_B, *parts, scores_BV.stride(0), vocab, BLOCK=CHUNK, **options
    )
    block = 1 << (chunks - 1).bit_length()
    kernels.choose_kernel[(rows,)](temperatures_B, *parts, tokens_B, valid_B, chunks, BLOCK=block, **options)
    return tokens_B, valid_B.view(torch.bool)


def _rows(scores_BV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == scores_BV.shape[0]:
        return scores_BV
    return scores_BV[_to_device(rows, torch.int64, scores_BV.device)]


def _to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host numbers as a device tensor, without waiting for the device."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _constrain(scores_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Everything that depends on a request's own tokens; rows without such wishes are untouched, and nothing is copied
    where no row has any."""
    busy = [i for i, spec in enumerate(specs) if _is_constrained(spec)]
    if not busy:
        return scores_BV
    scores_BV = scores_BV.clone()
    for i in busy:
        _constrain_row(scores_BV[i], specs[i])
    return scores_BV


def _is_constrained(spec: SampleSpec) -> bool:
    p = spec.params
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    return bool(p.logit_bias) or penalized or spec.constraint is not None or _too_short(spec)


def _too_short(spec: SampleSpec) -> bool:
    return spec.position - spec.num_prompt < spec.params.min_tokens


def _constrain_row(row_V: torch.Tensor, spec: SampleSpec) -> None:
    """In place, on one row."""
    p, device = spec.params, row_V.device
    if p.logit_bias:
        ids = _to_device(list(p.logit_bias), torch.int64, device)
        row_V.index_add_(0, ids, _to_device(list(p.logit_bias.values()), torch.float32, device))
    if p.repetition_penalty != 1.0:
        seen = _to_device(sorted(set(spec.token_ids)), torch.int64, device)
        value = row_V[seen]
        row_V[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    output = spec.token_ids[spec.num_prompt :]
    if output and (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0):
        unique, counts = np.unique(np.asarray(output), return_counts=True)
        penalty = p.presence_penalty + p.frequency_penalty * counts
        row_V.index_add_(
            0,
            _to_device(unique.tolist(), torch.int64, device),
            -_to_device(penalty.tolist(), torch.float32, device),
        )
    if _too_short(spec):
        ends = sorted(spec.eos_token_ids | set(p.stop_token_ids))
        if ends:
            row_V[_to_device(ends, torch.int64, device)] = -torch.inf
    if spec.constraint is not None:
        vocab = row_V.shape[0]
        words = torch.zeros(-(-vocab // 32), dtype=torch.int32)
        spec.constraint.fill_bitmask(words)
        bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.reshape(-1)[:vocab].bool()
        row_V.masked_fill_(~allowed.to(device), -torch.inf)


def _draw(scores_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """One token a row from softmax(scores / temperature), restricted by top-k, top-p and min-p."""
    device = scores_BV.device
    temperature_B1 = _to_device([s.params.temperature for s in specs], torch.float32, device)[:, None]
    probs_BV = ((scores_BV - scores_BV.amax(dim=-1, keepdim=True)) / temperature_B1).softmax(dim=-1)
    vocab = scores_BV.shape[1]
    if any(0 < s.params.top_k < vocab or s.params.top_p < 1.0 for s in specs):
        probs_BV = _keep_likeliest(probs_BV, specs)
    if any(s.params.min_p > 0.0 for s in specs):
        floor_B1 = _to_device([s.params.min_p for s in specs], torch.float32, device)[:, None]
        probs_BV = probs_BV.masked_fill(probs_BV < floor_B1 * probs_BV.amax(dim=-1, keepdim=True), 0.0)
    noise_BV = exponential_noise([s.seed for s in specs], [s.position for s in specs], vocab, device)
    return (probs_BV / noise_BV).argmax(dim=-1)


def _keep_likeliest(probs_BV: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Zero what lies outside the top k, then outside the smallest set that reaches top_p of the rest."""
    vocab, device = probs_BV.shape[1], probs_BV.device
    top_k = [s.params.top_k if 0 < s.params.top_k < vocab else vocab for s in specs]
    top_k_B1 = _to_device(top_k, torch.int64, device)[:, None]
    top_p_B1 = _to_device([s.params.top_p for s in specs], torch.float32, device)[:, None]
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.arange(vocab, device=device)[None, :] < top_k_B1
    sorted_BV = sorted_BV * keep_BV
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV  # mass of strictly likelier tokens
    total_B1 = sorted_BV.sum(dim=-1, keepdim=True)
    keep_BV &= before_BV < top_p_B1 * total_B1  # the first token is always kept: 0 < top_p * total
    keep_BV[:, 0] = True
    return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV * keep_BV)


def exponential_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device
) -> torch.Tensor:
    """Exp(1) numbers [B, vocab] float32: a hash of (seed, position, token id), the same on every device.

    The hash is the 32-bit finaliser of MurmurHash3, three rounds keyed by seed and position. 32-bit products are formed in
    int64 with the operand below 2^31 split so that nothing overflows the sign.
    """
    keys = [_key(seed, position) for seed, position in zip(seeds, positions)]
    key_B1 = _to_device(keys, torch.int64, device)[:, None]
    token_1V = torch.arange(vocab, dtype=torch.int64, device=device)[None, :]
    h = _mix(_mix(token_1V ^ key_B1) + (key_B1 >> 7) & _MASK32)
    # (h + 0.5) / 2^32 lies in (0, 1); -log1p(-u) keeps the relative precision of small values, and the smallest one wins.
    uniform = (h.double() + 0.5) * 2.0**-32
    return (-torch.log1p(-uniform)).float()


def _key(seed: int, position: int) -> int:
    key = (seed ^ (seed >> 32)) & _MASK32
    for value in (0x9E3779B9, position & _MASK32):
        key = ((key ^ value) * 0x85EBCA6B) & _MASK32
        key ^= key >> 15
    return key


def _mix(h: torch.Tensor) -> torch.Tensor:
    """Finaliser of MurmurHash3 on 32-bit values held in int64."""
    h = h ^ (h >> 16)
    h = _mul32(h, 0x85EBCA6B)
    h = h ^ (h >> 13)
    h = _mul32(h, 0xC2B2AE35)
    return h ^ (h >> 16)


def _mul32(h: torch.Tensor, factor: int) -> torch.Tensor:
    """(h * factor) mod 2^32 for 0 <= h < 2^32, without leaving int64: the factor is taken in 16-bit halves."""
    low, high = factor & 0xFFFF, factor >> 16
    return (h * low + (((h * high) & 0xFFFF) << 16)) & _MASK32
