"""Triton kernels of the engine. Decode: `decode_inputs` derives what a step needs, as `inputs.DecodeInputs.prepare` defines.
The sampler: a whole batch's tokens in two launches that read the logits once.

    scan      a program a (row, chunk of the vocabulary): its largest logit, and the winner of its race of exponentials
    choose    a program a row: the best of its chunks

These two give what `sampler.sample` defines for rows without top-k, top-p and min-p. The race compares
exp(logit / temperature) / e, e ~ Exp(1), in float32 and relative to the chunk's maximum, so a choice differs from the
definition's only where the two best are within some float32 roundings of each other.

Shape letters: S rows of a decode step, R rows and P columns of the page table, B rows, V vocabulary, N chunks a row.
"""

import triton
import triton.language as tl

_HALF = tl.constexpr(2147483648)
_TO_UNIT = tl.constexpr(2.0**-32)


@triton.jit(do_not_specialize=["size"])
def decode_inputs_kernel(
    packed_ptr,  # int64 [4 S + 1]: ids, positions, rows, kv_lens, number of real rows
    pages_ptr,  # int32 [R, P]
    last_ptr,  # int64 [R]
    tokens_ptr,  # out int64 [S]
    kv_lens_ptr,  # out int32 [S]
    slots_ptr,  # out int64 [S]
    table_ptr,  # out int32 [S, P]; entries behind a row's last key are left alone
    num_valid_ptr,  # out int32 [1]
    size,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S, blocks of P)."""
    s, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(packed_ptr + 2 * size + s)
    kv_len = tl.load(packed_ptr + 3 * size + s)
    p = block * BLOCK + tl.arange(0, BLOCK)
    inside = p * PAGE_SIZE < kv_len
    pages = tl.load(pages_ptr + row * num_pages + p, mask=inside, other=0)
    tl.store(table_ptr + s.to(tl.int64) * num_pages + p, pages, mask=inside)
    if block == 0:
        token = tl.load(packed_ptr + s)
        position = tl.load(packed_ptr + size + s)
        if token < 0:
            token = tl.load(last_ptr + row)
        page = tl.load(pages_ptr + row * num_pages + position // PAGE_SIZE).to(tl.int64)
        tl.store(tokens_ptr + s, token)
        tl.store(kv_lens_ptr + s, kv_len.to(tl.int32))
        tl.store(slots_ptr + s, page * PAGE_SIZE + position % PAGE_SIZE)
        if s == 0:
            tl.store(num_valid_ptr, tl.load(packed_ptr + 4 * size).to(tl.int32))


@triton.jit
def _mix(h):
    """Finaliser of MurmurHash3 on uint32."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def exponential(key, token):
    """`sampler.exponential_noise` of a row's key and token ids, both uint32.

    With u = (h + 1/2) / 2^32 it is -log(1 - u). Where u is small, 1 - u would lose its digits: the logarithm is then
    twice an inverse hyperbolic tangent of u / (2 - u) <= 1/3, eight terms of which are exact to float32.
    """
    h = _mix(_mix(token ^ key) + (key >> 7))
    u = (h.to(tl.float32) + 0.5) * _TO_UNIT
    s = u / (2.0 - u)
    t = s * s
    series = 1.0 / 13 + t * (1.0 / 15)
    series = 1.0 / 7 + t * (1.0 / 9 + t * (1.0 / 11 + t * series))
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * series))
    rest = ((~h).to(tl.float32) + 0.5) * _TO_UNIT
    return tl.where(h < _HALF, 2.0 * s * series, -tl.log(rest))


@triton.jit
def scan_kernel(
    logits_ptr,  # float32 [B, V]
    keys_ptr,  # int64 [B], below 2^32
    temperatures_ptr,  # float32 [B], 0: no race in this row
    max_ptr,  # out float32 [B, N]; NaN if a logit is
    argmax_ptr,  # out int32 [B, N]
    score_ptr,  # out float32 [B, N], with RACE
    winner_ptr,  # out int32 [B, N], with RACE
    stride_row,
    vocab,
    RACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B, N)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = row * tl.num_programs(1) + chunk
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride_row + token, mask=token < vocab, other=-float("inf"))
    is_nan = logits != logits
    logits = tl.where(is_nan, -float("inf"), logits)
    largest = tl.max(logits, 0)
    broken = tl.max(is_nan.to(tl.int32), 0) > 0
    tl.store(max_ptr + part, tl.where(broken, float("nan"), largest))
    tl.store(argmax_ptr + part, chunk * BLOCK + tl.argmax(logits, 0))
    if RACE:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0:
            key = tl.load(keys_ptr + row).to(tl.uint32)
            above = tl.where(largest == -float("inf"), 0.0, largest)
            scores = tl.exp((logits - above) / temperature) / exponential(key, token.to(tl.uint32))
            scores = tl.where(token < vocab, scores, -1.0)
            tl.store(score_ptr + part, tl.max(scores, 0))
            tl.store(winner_ptr + part, chunk * BLOCK + tl.argmax(scores, 0))


@triton.jit
def choose_kernel(
    temperatures_ptr,
    max_ptr,
    argmax_ptr,
    score_ptr,
    winner_ptr,
    tokens_ptr,  # out int64 [B]
    valid_ptr,  # out uint8 [B]: no NaN, and not all -inf
    num_chunks,
    RACE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= N
):
    """Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    part, inside = row * num_chunks + n, n < num_chunks
    maxima = tl.load(max_ptr + part, mask=inside, other=-float("inf"))
    is_nan = maxima != maxima
    broken = tl.max(is_nan.to(tl.int32), 0) > 0
    maxima = tl.where(is_nan, -float("inf"), maxima)
    largest = tl.max(maxima, 0)
    token = tl.load(argmax_ptr + row * num_chunks + tl.argmax(maxima, 0))
    if RACE:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0:
            above = tl.where(largest == -float("inf"), 0.0, largest)
            scores = tl.load(score_ptr + part, mask=inside, other=-1.0)
            scores *= tl.exp((maxima - above) / temperature)
            scores = tl.where(inside, scores, -1.0)
            token = tl.load(winner_ptr + row * num_chunks + tl.argmax(scores, 0))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(valid_ptr + row, ((largest > -float("inf")) & (broken == 0)).to(tl.uint8))
