"""How likely a model finds a given text: log-probabilities of its tokens, for perplexity and for comparing formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.attention import AttentionBatch, LayerCache
from minisgl.engine.engine import Engine
from minisgl.kvcache import KVPool
from minisgl.models.decoder import DecoderInput


@torch.inference_mode()
def token_logprobs(engine: Engine, token_ids: Sequence[int], chunk: int = 1024) -> torch.Tensor:
    """float32 [T - 1] on the CPU: log p(token i | tokens before it) for i = 1 .. T - 1.

    Computed in chunks on pages of its own, so a running scheduler is not disturbed. Raises ValueError for a text that does not
    fit the context or has fewer than two tokens.
    """
    num_tokens = len(token_ids)
    if not 2 <= num_tokens <= engine.max_seq_len:
        raise ValueError(f"{num_tokens} tokens cannot be scored: give 2 to {engine.max_seq_len}")
    if engine.group.size > 1:
        raise ValueError(
            "scoring runs outside of the scheduler, on one rank: use --tp 1, or ask for prompt_logprobs"
        )
    spec, device, page_size = engine.spec, engine.device, engine.config.cache.page_size
    num_pages = -(-num_tokens // page_size)
    heads, dtype = engine.kv_pool.data.shape[-2], engine.dtype
    pool = KVPool(spec.num_layers, num_pages + 1, page_size, heads, spec.head_dim, dtype, device)
    caches = [LayerCache(*pool.layer(i)) for i in range(spec.num_layers)]
    table_BP = torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None]
    ids_T = torch.tensor(token_ids, dtype=torch.int64, device=device)
    out = []
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        positions_T = torch.arange(start, end, device=device)
        batch = AttentionBatch(
            cu_q_B1=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            kv_lens_B=torch.tensor([end], dtype=torch.int32, device=device),
            page_table_BP=table_BP,
            write_slots_T=positions_T + page_size,
            max_q_len=end - start,
            max_kv_len=end,
        )
        step = DecoderInput(ids_T[start:end], positions_T, batch, engine.decoder.plan(batch))
        logprobs = engine.decoder(step, caches).log_softmax(dim=-1)
        targets = ids_T[start + 1 : end + 1]
        out.append(logprobs[: len(targets)].gather(1, targets[:, None])[:, 0].cpu())
    return torch.cat(out)
