"""Words by which kernels that run at the same time tell each other what they must know, before the one that tells has ended.

A word is zero until somebody knows, and then written once. It holds all that its reader needs, so nothing else has to be
visible when it is. The place kernel clears the words of its layer before it waits for the router; the kernels behind it start
later, and those of the layer's step before have ended.

    word of a route   a record that is needed: place + 1 | (turn of its fetch + 1, or 0) << 8 | records on their way << 16
                      no expert: -1 - records on their way
    word of a fetch   expert + 1 | place << 14 | records on their way << 24;  of the first, where there is none: -1
    word of a part    chunks of a fetch's record that are there already, + 1
"""

import triton
import triton.language as tl

_FENCE = tl.constexpr("{ fence.acq_rel.gpu; mov.u32 $0, $1; }")


@triton.jit
def fence(value, PDL: tl.constexpr):
    """`value`, int32. What this thread wrote comes before whatever it writes from now on, for everybody who sees that."""
    if PDL:
        value = tl.inline_asm_elementwise(_FENCE, "=r,r", [value], tl.int32, False, 1)
    return value


@triton.jit
def await_word(word, ONE: tl.constexpr):
    """What `word` becomes. ONE: one thread looks for all of them, where many programs look at few words."""
    if ONE:
        value = tl.atomic_add(word, 0, sem="relaxed")
        while value == 0:
            value = tl.atomic_add(word, 0, sem="relaxed")
    else:
        value = tl.load(word, volatile=True)
        while value == 0:
            value = tl.load(word, volatile=True)
    return value


@triton.jit
def route_word(place, turn, needed, num_records):
    return tl.where(needed, place + 1 | (turn + 1) << 8 | num_records << 16, -1 - num_records)


@triton.jit
def place_of_route(word):
    """-1: no expert."""
    return tl.where(word < 0, 0, word & 255) - 1


@triton.jit
def turn_of_route(word):
    """-1: its record is complete, or it needs none."""
    return tl.where(word < 0, 0, word >> 8 & 255) - 1


@triton.jit
def records_on_their_way(word):
    """By the word of any route of the step."""
    return tl.where(word < 0, -1 - word, word >> 16)


@triton.jit
def fetch_word(expert, place, num_records):
    return expert + 1 | place << 14 | num_records << 24


@triton.jit
def records_to_fetch(word):
    """By the first fetch's word."""
    return tl.where(word < 0, 0, word >> 24)


@triton.jit
def expert_of_fetch(word):
    return (word & 0x3FFF) - 1


@triton.jit
def place_of_fetch(word):
    return word >> 14 & 127
