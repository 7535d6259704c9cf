"""`LLM` as a user sees it: text in and out, stop strings, seeds, bad input, and one bad request among good ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from minisgl import LLM, SamplingParams
from minisgl.core import FinishReason
from minisgl.engine.score import token_logprobs
from tests.e2e.model_factory import EOS, make_model, make_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    make_model(path, "qwen3_moe")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", num_pages=200)


def test_the_readme_example(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    outputs = llm.generate(["hello world", "The quick brown fox"], params)
    assert [o.prompt for o in outputs] == ["hello world", "The quick brown fox"]
    assert all(len(o.token_ids) <= 10 for o in outputs)
    assert all(o.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for o in outputs)
    assert llm.generate("hello world", params)[0].text == outputs[0].text


def test_stream_equals_generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    assert "".join(llm.stream("hello", params)) == llm.generate("hello", params)[0].text


def test_two_streams_in_turns_do_not_disturb_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [output.text for output in llm.generate(["first", "second"], params)]
    first, second = llm.stream("first", params), llm.stream("second", params)
    texts = ["", ""]
    for pieces in itertools.zip_longest(first, second, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces)]
    assert texts == alone


def test_an_abandoned_stream_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert stats.pages_free + stats.pages_evictable == stats.pages_total


def test_seed_decides_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
    alone = llm.generate("a prompt", params)[0].token_ids
    others = [SamplingParams(temperature=1.0, seed=i, max_tokens=24, top_k=5 * i) for i in range(5)]
    crowd = llm.generate(["x", "yy", "a prompt", "zzz", "w"], [*others[:2], params, *others[2:4]])
    assert crowd[2].token_ids == alone
    different = llm.generate(
        "a prompt", SamplingParams(temperature=1.0, seed=12, max_tokens=24, ignore_eos=True)
    )
    assert different[0].token_ids != alone


def test_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    free = llm.generate("tell", SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True))[0]
    readable = [c for c in free.text if c.isascii() and c.isprintable()]
    stop = readable[len(readable) // 2]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True, stop=stop)
    cut = llm.generate("tell", params)[0]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == free.text[: free.text.index(stop)]
    assert len(cut.token_ids) < len(free.token_ids)


def test_logprobs_of_greedy_tokens_are_the_best_ones(llm: LLM) -> None:
    output = llm.generate("ab", SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True))[0]
    assert output.logprobs is not None
    for token, logprobs in zip(output.token_ids, output.logprobs):
        assert logprobs.token_id == logprobs.top[0][0] == token
        assert logprobs.logprob == logprobs.top[0][1] <= 0


def test_penalties_act_across_steps(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, presence_penalty=100.0, ignore_eos=True)
    tokens = llm.generate("ab", params)[0].token_ids
    assert len(set(tokens)) == len(tokens), "no token may come twice"


def test_eos_ends_a_request(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", num_pages=50)
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={EOS: 1000.0})
    output = llm.generate("x", params)[0]
    assert (output.token_ids, output.finish_reason, output.text) == ([EOS], FinishReason.STOP, "")


def test_bad_prompts_are_refused_by_number_and_nothing_starts(llm: LLM) -> None:
    for prompt, words in (("", "empty"), ([], "empty"), ([99999], "vocabulary"), ("x" * 600, "context")):
        with pytest.raises(ValueError, match=words) as error:
            llm.generate(["fine", prompt], SamplingParams(max_tokens=3))  # type: ignore[list-item]
        assert "prompt 1" in str(error.value)
    assert not llm.scheduler.has_work
    assert (
        llm.generate("fine", SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason
        is FinishReason.LENGTH
    )


def test_pool_too_small_names_the_number_that_would_do(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", num_pages=3, page_size=16)
    with pytest.raises(ValueError, match="--num-pages to at least 8"):
        llm.generate([make_prompts([100])[0]])


def test_bad_models_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM"):
        LLM(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match="no-such-folder"):
        LLM("./no-such-folder", device="cpu")


def test_dummy_weights_need_only_the_config(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    llm = LLM(str(tmp_path), device="cpu", dummy_weight=True, num_pages=50)
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    with pytest.raises(ValueError, match="token ids"):
        llm.generate("text")


def test_routing_is_recorded(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", num_pages=50, record_routing=True)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert llm.trace is not None
    ids = llm.trace.ids()
    assert ids.shape == (3 + 3, 3, 2), (
        "three prompt tokens, three of the four new ones, three layers, two experts"
    )
    assert llm.trace.counts().sum() == ids.size


def test_scores_equal_hugging_face(folder: Path, llm: LLM) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = make_prompts([90])[0]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(token_logprobs(llm.engine, ids, chunk=32), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="2 to 512"):
        token_logprobs(llm.engine, [1])
