"""Programmatic dependent launch: a kernel may start while the one before it drains (compute capability 9.0 and later).

Every kernel here follows one rule, by which chains of them are right: first `wait_for_previous`, then
`start_next`. When a kernel has passed its wait, everything launched earlier is complete and visible; so what
a kernel may read *before* its wait is whatever the kernel just before it does not write.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until all memory written by the previous kernel is visible."""
    if PDL:
        gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel's programs take the places that this kernel leaves free."""
    if PDL:
        gdc_launch_dependents()
