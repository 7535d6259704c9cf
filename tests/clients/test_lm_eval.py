"""lm-eval on tasks of our own, against the bundled model: endings to choose from, likelihood of a text, generation."""

from __future__ import annotations

import json
import pathlib

import httpx
import pytest

pytest.importorskip("lm_eval")
import yaml

# (beginning, the ending a reader expects, the same words where nobody expects them)
STORIES = [
    ("The boy was hungry, so he went to the", " kitchen to eat some food.", " food some eat to kitchen."),
    ("The sun is very big and very", " hot, and it gives us light.", " light, us gives it and hot."),
    ("One day, a little girl found a", " small cat in the garden.", " the in cat small garden."),
    ("Water is important because all plants and animals", " need it to live.", " live to it need."),
    ("She opened the book and began to", " read the first page.", " page first the read."),
    ("At night we can see the moon and the", " stars in the sky.", " in stars sky the."),
]
MULTIPLE_CHOICE = {
    "task": "endings",
    "output_type": "multiple_choice",
    "doc_to_text": "{{beginning}}",
    "doc_to_choice": "{{[right, wrong]}}",
    "doc_to_target": 0,
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
PERPLEXITY = {
    "task": "text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{beginning + right}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
GENERATION = {
    "task": "continue",
    "output_type": "generate_until",
    "doc_to_text": "{{beginning}}",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture
def results(demo_url, tmp_path, monkeypatch):
    """What lm-eval finds out with the task given, samples included."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    lines = [json.dumps(dict(zip(("beginning", "right", "wrong"), story))) for story in STORIES]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines))

    def evaluate(task: dict) -> dict:
        import lm_eval
        from lm_eval.tasks import TaskManager

        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "stories.jsonl")}},
        }
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump({**data, "test_split": "test", **task}))
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "demo",
                "base_url": f"{demo_url}/v1/completions",
                "max_length": 512,
                "num_concurrent": 2,
            },
            tasks=[task["task"]],
            task_manager=TaskManager(include_path=str(pathlib.Path(tmp_path)), include_defaults=False),
            bootstrap_iters=0,
        )

    return evaluate


def test_endings_are_told_apart(results):
    found = results(MULTIPLE_CHOICE)["results"]["endings"]
    assert found["acc,none"] == found["acc_norm,none"] == 1.0


def test_likelihood_of_a_text_is_that_of_echoed_logprobs(results, demo_url):
    bits = results(PERPLEXITY)["results"]["text"]["bits_per_byte,none"]
    total, size = 0.0, 0
    info = httpx.get(f"{demo_url}/tokenizer_info").json()
    for beginning, right, _ in STORIES:
        text = beginning + right
        # lm-eval puts the end token in front, so that the first token has a likelihood, too
        body = {"prompt": info["eos_token"] + text, "echo": True, "logprobs": 0, "max_tokens": 0}
        lists = httpx.post(f"{demo_url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
        total += sum(lists["token_logprobs"][1:])
        size += len(text.encode())
    assert bits == pytest.approx(-total / size / 0.6931471805599453, rel=1e-3)
    assert 0.5 < bits < 2.5


def test_generating_until_a_stop_string(results, demo_url):
    samples = results(GENERATION)["samples"]["continue"]
    assert len(samples) == len(STORIES)
    for sample in samples:
        body = {"prompt": sample["doc"]["beginning"], "temperature": 0, "max_tokens": 12, "stop": ["."]}
        answer = httpx.post(f"{demo_url}/v1/completions", json=body).json()["choices"][0]["text"]
        assert sample["resps"][0][0] == answer
