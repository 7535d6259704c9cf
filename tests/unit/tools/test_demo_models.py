"""The demo's two models against transformers: the student's logits and gradients, the teacher's lockstep decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tools.demo.evaluate import model_bits
from tools.demo.student import Student, StudentConfig, save_hf
from tools.demo.teacher import Sampler, SamplingRules, Splitter, Teacher
from tools.demo.train import TrainRules, learning_rate, train

TINY = StudentConfig(
    vocab_size=120, hidden=32, num_layers=2, head_dim=16, num_experts=8, top_k=4, expert_hidden=16, context=64
)


def shaken_student() -> Student:
    """A tiny student whose every weight matters, norms included."""
    model = Student(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
    return model


def test_student_is_qwen3_moe(tmp_path):
    student = shaken_student()
    save_hf(student, tmp_path, torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(reference).__name__ == "Qwen3MoeForCausalLM"
    tokens = torch.randint(120, (2, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = reference(inputs).logits
    torch.testing.assert_close(student.logits(inputs), expected, rtol=1e-4, atol=1e-4)

    loss, balance, counts = student(inputs, targets)
    loss.backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    layer = reference.model.layers[1]
    torch.testing.assert_close(
        student.embedding.grad, reference.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        student.blocks[1].gate_up.grad, layer.mlp.experts.gate_up_proj.grad, rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(
        student.blocks[1].router.grad, layer.mlp.gate.weight.grad, rtol=1e-3, atol=1e-5
    )
    assert counts.sum(1).tolist() == [64 * TINY.top_k] * 2
    assert balance >= 1


def test_student_writes_bf16_by_default(tmp_path):
    save_hf(shaken_student(), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_training_learns_a_pattern():
    stream = np.tile(np.arange(3, 43, dtype=np.uint16), 200)
    rules = TrainRules(seconds=60, batch=4, length=48, log_every=10, max_steps=40)
    torch.manual_seed(0)
    log = train(Student(TINY), stream, stream[:1000], rules, say=lambda _: None)
    assert log.steps == 40 and log.tokens == 40 * 4 * 48
    # The schedule follows the clock, so a busy machine learns at another rate: only that it learns is certain.
    assert log.lines[-1]["loss"] < 0.9 * log.lines[0]["loss"]


def test_learning_rate_rises_then_falls():
    rules = TrainRules(seconds=1, warmup_fraction=0.1)
    rates = [learning_rate(rules, progress / 100) for progress in range(101)]
    assert max(rates) == pytest.approx(rules.peak_rate) and rates.index(max(rates)) == 10
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(rules.peak_rate * rules.final_fraction)


def test_bits_of_a_uniform_model():
    bits, count = model_bits(lambda tokens: torch.zeros(1, tokens.shape[1], 16), [[1, 2, 3], [4]])
    assert (bits, count) == (pytest.approx(16.0), 4)


def test_teacher_writes_what_generate_writes(tmp_path):
    """Greedy with a repetition penalty: every text of the lockstep sampler equals `generate` on its prompt."""
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    config_path = tmp_path / "config.json"
    config_path.write_text(
        config_path.read_text().replace('"rope_parameters"', '"rope_theta": 10000.0, "rope_parameters"')
    )
    prompts = [torch.randint(3, 120, (length,)).tolist() for length in (3, 5, 4, 6, 3, 7, 8)]
    rules = SamplingRules((1, 2), window=24, temperature=1e-4, min_p=0.5, repetition_penalty=1.1)
    sampler = Sampler(
        Teacher(tmp_path, torch.device("cpu"), torch.float32), prompts, 3, chunk=16, rules=rules
    )
    splitter = Splitter([len(prompt) for prompt in prompts], 3)
    checked = 0
    for _ in range(8):  # 128 steps over rings of 24: rows wrap around and take prompts again
        sampler.launch_chunk()
        for written in splitter.split(*sampler.records()):
            prompt = torch.tensor([prompts[written.prompt]])
            output = reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_length=24,
                do_sample=False,
                repetition_penalty=1.1,
                eos_token_id=[1, 2],
                pad_token_id=0,
            )[0, prompt.shape[1] :].tolist()
            if not written.cut:
                assert output.pop() in (1, 2)
            assert written.tokens == output[: len(written.tokens)]
            assert written.cut or len(written.tokens) == len(output)
            checked += 1
    assert checked >= 14


def test_too_long_prompt_is_refused(tmp_path):
    teacher = Teacher.__new__(Teacher)  # only the prompt check runs
    teacher.embedding = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="does not fit"):
        Sampler(teacher, [[1] * 24], 1, chunk=4, rules=SamplingRules((0,), window=24))
