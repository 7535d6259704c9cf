"""The scheduler against a model that can be predicted by hand (tests/paged_fake.py)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.config import SchedulerConfig
from minisgl.core import FinishReason, Request, SamplingParams
from minisgl.kvcache import make_prefix_cache
from minisgl.kvcache.pool import PageAllocator
from minisgl.scheduler.pages import PageManager
from minisgl.scheduler.scheduler import Scheduler
from tests.paged_fake import PagedFake, expected_continuation


def make(
    num_pages: int = 40,
    page_size: int = 4,
    kind: str = "radix",
    budget: int = 16,
    rows: int = 8,
    overlap: bool = True,
    **fake,
) -> tuple[Scheduler, PagedFake]:
    runner = PagedFake(num_pages, page_size, rows, **fake)
    pages = PageManager(PageAllocator(num_pages), make_prefix_cache(kind, page_size))
    config = SchedulerConfig(
        max_running_requests=rows, max_prefill_length=budget, disable_overlap=not overlap
    )
    return Scheduler(runner, pages, config), runner


def balanced(scheduler: Scheduler) -> bool:
    stats = scheduler.stats()
    return stats.pages_free + stats.pages_evictable + stats.pages_protected == stats.pages_total


def drain(scheduler: Scheduler, limit: int = 10_000) -> dict[str, tuple[list[int], FinishReason]]:
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            stats = scheduler.stats()
            assert stats.pages_free + stats.pages_evictable == stats.pages_total, "pages leaked"
            assert stats.num_running == stats.num_waiting == 0
            return {name: (tokens.get(name, []), reasons[name]) for name in reasons}
        for output in scheduler.step():
            assert output.request_id not in reasons, "an output after the end"
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        assert balanced(scheduler)
    raise AssertionError("the scheduler does not come to an end")


def request(name: str, prompt: list[int], max_tokens: int = 8, **params) -> Request:
    eos = frozenset(params.pop("eos", ()))
    priority = params.pop("priority", 0)
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), eos, priority)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_outputs_equal_the_model(overlap: bool, kind: str, page_size: int) -> None:
    scheduler, runner = make(160 // page_size, page_size, kind, overlap=overlap)
    prompts = {f"r{i}": [(7 * i + j) % 97 for j in range(1 + 5 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt))
    for name, (tokens, reason) in drain(scheduler).items():
        assert tokens == expected_continuation(prompts[name], 8, 97)
        assert reason is FinishReason.LENGTH
    assert max(sum(n for _, n in step) for step in runner.steps) <= 16


def test_prefix_is_reused_and_one_token_is_always_computed() -> None:
    scheduler, runner = make()
    prompt = list(range(16))  # ends at a page boundary
    scheduler.add(request("cold", prompt))
    cold = drain(scheduler)["cold"]
    runner.steps.clear()
    scheduler.add(request("warm", prompt))
    assert drain(scheduler)["warm"] == cold
    assert runner.steps[0] == [(0, 4)], "three pages of four come from the cache, the last page is computed"
    assert scheduler.stats().cached_tokens == 12


def test_identical_prompts_at_once_share_pages_afterwards() -> None:
    scheduler, _ = make(num_pages=30)
    for i in range(5):
        scheduler.add(request(f"r{i}", list(range(10)), max_tokens=12))
    outputs = drain(scheduler)
    assert {tuple(tokens) for tokens, _ in outputs.values()} == {
        tuple(expected_continuation(range(10), 12, 97))
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_no_output(overlap: bool) -> None:
    scheduler, _ = make(num_pages=12, page_size=4, overlap=overlap)
    for i in range(8):
        scheduler.add(request(f"r{i}", [i, i + 1, i + 2], max_tokens=25))
    outputs = drain(scheduler)
    for i in range(8):
        assert outputs[f"r{i}"][0] == expected_continuation([i, i + 1, i + 2], 25, 97)
    assert scheduler.stats().preemptions > 0, "the pool was meant to be too small"


def test_end_tokens_min_tokens_and_ignore_eos() -> None:
    prompt = [3, 1, 4]
    free_run = expected_continuation(prompt, 12, 97)
    end = free_run[4]
    scheduler, _ = make()
    scheduler.add(request("eos", prompt, 12, eos=[end]))
    scheduler.add(request("stop", prompt, 12, stop_token_ids=[end]))
    scheduler.add(request("ignore", prompt, 12, eos=[end], ignore_eos=True))
    scheduler.add(request("min", prompt, 12, eos=[end], min_tokens=6))
    outputs = drain(scheduler)
    first = free_run.index(end) + 1
    assert outputs["eos"] == outputs["stop"] == (free_run[:first], FinishReason.STOP)
    assert outputs["ignore"] == (free_run, FinishReason.LENGTH)
    assert len(outputs["min"][0]) >= 6


def test_order_is_priority_then_arrival() -> None:
    scheduler, _ = make(rows=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        scheduler.add(request(name, [1, 2, 3], 2, priority=priority))
    ended = []
    while scheduler.has_work:
        ended += [o.request_id for o in scheduler.step() if o.finish_reason]
    assert ended == ["urgent", "first", "second", "late"]


def test_abort_at_every_stage_frees_pages_and_harms_nobody() -> None:
    for steps_before in range(8):
        scheduler, _ = make(budget=4)
        scheduler.add(request("victim", list(range(9)), 6))
        scheduler.add(request("other", list(range(5, 12)), 6))
        seen = []
        for _ in range(steps_before):
            seen += scheduler.step()
        done = any(o.request_id == "victim" and o.finish_reason for o in seen)
        scheduler.abort("victim")
        scheduler.abort("nobody")
        rest = []
        while scheduler.has_work:
            rest += scheduler.step()
        ends = [o.finish_reason for o in seen + rest if o.request_id == "victim" and o.finish_reason]
        assert ends == ([FinishReason.LENGTH] if done else [FinishReason.ABORT])
        other = [o.token_id for o in seen + rest if o.request_id == "other"]
        assert other == expected_continuation(range(5, 12), 6, 97)
        stats = scheduler.stats()
        assert stats.pages_free + stats.pages_evictable == stats.pages_total


@pytest.mark.parametrize("where", ["fail_steps", "fail_waits"])
def test_a_failed_step_ends_its_requests_and_the_next_ones_run(where: str) -> None:
    scheduler, _ = make(**{where: frozenset({2})})
    scheduler.add(request("a", list(range(6)), 8))
    scheduler.add(request("b", list(range(3, 9)), 8))
    outputs = drain(scheduler)
    assert {reason for _, reason in outputs.values()} == {FinishReason.ERROR}
    scheduler.add(request("again", list(range(6)), 8))
    assert drain(scheduler)["again"][0] == expected_continuation(range(6), 8, 97)


def test_what_can_never_run_is_refused_with_the_remedy() -> None:
    scheduler, _ = make(num_pages=6, page_size=4, max_seq_len=64)
    for prompt, words in (
        ([], "empty"),
        ([1] * 64, "max-seq-len"),
        ([1] * 40, "at least 12"),
        ([97], "97 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            scheduler.add(request("bad", prompt))
    with pytest.raises(ValueError, match="vocabulary"):
        scheduler.add(request("bad", [1], stop_token_ids=[500]))
    scheduler.add(request("good", [1], 3))
    with pytest.raises(ValueError, match="already in use"):
        scheduler.add(request("good", [1], 3))
    assert drain(scheduler)["good"][0] == expected_continuation([1], 3, 97)


def test_answer_is_cut_at_the_context_and_at_the_pool() -> None:
    scheduler, _ = make(num_pages=40, page_size=4, max_seq_len=20)
    scheduler.add(Request("context", (1, 2, 3), SamplingParams(max_tokens=500)))
    assert len(drain(scheduler)["context"][0]) == 17
    scheduler, _ = make(num_pages=4, page_size=4, max_seq_len=64)
    scheduler.add(Request("pool", (1, 2, 3), SamplingParams()))
    assert len(drain(scheduler)["pool"][0]) == 9


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_life(data: st.DataObject) -> None:
    """Random arrivals, aborts, pool sizes, budgets, shared prefixes: every finished output equals the model's."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    capacity = data.draw(st.integers(24, 80))
    scheduler, _ = make(
        num_pages=capacity // page_size + 1,
        page_size=page_size,
        kind=data.draw(st.sampled_from(["radix", "naive"])),
        budget=data.draw(st.integers(1, 20)),
        rows=data.draw(st.integers(1, 6)),
        overlap=data.draw(st.booleans()),
    )
    prompts, tokens, reasons = {}, {}, {}
    for number in range(data.draw(st.integers(1, 12))):
        shared = data.draw(st.integers(0, 10))
        tail = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))
        prompts[f"r{number}"] = list(range(shared)) + tail
        scheduler.add(request(f"r{number}", prompts[f"r{number}"], data.draw(st.integers(1, 6))))
        for _ in range(data.draw(st.integers(0, 4))):
            collect(scheduler, tokens, reasons)
        if data.draw(st.integers(0, 5)) == 0:
            scheduler.abort(f"r{data.draw(st.integers(0, number))}")
    for _ in range(2000):
        if not scheduler.has_work:
            break
        collect(scheduler, tokens, reasons)
    assert reasons.keys() == prompts.keys()
    for name, prompt in prompts.items():
        expected = expected_continuation(prompt, 6, 97)
        got = tokens.get(name, [])
        assert got == expected[: len(got)]
        assert reasons[name] in (FinishReason.LENGTH, FinishReason.ABORT)
    stats = scheduler.stats()
    assert stats.pages_free + stats.pages_evictable == stats.pages_total


def collect(scheduler: Scheduler, tokens: dict, reasons: dict) -> None:
    for output in scheduler.step():
        if output.token_id is not None:
            tokens.setdefault(output.request_id, []).append(output.token_id)
        if output.finish_reason:
            reasons[output.request_id] = output.finish_reason
    assert balanced(scheduler)
