"""Running the teacher for a given time, while worker processes decode and clean what it wrote."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer

from .clean import Document, clean_batch, start_worker
from .prompts import Prompt, draw_prompts
from .teacher import Sampler, SamplingRules, Splitter, Teacher, Written
from .tokenizer import TURN_END, chat_text

Item = TypeVar("Item")

#: The teacher writes plainer and better for this reader. One prompt in four goes without it, for grown-up prose.
TEACHER_SYSTEM = "You are a kind teacher who writes for young children. You use short sentences and simple, everyday words."


@dataclass(frozen=True)
class SampleRules:
    """How long and how wide the teacher runs. `seconds` counts everything from loading the weights."""

    seconds: float
    batch: int = 4096
    chunk: int = 256
    num_prompts: int = 400_000
    workers: int = 12
    seed: int = 1


@dataclass
class Sampled:
    """What came out, and how fast."""

    documents: list[Document] = field(default_factory=list)
    written: int = 0
    tokens: int = 0
    seconds: float = 0.0


def teacher_prompt(prompt: Prompt, index: int) -> str:
    """The text that the teacher continues."""
    messages = [] if index % 4 == 0 else [{"role": "system", "content": TEACHER_SYSTEM}]
    return chat_text([*messages, {"role": "user", "content": prompt.text}]) + "<|im_start|>assistant\n"


def sample(
    folder: Path, rules: SampleRules, device: torch.device, say: Callable[[str], None] = print
) -> Sampled:
    """Documents that the Llama checkpoint in `folder` writes within `rules.seconds`."""
    begin = time.monotonic()
    result, seen = Sampled(), set()

    def receive(documents: list[Document]) -> None:
        for document in documents:
            if (key := hash(document.text[:80])) not in seen:
                seen.add(key)
                result.documents.append(document)

    tokenizer_path = str(folder / "tokenizer.json")
    context = multiprocessing.get_context("spawn")
    with context.Pool(rules.workers, start_worker, (tokenizer_path,)) as pool:
        prompts = draw_prompts(rules.num_prompts, rules.seed)
        tokenizer = Tokenizer.from_file(tokenizer_path)
        texts = [teacher_prompt(prompt, index) for index, prompt in enumerate(prompts)]
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        pending = []
        for written in _written(folder, ids, tokenizer, rules, begin, device, result, say):
            tasks = [(prompts[w.prompt].kind, prompts[w.prompt].text, w.tokens, w.cut) for w in written]
            result.written += len(tasks)
            pending += [
                pool.apply_async(clean_batch, (part,), callback=receive) for part in _parts(tasks, 256)
            ]
        for task in pending:
            task.get()  # raises what a worker raised
    result.seconds = time.monotonic() - begin
    for document in result.documents[1000:1003]:
        say(f"a text of the teacher: {document}")
    return result


def _written(
    folder: Path, ids: list[list[int]], tokenizer: Tokenizer, rules: SampleRules, begin: float, device: torch.device,
    result: Sampled, say: Callable[[str], None],
) -> Iterator[list[Written]]:  # fmt: skip
    """Finished texts, chunk by chunk. The host splits one chunk while the device writes the next."""
    ends = (tokenizer.token_to_id(TURN_END), tokenizer.token_to_id("<|endoftext|>"))
    on_gpu = device.type == "cuda"
    teacher = Teacher(folder, device, torch.bfloat16 if on_gpu else torch.float32)
    sampler = Sampler(teacher, ids, rules.batch, rules.chunk, SamplingRules(end_tokens=ends))
    splitter = Splitter([len(prompt) for prompt in ids], rules.batch)
    if on_gpu:
        torch.manual_seed(rules.seed)
        for _ in range(3):
            sampler.advance()
        sampler.capture()
        sampler.rewind()
    records, chunks, last = None, 0, time.monotonic()
    while time.monotonic() - begin < rules.seconds:
        sampler.launch_chunk()
        if records is not None:
            yield list(splitter.split(*records))
        records = sampler.records()
        chunks += 1
        now = time.monotonic()
        result.tokens = chunks * rules.chunk * rules.batch
        speed = rules.chunk * rules.batch / (now - last)
        kept = f"{len(result.documents)}/{result.written} texts kept"
        say(f"sampled {result.tokens / 1e6:.1f}M tokens, {speed / 1e3:.0f}k/s, {kept}")
        last = now
        if result.written > 20_000 and len(result.documents) < 0.2 * result.written:
            raise ValueError(
                "the filter drops nearly everything that the teacher writes: look at its texts before going on"
            )
    if records is not None:
        yield list(splitter.split(*records))


def _parts(items: list[Item], size: int) -> Iterator[list[Item]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
