"""The student's tokenizer: byte-level BPE with ChatML tokens, written as transformers reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2

_SPECIAL_PATTERN = re.compile("|".join(map(re.escape, SPECIAL)))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_text(messages: list[dict[str, str]]) -> str:
    """What `CHAT_TEMPLATE` renders for a finished conversation."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, digits stay single as in Qwen's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (
        piece for text in texts for piece in _SPECIAL_PATTERN.split(text) if piece
    )  # else "im_start" earns a token
    tokenizer.train_from_iterator(pieces, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gave only {tokenizer.get_vocab_size()} of {vocab_size} tokens: use more text"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """tokenizer.json (without indentation: it ships in the wheel) and tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False), encoding="utf-8"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
