"""Between HTTP and the scheduler, in one process and without sockets: tickets, the engine loop, messages, metrics, configs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

msgspec = pytest.importorskip("msgspec", reason="the server's packages are not installed")

from minisgl.core import FinishReason, Grammar, Request, SamplingParams, StepOutput, TokenLogprobs  # noqa: E402
from minisgl.server.config import ServerConfig  # noqa: E402
from minisgl.server.engine_client import EngineClient  # noqa: E402
from minisgl.server.engine_process import EngineLoop, EngineParts  # noqa: E402
from minisgl.server.errors import ApiError  # noqa: E402
from minisgl.server.ipc import (  # noqa: E402
    Abort,
    Add,
    Addresses,
    ApiEnd,
    Beat,
    Command,
    EngineEnd,
    EngineFacts,
    Event,
    ExpertMap,
    Failed,
    Outputs,
    Ready,
    Rejected,
    Stop,
)
from minisgl.server.metrics import Metrics  # noqa: E402
from minisgl.server.null import NullOptions, NullScheduler  # noqa: E402

FACTS = EngineFacts(100, 50)


class PipeEnd:
    """Both ends of the pipe as lists: what the client sent, and what the engine is told."""

    def __init__(self, commands: Sequence[list[Command]] = ()):
        self.sent: list[object] = []
        self._commands = list(commands)

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self, wait_seconds: float) -> list[Command]:
        return self._commands.pop(0) if self._commands else []


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3), **params) -> Request:
    return Request(name, prompt, SamplingParams(**params))


def client(max_open: int = 4) -> tuple[EngineClient, PipeEnd]:
    pipe = PipeEnd()
    made = EngineClient(pipe, max_open)  # pyright: ignore[reportArgumentType]
    made.handle(Ready(FACTS))
    return made, pipe


def token(name: str, value: int, reason: FinishReason | None = None) -> StepOutput:
    return StepOutput(name, value, finish_reason=reason)


def test_messages_survive_the_wire():
    full = request(
        "a", max_tokens=5, stop=["x"], logit_bias={3: 1.5}, grammar=Grammar("regex", "a+"), seed=2**62
    )
    commands = [Add(full), Abort(["a", "b"]), Stop()]
    logprobs = TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.0)))
    output = StepOutput("a", 3, logprobs, FinishReason.STOP, None, 7)
    events = [Ready(FACTS), Outputs([output]), Rejected("a", "no"), Beat({"x": 1.0}), Failed("why")]
    for messages, kind in ((commands, Command), (events, Event)):
        decoder = msgspec.msgpack.Decoder(kind)
        for message in messages:
            back = decoder.decode(msgspec.msgpack.encode(message))
            assert type(back) is type(message)
            assert msgspec.msgpack.encode(back) == msgspec.msgpack.encode(message)


def test_real_sockets_carry_both_ways():
    async def talk() -> None:
        addresses = Addresses.create()
        api = ApiEnd(addresses)
        api.send(Abort(["early"]))  # before there is an engine
        engine = EngineEnd(addresses)
        try:
            engine.send(Ready(FACTS))
            assert (await api.receive()) == Ready(FACTS)
            assert engine.receive(2.0) == [Abort(["early"])]
            api.send(Abort(["x"]))
            assert engine.receive(2.0) == [Abort(["x"])]
            assert engine.receive(0.0) == []
        finally:
            engine.close()
            api.close()
            addresses.remove()

    asyncio.run(asyncio.wait_for(talk(), 10))


def test_a_ticket_collects_the_outputs_of_its_requests():
    async def run() -> None:
        made, _ = client()
        ticket = made.submit([request("a-0"), request("a-1")])
        made.handle(Outputs([token("a-0", 1), token("a-1", 2), token("stranger", 9)]))
        assert [o.token_id for o in await ticket.receive()] == [1, 2]
        waiting = asyncio.ensure_future(ticket.receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        made.handle(Outputs([token("a-0", 3, FinishReason.STOP)]))
        assert [o.token_id for o in await waiting] == [3]
        assert made.num_open == 1
        made.handle(Outputs([token("a-1", 4, FinishReason.LENGTH)]))
        assert len(await ticket.receive()) == 1
        assert await ticket.receive() == []
        assert made.idle.is_set()

    asyncio.run(run())


def test_closing_aborts_what_runs_and_wakes_the_waiter():
    async def run() -> None:
        made, pipe = client()
        ticket = made.submit([request("a-0"), request("a-1")])
        waiting = asyncio.ensure_future(ticket.receive())
        await asyncio.sleep(0)
        ticket.close()
        ticket.close()
        assert await waiting == []
        assert pipe.sent[-1] == Abort(["a-0", "a-1"])
        assert sum(isinstance(m, Abort) for m in pipe.sent) == 1
        made.handle(Outputs([token("a-0", 1)]))  # was on its way
        assert made.num_open == 0

    asyncio.run(run())


def test_one_refused_request_fails_its_ticket_and_no_other():
    async def run() -> None:
        made, pipe = client()
        bad, good = made.submit([request("a-0"), request("a-1")]), made.submit([request("b-0")])
        made.handle(Rejected("a-0", "too long"))
        with pytest.raises(ApiError, match="too long") as caught:
            await bad.receive()
        assert caught.value.status == 400
        assert pipe.sent[-1] == Abort(["a-1"])
        made.handle(Outputs([StepOutput("b-0", None, finish_reason=FinishReason.ERROR, error="odd")]))
        with pytest.raises(ApiError, match="odd"):
            await good.receive()

    asyncio.run(run())


def test_the_limit_and_the_states_turn_requests_away():
    async def run() -> None:
        made, _ = client(max_open=2)
        made.submit([request("a"), request("b")])
        with pytest.raises(ApiError) as full:
            made.submit([request("c")])
        assert (full.value.status, full.value.code, full.value.headers) == (
            503,
            "queue_full",
            {"Retry-After": "1"},
        )
        made.drain()
        with pytest.raises(ApiError) as draining:
            made.check_open()
        assert draining.value.code == "draining"
        loading = EngineClient(PipeEnd(), 2)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ApiError) as early:
            loading.check_open()
        assert early.value.code == "loading"

    asyncio.run(run())


def test_engine_death_reaches_every_ticket_and_stays():
    async def run() -> None:
        made, _ = client()
        tickets = [made.submit([request(name)]) for name in "abc"]
        made.handle(Failed("out of memory"))
        made.die("its process ended")  # comes second and says less
        for ticket in tickets:
            with pytest.raises(ApiError, match="out of memory"):
                await ticket.receive()
        with pytest.raises(ApiError, match="out of memory"):
            made.check_open()
        assert made.idle.is_set()

    asyncio.run(run())


def test_a_ticket_times_out():
    async def run() -> None:
        made, pipe = client()
        ticket = made.submit([request("a")])
        ticket.expire_after(0.01)
        with pytest.raises(ApiError) as caught:
            await ticket.receive()
        assert caught.value.code == "request_timeout"
        assert pipe.sent[-1] == Abort(["a"])

    asyncio.run(run())


def run_loop(commands: Sequence[list[Command]], options: NullOptions = NullOptions()) -> list[object]:  # noqa: B008
    pipe = PipeEnd([*commands, *([[]] * 20), [Stop()]])
    EngineLoop(EngineParts(NullScheduler(options), FACTS), pipe).run()  # pyright: ignore[reportArgumentType]
    return pipe.sent


def outputs_of(events: list[object]) -> list[StepOutput]:
    return [output for event in events if isinstance(event, Outputs) for output in event.outputs]


def test_the_loop_runs_requests_and_survives_bad_ones():
    bad = request("bad", tuple(range(50)), max_tokens=1)
    events = run_loop([[Add(bad), Add(request("good", max_tokens=4))]], NullOptions(max_model_len=20))
    assert next(e for e in events if isinstance(e, Rejected)).request_id == "bad"
    assert [o.token_id for o in outputs_of(events)] == [1, 2, 3, 1]
    assert outputs_of(events)[-1].finish_reason == FinishReason.LENGTH
    assert any(isinstance(e, Beat) for e in events)


def test_the_loop_tells_of_an_odd_error_and_goes_on():
    class Odd(NullScheduler):
        def add(self, request: Request) -> None:
            if request.request_id == "odd":
                raise KeyError("surprise")
            super().add(request)

    pipe = PipeEnd([[Add(request("odd")), Add(request("fine", max_tokens=1))], [], [], [Stop()]])
    EngineLoop(EngineParts(Odd(NullOptions()), FACTS), pipe).run()  # pyright: ignore[reportArgumentType]
    ends = {o.request_id: o.finish_reason for o in outputs_of(pipe.sent) if o.finish_reason}
    assert ends == {"odd": FinishReason.ERROR, "fine": FinishReason.LENGTH}


def test_the_loop_ends_with_its_parent():
    pipe = PipeEnd()
    scheduler = EngineParts(NullScheduler(NullOptions()), FACTS)
    EngineLoop(scheduler, pipe, parent_alive=lambda: False).run()  # pyright: ignore[reportArgumentType]


def test_aborted_requests_give_their_pages_back():
    scheduler = NullScheduler(NullOptions(num_pages=8, max_model_len=64))
    for name in ("a", "b", "c"):
        scheduler.add(request(name, max_tokens=40))
    scheduler.step()
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (2, 1)
    for name in ("a", "c", "unknown"):
        scheduler.abort(name)
    ends = [o for o in scheduler.step() if o.finish_reason]
    assert {o.request_id for o in ends} == {"a", "c"}
    assert scheduler.stats().pages_free == 8 - 3


def test_counters_of_metrics_follow_the_engine_and_never_fall():
    metrics = Metrics("m")
    stats = {"prompt_tokens": 10, "cached_tokens": 4, "pages_total": 8, "pages_free": 2, "pages_evictable": 2}
    metrics.update(Beat(stats, ExpertMap(1, 4, b"\0\1\0\xff", b"\1\1\0\0")))
    metrics.update(Beat(stats | {"prompt_tokens": 25}))
    metrics.update(Beat(stats | {"prompt_tokens": 0}, ExpertMap(1, 4, b"\0\1\0\xff", b"\1\1\0\0")))
    text = metrics.render().decode()
    assert 'vllm:prefix_cache_queries_total{model_name="m"} 25.0' in text
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.5' in text
    assert 'minisgl:experts_used{model_name="m"} 2.0' in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 70000),
        ("max_open_requests", 0),
        ("shutdown_timeout", -1.0),
        ("tool_parser", "xml"),
        ("log_level", "x"),
    ],
)
def test_configs_refuse_nonsense(field, value):
    with pytest.raises(ValueError, match=field):
        ServerConfig(**{field: value})
