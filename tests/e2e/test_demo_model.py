"""The bundled demo model as transformers reads it: shape, size, quality beside its baselines, and legible samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo.clean import repeats
from tools.demo.evaluate import read_pieces, score_model
from tools.train_demo import main as train_demo

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "python" / "minisgl" / "assets" / "demo"
RECORD = json.loads((ROOT / "benchmark" / "results" / "demo_training.json").read_text())


@pytest.fixture(scope="module")
def demo():
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(FOLDER)


def test_looks_like_the_big_ones_and_stays_small(demo):
    config = demo[0].config
    assert type(demo[0]).__name__ == "Qwen3MoeForCausalLM"
    assert config.num_experts >= 32 and config.num_experts_per_tok >= 4 and config.norm_topk_prob
    assert config.mlp_only_layers == [] and config.decoder_sparse_step == 1
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 20_000_000


def test_held_out_score_is_the_recorded_one_and_beats_the_baselines(demo):
    model, tokenizer = demo
    pieces = read_pieces(ROOT / "tests" / "data" / "heldout.txt")
    assert max(len(tokenizer.encode(piece)) for piece in pieces) < model.config.max_position_embeddings
    score = score_model(lambda tokens: model(tokens).logits, tokenizer.encode, pieces)
    recorded = RECORD["held_out_file"]
    assert score["bits_per_byte"] == pytest.approx(recorded["bits_per_byte"], rel=1e-4)
    assert score["bits_per_byte"] < 0.8 * recorded["ngram5"] < recorded["bz2"]
    assert f"**{score['bits_per_byte']:.3f}**" in (FOLDER / "README.md").read_text()


def test_samples_are_words_without_loops(demo):
    model, tokenizer = demo
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a short story about a baker."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    tokens = torch.tensor([tokenizer.encode(text)] * 8)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=96,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=0,
    )
    texts = [tokenizer.decode(row[tokens.shape[1] :], skip_special_tokens=True) for row in output]
    words = [text.lower().replace(".", "").replace(",", "").split() for text in texts]
    assert sum(repeats(w) for w in words) <= 1
    common = {
        "the",
        "a",
        "and",
        "to",
        "of",
        "was",
        "in",
        "he",
        "she",
        "her",
        "his",
        "it",
        "they",
        "that",
        "with",
        "you",
        "for",
    }
    assert all(0.15 < sum(word in common for word in w) / len(w) < 0.7 for w in words)


def test_script_runs_from_scratch(tmp_path):
    train_demo(["--smoke", "--out", str(tmp_path)])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["training"]["lines"][-1]["loss"] < metrics["training"]["lines"][0]["loss"]
    assert len(metrics["routing"]) == 2 and metrics["held_out_file"]["bits_per_byte"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) == metrics["model"]["parameters"]
    assert (tmp_path / "model" / "README.md").read_text().count("\n## ") == 5
