"""One Mixture-of-Experts layer, step by step, small enough to check by hand.

    python examples/moe_walkthrough.py

T=5 tokens of D=64 numbers meet E=8 experts of F=48 hidden units; each token uses k=2 of them. Step 1 decides which, step 2
computes what that means in the plainest way, step 3 shows how a GPU regroups the work, and step 4 checks that the Triton
kernels of step 3 say the same as step 2. Without a GPU they run in Triton's interpreter, one program after the other.
"""

from __future__ import annotations

import os
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which the next lines do

from minisgl.moe.base import activate, select_experts  # noqa: E402
from minisgl.moe.fused import FusedMoeBackend, moe_align_block_size  # noqa: E402
from minisgl.moe.torch_backend import TorchMoeBackend  # noqa: E402

T, D, F, E, K = 5, 64, 48, 8, 2
BLOCK_M = 4  # rows that one GPU program multiplies at once; real kernels use 16 to 128
LARGEST_ERROR = 1e-5


def routing(gating_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the k best, and their probabilities rescaled to sum to 1."""
    weights, ids = select_experts(gating_output, K, renormalize=True)
    print("1. Routing: the router's logits [T, E] say which experts a token uses, and how much of each")
    print("   routing", ids.tolist())
    print("   weights", [[round(weight, 3) for weight in row] for row in weights.tolist()])
    print(
        f"   Token 0 uses experts {ids[0, 0]} and {ids[0, 1]}. A pair (token, k) is called a route: {T * K} here.\n"
    )
    return weights, ids


def one_token(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The whole layer for one token, by hand. gate_up[e] holds F rows of gate, then F rows of up."""
    y = torch.zeros(D)
    for expert, weight in zip(ids.tolist(), weights, strict=True):
        hidden = activate(gate_up[expert] @ x, "silu")  # silu(gate @ x) * (up @ x)
        y += weight * (down[expert] @ hidden)
    return y


def definition(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, gating_output: torch.Tensor
) -> None:
    weights, ids = select_experts(gating_output, K, renormalize=True)
    y = TorchMoeBackend().forward(x, gate_up, down, gating_output, K, renormalize=True)
    by_hand = one_token(x[0], gate_up, down, ids[0], weights[0])
    print("2. Meaning: y = sum over k of  weight * down(silu(gate x) * up x)")
    print(f"   token 0 by hand  {[round(v, 4) for v in by_hand[:4].tolist()]} ...")
    print(f"   torch backend    {[round(v, 4) for v in y[0, :4].tolist()]} ...\n")


def alignment(ids: torch.Tensor) -> None:
    """Token order is wrong for a GPU: it would read an expert's weights once for each of its tokens.

    So routes are sorted by expert, and each expert's run is padded to whole blocks. Then a block needs one expert, and one
    read of a tile of weights serves all of its rows. A padding row holds the number of routes, which is no route.
    """
    sorted_ids, block_experts = moe_align_block_size(ids, BLOCK_M, E)
    print(f"3. Alignment: routes sorted by expert, in blocks of {BLOCK_M}; {T * K} marks a padding row")
    print("   sorted ids   ", sorted_ids.tolist())
    print("   block experts", block_experts.tolist())
    for block, expert in enumerate(block_experts.tolist()):
        routes = [r for r in sorted_ids[block * BLOCK_M :][:BLOCK_M].tolist() if r < T * K]
        print(f"   block {block} reads expert {expert} for tokens {[route // K for route in routes]}")
    print()


def kernels(gate_up: torch.Tensor, down: torch.Tensor, num_tokens: int) -> float:
    """Largest difference between the Triton kernels and the definition, on fresh random tokens."""
    x, gating_output = torch.randn(num_tokens, D), torch.randn(num_tokens, E)
    tensors = [tensor.to(DEVICE) for tensor in (x, gate_up, down, gating_output)]
    fused = FusedMoeBackend().forward(*tensors, K, renormalize=True)
    reference = TorchMoeBackend().forward(*tensors, K, renormalize=True)
    error = (fused - reference).abs().max().item()
    where = "on the GPU" if DEVICE == "cuda" else "in the interpreter"
    print(f"4. Kernels: align, gate_up with its activation, down, then a sum over k in fixed order ({where})")
    print(
        f"   {num_tokens} tokens: fused against reference, largest error {error:.1e} (allowed {LARGEST_ERROR:.0e})"
    )
    return error


def main() -> int:
    torch.manual_seed(0)
    x, gating_output = torch.randn(T, D), torch.randn(T, E)
    gate_up, down = torch.randn(E, 2 * F, D) * D**-0.5, torch.randn(E, D, F) * F**-0.5
    _, ids = routing(gating_output)
    definition(x, gate_up, down, gating_output)
    alignment(ids)
    return 0 if kernels(gate_up, down, num_tokens=37) < LARGEST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
