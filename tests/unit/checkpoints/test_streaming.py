"""Quantizing while loading holds the quantized experts, the dense weights and a bounded rest: measured in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.models.checkpoints.readahead import LIMIT, read_ahead

MB = 10**6
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512, "intermediate_size": 512, "head_dim": 64,
    "moe_intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 1024, "num_experts": 24, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "norm_topk_prob": True, "torch_dtype": "bfloat16",
}  # fmt: skip

LOAD = """
import json, resource, sys
from pathlib import Path
import torch
from minisgl.attention import make_attention
from minisgl.models.decoder import Decoder
from minisgl.models.experts import resident_moe
from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder, cpu = Path(sys.argv[1]), torch.device("cpu")
spec = ModelSpec.from_folder(folder)
factory = resident_moe(spec, weight_format=sys.argv[2], device=cpu, dtype=torch.bfloat16)
decoder = Decoder(spec, lambda p: make_attention("sdpa", p, cpu), page_size=16, device=cpu, dtype=torch.bfloat16,
                  moe_factory=factory)
torch.ones(2**22).to(torch.float8_e4m3fn)  # what torch itself takes at its first use
before = peak()
load_weights(decoder, folder)
experts = sum(layer.store.bytes().device for layer in decoder.moe_layers().values())
dense = sum(p.nbytes for p in decoder.parameters())
print(json.dumps({"grown": peak() - before, "experts": experts, "dense": dense}))
"""

ENGINE = """
import json, resource, sys
from pathlib import Path
import torch
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.ones(2**22).to(torch.float8_e4m3fn)
torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
options = {"device": "cpu", "dtype": "bfloat16", "num_pages": 4, "moe_expert_quantization": sys.argv[2]}
options |= {"moe_expert_offload": True, "moe_expert_cache_size": "2", "max_running_requests": 2, "max_prefill_length": 16}
config = EngineConfig.from_kwargs(model=sys.argv[1], **options, **json.loads(sys.argv[3]))
before = peak()
engine = Engine(config, Path(sys.argv[1]))
ledger = engine.ledger()
print(json.dumps({"grown": peak() - before, "experts": ledger.line("experts on the host"), "total": ledger.total}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """302 MB of bf16 experts, one tensor an expert."""
    path = tmp_path_factory.mktemp("model")
    dim, hidden, tensors = 512, 512, {}
    one = torch.randn(hidden, dim, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for layer in range(CONFIG["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        for expert in range(CONFIG["num_experts"]):
            for part in ("gate", "up", "down"):
                tensors[f"{base}.mlp.experts.{expert}.{part}_proj.weight"] = one.clone()
        attention = {"q": (512, dim), "k": (128, dim), "v": (128, dim), "o": (dim, 512)}
        tensors |= {
            f"{base}.self_attn.{n}_proj.weight": torch.ones(s).bfloat16() for n, s in attention.items()
        }
        tensors |= {f"{base}.self_attn.{n}_norm.weight": torch.ones(64).bfloat16() for n in "qk"}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"{base}.{n}.weight": torch.ones(dim).bfloat16() for n in norms}
        tensors[f"{base}.mlp.gate.weight"] = torch.ones(CONFIG["num_experts"], dim).bfloat16()
    tensors["model.norm.weight"] = torch.ones(dim).bfloat16()
    tensors |= {n: torch.ones(1024, dim).bfloat16() for n in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
def test_peak_memory(folder: Path, weight_format: str) -> None:
    numbers = measure(LOAD, str(folder), weight_format)
    assert numbers["experts"] > 70 * MB
    least = numbers["experts"] + numbers["dense"]
    assert 0.9 * least < numbers["grown"] < least + LIMIT + 16 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.parametrize(
    "options", [{}, {"quantize_dense": "fp8", "embedding_on_host": True}], ids=["plain", "fp8"]
)
def test_peak_memory_of_an_engine_with_offload(folder: Path, options: dict) -> None:
    """Experts in host memory, slots, dense weights and pages, which the ledger counts, and what is read ahead."""
    numbers = measure(ENGINE, str(folder), "fp8", json.dumps(options))
    assert numbers["experts"] > 140 * MB
    assert 0.9 * numbers["experts"] < numbers["grown"] < numbers["total"] + LIMIT + 16 * MB


def measure(code: str, *arguments: str) -> dict[str, int]:
    """What a process of its own prints. A shell starts it: who is started by this process has its ru_maxrss from the start."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root / "python"), "OMP_NUM_THREADS": "1"}
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# --- reading ahead ---------------------------------------------------------------------------------------------------


def test_results_come_in_order_and_within_the_bound() -> None:
    waiting, most = [], 0

    def read(job: int) -> int:
        waiting.append(job)
        return job * job

    for job, result in read_ahead(range(50), read, lambda job: 10, limit=40):
        assert result == job * job
        most = max(most, len(waiting) - job)
    assert most <= 5


def test_a_job_larger_than_the_bound_is_read_alone() -> None:
    assert [r for _, r in read_ahead([5, 500, 5], lambda job: job, lambda job: job, limit=10)] == [5, 500, 5]


def test_an_error_comes_where_its_result_would() -> None:
    def read(job: int) -> int:
        if job == 3:
            raise ValueError("damaged")
        return job

    jobs = read_ahead(range(9), read, lambda job: 1, limit=2)
    assert [next(jobs)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="damaged"):
        next(jobs)
