"""Where keys and values live: one allocation for all layers, cut into pages, and the free list of those
pages.

One tensor rather than one a layer: a single number to account for, a page id that means the same in every
layer, and no fragmentation between layers. Page 0 is the dummy page: padding rows of a captured graph write
there and nobody reads it, so kernels need no bounds check. It is never handed out.

The device half (`KVPool`) and the host half (`PageAllocator`) know nothing of each other but the number of
pages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

DUMMY_PAGE = 0


def bytes_per_page(
    num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes one page takes over all layers: page_size tokens of 2 (key, value) x head_dim x kv_heads x
    itemsize x layers.

    Qwen3-30B-A3B in bf16: 2 x 128 x 4 x 2 x 48 = 98,304 bytes a token.
    """
    return page_size * 2 * head_dim * num_kv_heads * dtype.itemsize * num_layers


class KVPool:
    """Keys and values of every layer: `data` is [num_layers, 2, num_pages, page_size, num_kv_heads,
    head_dim].

    num_pages counts the dummy page: num_pages - 1 pages can be allocated. num_kv_heads are those of this
    rank. Raises ValueError when not even one page beside the dummy page was asked for.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size} is not allowed: use a whole number of at least 1")
        if num_pages < 2:
            raise ValueError(
                f"num_pages={num_pages} leaves no page beside the dummy page: "
                "use at least 2, or more memory for the KV pool"
            )
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        # Zeros, not empty: masked attention multiplies what it does not use by 0, and 0 x NaN would be NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (keys, values) of one layer, each [num_pages, page_size, num_kv_heads, head_dim]."""
        keys, values = self.data[index]
        return keys, values

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool, for the memory ledger."""
        return self.data.numel() * self.data.itemsize


class PageAllocator:
    """Free list of page ids on the host; O(1) a page. Last freed is first used: its bytes are the likeliest
    to be warm.

    num_pages counts the dummy page 0, which is never given out: total == num_pages - 1.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "page 0 is the dummy page, at least one more is needed"
        self.total = num_pages - 1
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))  # a stack: pop() gives page 1 first
        self._is_free = bytearray(b"\x01" * num_pages)
        self._is_free[DUMMY_PAGE] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self, num_pages: int) -> list[int] | None:
        """Take num_pages pages, or none at all: None when there are fewer."""
        assert num_pages >= 0
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. A page that is free already, or the dummy page, is a bug of the caller."""
        for page in pages:
            assert DUMMY_PAGE < page <= self.total, f"page {page} is not one of this pool's"
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = 1
            self._free.append(page)
