"""Triton kernels of the MoE layer. They see slots and rows, never experts, ranks, hosts or caches.

router     logits -> ids and weights, one launch           align     routes sorted by slot, one launch
grouped    any number of tokens, blocks of BLOCK_M rows     direct    decode: one program a route and rows of weights
quantize   rows to fp8                                      reduce    weighted sum over k
tiles      how a tile of each weight format becomes numbers
"""
