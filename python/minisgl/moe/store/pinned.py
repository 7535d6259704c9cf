"""Host memory for expert records: page-aligned, returned to the system when it is no longer used, pinned as far as possible.

Pinned (page-locked) memory is what the copy engine and kernels can read at link speed. Memory is allocated first and pinned
afterwards, where it is: PyTorch's own pinned allocator rounds sizes up to a power of two and keeps what was freed, which for
29 GB of experts would double the host memory.

How much may be pinned is asked before (`pin_budget`) and found out by trying: a system may refuse at any time, and then what
has been pinned so far is what there is. RLIMIT_MEMLOCK is named in the message, not obeyed: drivers do not count against it
what they pin themselves, and its usual 8 MB would rule out everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

GIB = 2**30
RESERVE = 2 * GIB  # host memory that stays pageable, for everything else on the machine


@dataclass(frozen=True)
class HostFacts:
    """Bytes of host memory in all and available; whether this is Linux under Windows; RLIMIT_MEMLOCK, None for no limit."""

    total: int
    available: int
    wsl: bool = False
    memlock: int | None = None

    def share(self, num_ranks: int) -> HostFacts:
        """What each of so many ranks on this machine may count on."""
        return replace(self, total=self.total // num_ranks, available=self.available // num_ranks)


def gather_host_facts() -> HostFacts:
    """From /proc and, in a container, its cgroup; 8 GiB where neither exists (macOS, Windows)."""
    numbers = {}
    if (text := _read("/proc/meminfo")) is not None:
        numbers = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()}
    total, available = numbers.get("MemTotal", 8 * GIB), numbers.get("MemAvailable", 8 * GIB)
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit.strip().isdecimal():
        total, available = min(total, int(limit)), min(available, int(limit) - int(used))
    version = _read("/proc/version") or ""
    return HostFacts(total, max(available, 0), "microsoft" in version.lower(), _memlock())


def pin_budget(wanted: int, facts: HostFacts) -> tuple[int, str]:
    """How many of `wanted` bytes to try to pin, and why not all of them ("" if all)."""
    if facts.wsl and wanted > facts.total // 2:
        return facts.total // 2, "WSL2 pins at most half of the memory: raise `memory=` in .wslconfig"
    room = max(facts.available - RESERVE, 0)
    if wanted > room:
        return (
            room,
            f"{facts.available / GIB:.1f} GiB of host memory are available, 2 GiB of them stay pageable",
        )
    return wanted, ""


class Pinning(Protocol):
    """The system calls behind it."""

    def pin(self, address: int, num_bytes: int) -> str | None:
        """Pin a range that starts on a page; None, or why it was refused."""
        ...

    def unpin(self, address: int) -> None: ...


class CudaPinning:
    """Pins for all CUDA devices of this process, by the driver.

    Not by the runtime (`cudaHostRegister`): what that refuses stays its "last error" and surfaces at the next kernel launch.
    """

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.current_stream().synchronize()  # makes the context that the driver's calls need
        self._driver: Any = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")

    def pin(self, address: int, num_bytes: int) -> str | None:
        portable_and_mapped = 3
        code = self._driver.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(portable_and_mapped)
        )
        return None if code == 0 else self._name(code)

    def unpin(self, address: int) -> None:
        self._driver.cuMemHostUnregister(ctypes.c_void_p(address))

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        return name.value.decode() if name.value else f"error {code}"


@dataclass(frozen=True)
class HostRecords:
    """records_EB uint8 [E, nbytes]; the first num_pinned records can be copied from without staging."""

    records_EB: torch.Tensor
    num_pinned: int

    @property
    def pinned_bytes(self) -> int:
        return self.num_pinned * self.records_EB.shape[1]


class HostMemory:
    """Allocates records and pins them while the budget lasts. `close`, or the end of the object, unpins everything.

    pinned_bytes: pinned now. refusal: why the system refused to pin more, "" if it never did.
    """

    def __init__(self, pinning: Pinning | None = None, budget: int = 0) -> None:
        """pinning: None pins nothing, which is what a run on a CPU wants. budget: bytes to pin at most."""
        self.budget = budget if pinning is not None else 0
        self.refusal = ""
        self._pinning = pinning
        self._ranges: dict[int, tuple[int, mmap.mmap]] = {}
        # The maps are kept until their pages are unpinned: a range that is unmapped while pinned stays locked for ever.
        self._finalizer = weakref.finalize(self, _unpin_all, pinning, self._ranges)

    @property
    def pinned_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self._ranges.values())

    def allocate(self, num_records: int, record_bytes: int, pin_at_most: int | None = None) -> HostRecords:
        """Records with undefined contents; as many of the first ones pinned as the budget allows, at most pin_at_most."""
        memory = _map(num_records * record_bytes)
        records_EB = torch.frombuffer(memory, dtype=torch.uint8).view(num_records, record_bytes)
        most = num_records if pin_at_most is None else min(pin_at_most, num_records)
        num_pinned = min(most, self.budget // record_bytes)
        whole_pages = -(-num_pinned * record_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if num_pinned and not self._pin(records_EB.data_ptr(), whole_pages, memory):
            num_pinned = 0
        return HostRecords(records_EB, num_pinned)

    def close(self) -> None:
        """Unpin everything. Nothing may still be copying from it."""
        _unpin_all(self._pinning, self._ranges)

    def _pin(self, address: int, num_bytes: int, memory: mmap.mmap) -> bool:
        assert self._pinning is not None
        refusal = self._pinning.pin(address, num_bytes)
        if refusal is not None:
            limit = _memlock()
            hint = "" if limit is None else f"; `ulimit -l` is {limit // 1024} KiB"
            self.refusal = f"pinning {num_bytes / GIB:.2f} GiB more was refused ({refusal}{hint})"
            self.budget = 0
            return False
        self._ranges[address] = (num_bytes, memory)
        self.budget -= num_bytes
        return True


def _map(num_bytes: int) -> mmap.mmap:
    """Private memory on whole pages, in huge ones where the system has them."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    # Python's default, shared memory, is never huge and counts as shared with whoever is forked.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages says so; nothing is lost
            memory.madvise(mmap.MADV_HUGEPAGE)  # pinning walks the pages one by one: fewer are faster
    return memory


def _unpin_all(pinning: Pinning | None, ranges: dict[int, tuple[int, mmap.mmap]]) -> None:
    while ranges:
        address, _ = ranges.popitem()
        assert pinning is not None
        pinning.unpin(address)


def _memlock() -> int | None:
    """RLIMIT_MEMLOCK in bytes, None where there is no limit or no such thing."""
    try:
        import resource  # not on Windows
    except ModuleNotFoundError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
