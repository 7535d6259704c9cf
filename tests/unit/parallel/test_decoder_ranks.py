"""A decoder shared by ranks gives the logits of one rank: heads, hidden dims, vocabulary and experts in every combination."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.models.decoder import Decoder
from minisgl.models.experts import build_moe_layer, expert_shape
from minisgl.models.loader import load_weights
from minisgl.models.slices import read_expert
from minisgl.models.spec import ModelSpec
from minisgl.moe.exchange import make_exchange
from minisgl.moe.formats import get_format
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.shard import ExpertShard, ExpertSpread
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.parallel import SOLO, Group, Shard
from tests.e2e.model_factory import make_model
from tests.unit.models.decoder_harness import CPU, PAGE_SIZE, Session, cpu_attention, load_decoder
from tests.unit.parallel.threads import ThreadGroup, on_ranks

PROMPTS = [[5, 6, 7, 8, 9], [250, 1, 99]]


def make_decoder(
    folder: Path, group: Group, spread: ExpertSpread | None = None, dispatch: str = "reduce"
) -> Decoder:
    spec = ModelSpec.from_folder(folder)
    factory = None
    if spread is not None:
        exchange = make_exchange(dispatch, spread, group, CPU)

        def factory(layer, moe):
            shard = spread.shard(group.rank, moe.hidden_dim)
            weights = get_format("none", torch.float32)
            store = ResidentStore(len(shard.experts), expert_shape(spec, shard), weights, CPU)
            parts = {"exchange": exchange, "shard": shard, "group": group}
            return build_moe_layer(spec, store, TorchMoeBackend(), device=CPU, dtype=torch.float32, **parts)

    decoder = Decoder(
        spec,
        cpu_attention,
        page_size=PAGE_SIZE,
        device=CPU,
        dtype=torch.float32,
        moe_factory=factory,
        group=group,
    )
    load_weights(decoder, folder)
    return decoder


def run(decoder: Decoder) -> torch.Tensor:
    """Logits of two prompts and one more token of each."""
    session = Session(decoder, 2, 16)
    with torch.inference_mode():
        first = session.step(list(enumerate(PROMPTS)))
        return torch.cat([first, session.step([(0, [3]), (1, [4])])])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama_bias", {}),
        ("llama_tied", {"vocab_size": 271}),
        ("qwen2", {"vocab_size": 273}),
        ("qwen3_moe", {}),
        ("qwen3_moe_mixed", {"num_key_value_heads": 1}),
        ("mixtral", {}),
    ],
)
def test_tensor_parallel_logits(tmp_path: Path, name: str, changes: dict, size: int) -> None:
    """Also with more ranks than key/value heads, and with a vocabulary that ranks can't share evenly."""
    make_model(tmp_path, name, fused_experts=name == "qwen3_moe", **changes)
    expected = run(load_decoder(tmp_path))
    outputs = on_ranks(size, lambda group: run(make_decoder(tmp_path, group)))
    for logits in outputs:
        assert torch.equal(logits, outputs[0])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("kind", "replicated", "dispatch"),
    [("contiguous", (), "reduce"), ("round-robin", (5, 2), "dynamic"), ("round-robin", (1,), "static")],
)
def test_expert_parallel_logits(
    tmp_path: Path, fused: bool, kind: str, replicated: tuple[int, ...], dispatch: str
) -> None:
    make_model(tmp_path, "qwen3_moe", fused_experts=fused)
    expected = run(load_decoder(tmp_path))
    spread = ExpertSpread(8, 2, kind, replicated)  # type: ignore[arg-type]
    for logits in on_ranks(2, lambda group: run(make_decoder(tmp_path, group, spread, dispatch))):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_a_rank_reads_only_what_it_holds(tmp_path: Path, fused: bool) -> None:
    make_model(tmp_path, "qwen3_moe", fused_experts=fused, num_key_value_heads=4)
    spread = ExpertSpread(8, 4, "round-robin")

    def read(group: ThreadGroup, spread: ExpertSpread | None) -> tuple[int, int]:
        decoder = make_decoder(tmp_path, group, spread)
        report = load_weights(decoder, tmp_path)
        held = sum(p.nbytes for p in decoder.parameters())
        return report.num_bytes, held + sum(m.store.bytes().device for m in decoder.moe_layers().values())

    whole = load_weights(load_decoder(tmp_path), tmp_path).num_bytes
    for case in (None, spread):
        for num_read, num_held in on_ranks(4, lambda group, case=case: read(group, case)):
            assert num_read <= num_held < whole * 0.3


class View:
    """What safetensors gives for one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensor[index]


@pytest.mark.parametrize("fused", [True, False])
def test_biases_of_experts_add_up_once(fused: bool) -> None:
    """gate and up biases are cut with F; that of down comes from one rank alone."""
    shards = [ExpertShard(3, (0, 1, 2), Shard(4, rank, 2), adds_down_bias=rank == 0) for rank in range(2)]
    lead = (3,) if fused else ()
    down, gate_up = torch.randn(*lead, 6), torch.randn(*lead, 8)
    parts = [read_expert(View(down), "down_bias", fused, shard) for shard in shards]
    assert torch.equal(sum(parts), down) and not parts[1].any()  # type: ignore[arg-type]
    parts = [read_expert(View(gate_up), "gate_up_bias", fused, shard) for shard in shards]
    gates, ups = zip(*(part.chunk(2, dim=-1) for part in parts))
    assert torch.equal(torch.cat([*gates, *ups], dim=-1), gate_up)


def test_sizes_of_a_checkpoint_are_checked_before_it_is_cut(tmp_path: Path) -> None:
    """An expert of twice the width would give a slice of the right shape."""
    make_model(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"moe_intermediate_size": 64', '"moe_intermediate_size": 32')
    )
    with pytest.raises(ValueError, match=r"experts.*expected 32 elements in dim"):
        on_ranks(2, lambda group: make_decoder(tmp_path, group))


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "6 heads and 2 key/value heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "12 heads and 3 key/value heads"),
        ({"moe_intermediate_size": 30}, 4, "does not divide the experts' hidden dim 30"),
        ({"intermediate_size": 97, "mlp_only_layers": [0]}, 2, "does not divide the MLP's hidden dim 97"),
    ],
)
def test_what_ranks_cannot_share_is_refused(tmp_path: Path, changes: dict, size: int, words: str) -> None:
    make_model(tmp_path, "qwen3_moe", **changes)
    with pytest.raises(ValueError, match=words):
        on_ranks(size, lambda group: make_decoder(tmp_path, group))


def test_one_rank_is_the_decoder_without_a_group(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    assert torch.equal(run(make_decoder(tmp_path, SOLO)), run(load_decoder(tmp_path)))
