"""Log-probabilities of prompts, against a model predictable by hand: chunks, a warm cache, preemption, max_tokens=0."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.config import SchedulerConfig
from minisgl.core import FinishReason, Request, SamplingParams, StepOutput
from minisgl.engine.step import Chunk, ScoreSpec
from minisgl.engine.wire import decode_chunks, encode_chunks
from minisgl.kvcache import make_prefix_cache
from minisgl.kvcache.pool import PageAllocator
from minisgl.scheduler.pages import PageManager
from minisgl.scheduler.scheduler import Scheduler
from tests.paged_fake import PagedFake, expected_continuation, expected_scores


def make(num_pages: int, page_size: int, **config) -> tuple[Scheduler, PagedFake]:
    options = SchedulerConfig(**config)
    runner = PagedFake(num_pages, page_size, options.max_running_requests)
    pages = PageManager(PageAllocator(num_pages), make_prefix_cache("radix", page_size))
    return Scheduler(runner, pages, options), runner


def request(name: str, prompt: list[int], max_tokens: int, scored: bool = True) -> Request:
    return Request(
        name, tuple(prompt), SamplingParams(max_tokens=max_tokens, prompt_logprobs=1 if scored else None)
    )


def drain(scheduler: Scheduler) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(5000):
        for output in scheduler.step():
            outputs.setdefault(output.request_id, []).append(output)
        if not scheduler.has_work:
            break
    stats = scheduler.stats()
    assert stats.pages_free + stats.pages_evictable == stats.pages_total
    return outputs


def check(outputs: list[StepOutput], prompt: list[int], max_tokens: int, scored: bool = True) -> None:
    first, *rest = outputs
    assert first.prompt_logprobs == (tuple(expected_scores(prompt, 97)) if scored else None)
    assert all(output.prompt_logprobs is None for output in rest), "once, with the first output"
    tokens = [output.token_id for output in outputs if output.token_id is not None]
    assert tokens == expected_continuation(prompt, max_tokens, 97)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 5, 64])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_whole_prompts_in_chunks_of_any_size(overlap: bool, budget: int, max_tokens: int) -> None:
    scheduler, _ = make(40, 4, max_running_requests=8, max_prefill_length=budget, disable_overlap=not overlap)
    prompts = {f"r{i}": [(5 * i + j) % 97 for j in range(i + 1)] for i in range(12)}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, max_tokens))
    for name, outputs in drain(scheduler).items():
        check(outputs, prompts[name], max_tokens)


def test_a_warm_cache_hides_nothing_and_is_used_by_who_does_not_ask() -> None:
    scheduler, runner = make(40, 4, max_running_requests=8, max_prefill_length=64)
    prompt = list(range(17))
    scheduler.add(request("cold", prompt, 2, scored=False))
    drain(scheduler)
    runner.steps.clear()
    scheduler.add(request("scored", prompt, 2))
    check(drain(scheduler)["scored"], prompt, 2)
    assert runner.steps[0] == [(0, 17)]
    runner.steps.clear()
    scheduler.add(request("warm", prompt, 2, scored=False))
    check(drain(scheduler)["warm"], prompt, 2, scored=False)
    assert runner.steps[0] == [(0, 1)]


def test_no_tokens_warm_the_cache() -> None:
    scheduler, _ = make(40, 4, max_running_requests=8, max_prefill_length=64)
    scheduler.add(request("first", list(range(9)), 0, scored=False))
    (output,) = drain(scheduler)["first"]
    assert (output.token_id, output.finish_reason) == (None, FinishReason.LENGTH)
    assert scheduler.stats().generated_tokens == 0
    scheduler.add(request("second", list(range(9)), 1, scored=False))
    assert drain(scheduler)["second"][0].num_cached_tokens == 8


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_life(data: st.DataObject) -> None:
    """Pools so small that requests are preempted, some in the middle of their prompt."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    scheduler, _ = make(
        data.draw(st.integers(24, 60)) // page_size + 1,
        page_size,
        max_running_requests=data.draw(st.integers(1, 6)),
        max_prefill_length=data.draw(st.integers(1, 20)),
        disable_overlap=data.draw(st.booleans()),
    )
    asked = {}
    for number in range(data.draw(st.integers(1, 10))):
        tail = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
        prompt = list(range(data.draw(st.integers(0, 10)))) + tail
        asked[f"r{number}"] = (prompt, data.draw(st.integers(0, 6)), data.draw(st.booleans()))
        scheduler.add(request(f"r{number}", *asked[f"r{number}"]))
    outputs = drain(scheduler)
    assert outputs.keys() == asked.keys()
    for name, wanted in asked.items():
        check(outputs[name], *wanted)


def test_other_ranks_learn_how_much_is_scored() -> None:
    chunks = [
        Chunk(0, 3, 2, [7, 8], 0, [4], None, ScoreSpec([8, 9], 5)),
        Chunk(1, 0, 1, None, 0, [], None),
    ]
    first, second = decode_chunks(encode_chunks(chunks))
    assert first.score is not None
    assert len(first.score.targets) == 2
    assert second.score is None
