"""Expert records from pinned host memory into slots, by a kernel that reads host memory itself.

The copy engine would be a little faster, but the host must tell it what to copy. This kernel is told by the place kernel, in
device memory: eight programs of it keep a PCIe 5 x16 link at 50 of its 55 GB/s, and leave the rest of the device to whatever
computes meanwhile. A record is copied by all programs together, a chunk each, so a single miss uses the whole link, too.

A record may travel in two launches, the parts of gate_up first. The second begins while the first drains, so that the link
doesn't idle between them; it needs nothing of the first, and therefore never waits for it.

With SOME it takes from the list only what is at hand in device memory: experts that a prompt used pass through transient slots,
and those that its last tokens used are copied from there.

With EARLY the list says how much of a record came early; that part is left out.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next


@triton.jit
def fetch_kernel(
    records_EW,  # host records as int64 words; with SOME: those of a few experts, in device memory
    place_of_E,  # int32 [E], with SOME: where in records_EW an expert is, -1: nowhere, and then it is left out
    slab_SW,  # out: slots as int64 words
    fetch_experts_S,
    fetch_slots_S,
    fetch_chunks_S,  # with EARLY
    num_fetch,
    WORDS: tl.constexpr,  # of a record, a multiple of 32
    BEGIN: tl.constexpr,  # the words to copy: BEGIN .. END - 1
    END: tl.constexpr,
    SOME: tl.constexpr,
    EARLY: tl.constexpr,  # words of a chunk, 0: nothing comes early
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (END - BEGIN + BLOCK - 1) // BLOCK
    total = tl.load(num_fetch) * CHUNKS
    for chunk in range(tl.program_id(0), total, tl.num_programs(0)):
        turn = chunk // CHUNKS
        word = BEGIN + chunk % CHUNKS * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(fetch_experts_S + turn).to(tl.int64)
        slot = tl.load(fetch_slots_S + turn).to(tl.int64)
        end = END
        if SOME:
            expert = tl.load(place_of_E + expert).to(tl.int64)
            end = tl.where(expert >= 0, END, 0)
        inside = word < end
        if EARLY > 0:
            inside = inside & (word >= tl.load(fetch_chunks_S + turn) * EARLY)
        value = tl.load(records_EW + expert * WORDS + word, mask=inside, other=0)
        tl.store(slab_SW + slot * WORDS + word, value, mask=inside)
    start_next(PDL)
