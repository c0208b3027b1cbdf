"""The engine loop: one thread for the device, and every stream ends."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from k3jax.engine.engine import QueueFull
from k3jax.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from serving.engine_loop import EngineFailed, EngineLoop, EventStream, RequestFailed, SlowReader
from tests.serving.fake_engine import FakeEngine


def run(test: Callable[[EngineLoop], Awaitable[Any]], engine: FakeEngine, **options: int) -> Any:
    """Run a coroutine against a started loop."""

    async def main() -> Any:
        loop = EngineLoop(engine, **options)
        loop.start()
        try:
            return await asyncio.wait_for(test(loop), 20)
        finally:
            await loop.stop()

    return asyncio.run(main())


def request(name: str = "a", max_tokens: int = 5, n: int = 1) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens), n=n)


async def read(stream: EventStream) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while not stream.ended or not events or events[-1].finish_reason is None:
        events += await stream.next()
    stream.close()
    return events


def test_stream_has_every_token_in_order():
    async def test(loop: EngineLoop):
        return await read(loop.submit(request(max_tokens=7)))

    events = run(test, FakeEngine())

    assert [event.token for event in events] == [3, 4, 5, 6, 7, 8, 9]
    assert [event.finish_reason for event in events] == [None] * 6 + [FinishReason.LENGTH]


def test_request_whose_constraint_raised_fails_alone():
    async def test(loop: EngineLoop):
        broken, other = loop.submit(request("broken")), loop.submit(request("other"))
        with pytest.raises(RequestFailed, match="its constraint raised"):
            await read(broken)
        return await read(other)

    events = run(test, FakeEngine(break_at=3))

    assert events[-1].finish_reason is FinishReason.LENGTH


def test_engine_is_called_from_its_own_thread_only():
    engine = FakeEngine()

    async def test(loop: EngineLoop):
        streams = [loop.submit(request(str(i))) for i in range(5)]
        await asyncio.gather(*map(read, streams))
        return await loop.call(lambda engine: threading.get_ident())

    caller = run(test, engine)

    assert engine.threads == {caller} != {threading.get_ident()}


def test_closing_a_stream_aborts_its_request():
    engine = FakeEngine(step_seconds=0.001)

    async def test(loop: EngineLoop):
        stream = loop.submit(request(max_tokens=10**6))
        await stream.next()
        stream.close()
        await loop.call(lambda engine: None)

    run(test, engine)

    assert engine.aborted == ["a"]


def test_closing_an_ended_stream_aborts_nothing():
    engine = FakeEngine()

    async def test(loop: EngineLoop):
        await read(loop.submit(request()))
        await loop.call(lambda engine: None)

    run(test, engine)

    assert engine.aborted == []


def test_abort_ends_the_stream_with_its_reason():
    engine = FakeEngine(step_seconds=0.001)

    async def test(loop: EngineLoop):
        stream = loop.submit(request(max_tokens=10**6, n=2))
        await stream.next()
        assert loop.abort("a")
        events = await read(stream)
        return events, loop.abort("a")

    events, again = run(test, engine)

    assert {event.finish_reason for event in events[-2:]} == {FinishReason.ABORT}
    assert not again


def test_abort_of_a_waiting_request_frees_it():
    engine = FakeEngine()
    engine.hold.set()

    async def test(loop: EngineLoop):
        stream = loop.submit(request())
        assert loop.abort("a")
        return await read(stream)

    assert run(test, engine)[-1].finish_reason is FinishReason.ABORT


def test_crash_of_a_step_fails_every_stream_and_is_told():
    told: list[EngineFailed] = []

    async def test(loop: EngineLoop):
        loop.on_failure = told.append
        streams = [loop.submit(request(str(i), max_tokens=10**6)) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineFailed, match="device lost"):
                while True:
                    await stream.next()
        with pytest.raises(EngineFailed):
            loop.submit(request("late"))
        with pytest.raises(EngineFailed):
            await loop.call(lambda engine: None)

    run(test, FakeEngine(crash_at=4))

    assert len(told) == 1


def test_failed_step_fails_what_was_in_it_and_the_engine_goes_on():
    engine = FakeEngine(fail_at=(4,))

    async def test(loop: EngineLoop):
        streams = [loop.submit(request(str(i), max_tokens=10**6)) for i in range(3)]
        for stream in streams:
            with pytest.raises(EngineFailed, match="out of memory"):
                while True:
                    await stream.next()
            stream.close()
        assert loop.failure is None
        return await read(loop.submit(request()))

    assert len(run(test, engine)) == 5


def test_engine_whose_steps_keep_failing_is_given_up():
    engine = FakeEngine(fail_at=range(1, 100))

    async def test(loop: EngineLoop):
        for name in "abc":
            with pytest.raises(EngineFailed, match="out of memory"):
                await loop.submit(request(name)).next()
        with pytest.raises(EngineFailed):
            loop.submit(request("d"))

    run(test, engine)


def test_refusal_comes_out_of_the_stream_and_spares_the_others():
    engine = FakeEngine(max_waiting=1)
    engine.hold.set()

    async def test(loop: EngineLoop):
        first = loop.submit(request("1"))
        second = loop.submit(request("2"))
        with pytest.raises(QueueFull):
            await second.next()
        second.close()
        engine.hold.clear()
        return await read(first)

    assert len(run(test, engine)) == 5


def test_id_in_use_is_refused_until_it_is_closed():
    async def test(loop: EngineLoop):
        stream = loop.submit(request())
        with pytest.raises(ValueError, match="in use"):
            loop.submit(request())
        await read(stream)
        return await read(loop.submit(request()))

    assert len(run(test, FakeEngine())) == 5


def test_reader_that_does_not_keep_up_is_aborted():
    engine = FakeEngine()

    async def test(loop: EngineLoop):
        stream = loop.submit(request(max_tokens=10**6))
        while not stream.ended:
            await asyncio.sleep(0.005)
        with pytest.raises(SlowReader, match="50"):
            while True:
                await stream.next()
        await loop.call(lambda engine: None)

    run(test, engine, max_unread=50)

    assert engine.aborted == ["a"]


def test_error_of_a_call_is_its_callers_alone():
    async def test(loop: EngineLoop):
        with pytest.raises(ZeroDivisionError):
            await loop.call(lambda engine: 1 // 0)
        return await read(loop.submit(request()))

    assert len(run(test, FakeEngine())) == 5


def test_stats_after_a_call_show_what_it_did_though_the_next_step_is_long():
    engine = FakeEngine(step_seconds=0.5)

    async def test(loop: EngineLoop):
        loop.submit(request(max_tokens=2))
        other = request("other")
        await loop.call(lambda engine: engine.submit(other))
        return loop.stats

    stats = run(test, engine)

    assert stats.waiting + stats.running == 2


def test_stopping_ends_open_streams():
    async def main():
        loop = EngineLoop(FakeEngine(step_seconds=0.001))
        loop.start()
        stream = loop.submit(request(max_tokens=10**6))
        await stream.next()
        await loop.stop()
        with pytest.raises(EngineFailed, match="stopped"):
            while True:
                await stream.next()

    asyncio.run(main())


def test_waiting_prompt_tokens_count_what_has_produced_nothing():
    engine = FakeEngine()
    engine.hold.set()

    async def test(loop: EngineLoop):
        stream = loop.submit(request())
        waiting = loop.waiting_prompt_tokens
        engine.hold.clear()
        await stream.next()
        return waiting, loop.waiting_prompt_tokens

    assert run(test, engine) == (3, 0)
