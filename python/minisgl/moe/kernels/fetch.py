"""Expert records from pinned host memory into slots, by a kernel that reads host memory itself.

The copy engine would be a little faster, but the host must tell it what to copy. This kernel is told by the place kernel, in
device memory: few programs of it keep a PCIe 5 x16 link busy, and leave the rest of the device to whatever computes meanwhile.
A record is copied by all programs together, a chunk each, so a single miss uses the whole link, too.

A record travels in two parts, the one of gate_up first. Either in two launches, the second of which begins while the first
drains, so that the link doesn't idle between them; it needs nothing of the first, and therefore never waits for it. Or in one
launch that counts, with COUNTS, the chunks that have come, for kernels that wait for them (`await_chunks`). These are launched
behind it and may start once all of its programs run; so however much of the device they fill, it goes on.

A program has few bytes under way. Twice as many don't come sooner; they queue up where all reads of the device pass, and what
computes meanwhile would wait behind them.

With SOME it takes from the list only what is at hand in device memory: experts that a prompt used pass through transient slots,
and those that its last tokens used are copied from there.

With EARLY the list says how much of a record came early; that part is left out.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next
from minisgl.moe.kernels.told import await_word, expert_of_fetch, place_of_fetch, records_to_fetch

_PAUSE = tl.constexpr("{ .reg .pred some; setp.gt.s32 some, $1, 0; @some nanosleep.u32 $2; mov.u32 $0, 0; }")


@triton.jit
def await_chunks(counter, chunks, PAUSE: tl.constexpr):
    """Until `counter` says that so many chunks have come; their bytes can then be read.

    PAUSE: nanoseconds between two looks, 0: none. All who wait look at one address, and those who count must get through.
    """
    came = 0
    while came < chunks:
        came = tl.atomic_add(counter, 0, sem="acquire")
        if PAUSE > 0:
            left = chunks - came
            tl.inline_asm_elementwise(_PAUSE, "=r,r,r", [left, left * 0 + PAUSE], tl.int32, False, 1)


@triton.jit
def _count(counter, chunks):
    if chunks > 0:
        tl.debug_barrier()  # every thread has written its part
        tl.atomic_add(counter, chunks, sem="release")


@triton.jit
def _which(chunk, n, BEGIN: tl.constexpr, CUT: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """(turn, first word, end, counter) of a chunk: those of the part before CUT of all n records, then those of the other."""
    FIRST: tl.constexpr = (CUT - BEGIN + BLOCK - 1) // BLOCK
    SECOND: tl.constexpr = (END - CUT + BLOCK - 1) // BLOCK
    turn, word, end, counter = chunk // FIRST, BEGIN + chunk % FIRST * BLOCK, CUT, 1 + chunk // FIRST
    if SECOND > 0:
        rest = chunk - n * FIRST
        turn = tl.where(rest < 0, turn, rest // SECOND)
        word = tl.where(rest < 0, word, CUT + rest % SECOND * BLOCK)
        end = tl.where(rest < 0, CUT, END)
        counter = tl.where(rest < 0, counter, 0)
    return turn, word, end, counter


@triton.jit
def fetch_kernel(
    records_EW,  # host records as int64 words; with SOME: those of a few experts, in device memory
    place_of_E,  # int32 [E], with SOME: where in records_EW an expert is, -1: nowhere, and then it is left out
    slab_SW,  # out: slots as int64 words
    fetch_experts_S,
    fetch_slots_S,
    fetch_chunks_S,  # with EARLY
    num_fetch,
    told_3M,  # with COUNTS, in place of the four above: words of fetches and of their parts, see `told`
    arrived_S1,  # with COUNTS: int32 [S + 1], chunks that have come: after CUT of all records, then before it of each turn
    WORDS: tl.constexpr,  # of a record, a multiple of 32
    BEGIN: tl.constexpr,  # the words to copy: BEGIN .. END - 1, those before CUT of all records first
    CUT: tl.constexpr,
    END: tl.constexpr,
    COUNTS: tl.constexpr,  # and therefore is told by the place kernel itself, while that one still runs
    SOME: tl.constexpr,
    EARLY: tl.constexpr,  # words of a chunk, 0: nothing comes early
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,  # M of told_3M
    PDL: tl.constexpr,
):
    told, told_of, there = 0, 0, 0
    if COUNTS:
        start_next(PDL)
        told = await_word(told_3M + MOST, False)
        n = records_to_fetch(told)
        if EARLY > 0 and n > 0:
            there = await_word(told_3M + 2 * MOST, False) - 1
    else:
        n = tl.load(num_fetch)
    total = n * ((CUT - BEGIN + BLOCK - 1) // BLOCK + (END - CUT + BLOCK - 1) // BLOCK)
    done, done_of = 0, 0  # chunks that are written and not counted yet, all of one counter
    for chunk in range(tl.program_id(0), total, tl.num_programs(0)):
        turn, first, end, counter = _which(chunk, n, BEGIN, CUT, END, BLOCK)
        if COUNTS and counter != done_of:
            _count(arrived_S1 + done_of, done)
            done = 0
        if COUNTS:
            if turn != told_of:
                told, told_of = await_word(told_3M + MOST + turn, False), turn
                if EARLY > 0:
                    there = await_word(told_3M + 2 * MOST + turn, False) - 1
            expert, slot = expert_of_fetch(told).to(tl.int64), place_of_fetch(told).to(tl.int64)
        else:
            expert = tl.load(fetch_experts_S + turn).to(tl.int64)
            slot = tl.load(fetch_slots_S + turn).to(tl.int64)
            if EARLY > 0:
                there = tl.load(fetch_chunks_S + turn)
        word = first + tl.arange(0, BLOCK)
        if SOME:
            expert = tl.load(place_of_E + expert).to(tl.int64)
            end = tl.where(expert >= 0, end, 0)
        inside = word < end
        if EARLY > 0:
            inside = inside & (word >= there * EARLY)
        value = tl.load(records_EW + expert * WORDS + word, mask=inside, other=0)
        tl.store(slab_SW + slot * WORDS + word, value, mask=inside)
        done, done_of = done + 1, counter
    if COUNTS:  # the last count says, too, that this program reads nothing any more
        if done_of > 0:
            _count(arrived_S1 + done_of, done)
            done = 0
        _count(arrived_S1, done + 1)
    if not COUNTS:
        start_next(PDL)
