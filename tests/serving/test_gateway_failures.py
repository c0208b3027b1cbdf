"""The real gateway when workers fail, fill up, leave, join and drain."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI

from serving.gateway import Gateway
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import RunningWorker, nano, running_gateway, running_worker
from tests.serving.scripted import Replies, response
from tests.serving.waiting import eventually

MODEL = nano()
LONG = response("word " * 400)


def client(gateway: Gateway, **options: Any) -> OpenAI:
    chosen = {"api_key": "none", "max_retries": 0, "timeout": 30, **options}
    return OpenAI(base_url=f"{gateway.url}/v1", **chosen)


def ask(api: OpenAI, text: str = "hi", **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return api.chat.completions.create(model="nano", messages=messages, **options)


def engine(**options: Any) -> FakeEngine:
    replies = Replies(MODEL.text.tokenizer, {"long": LONG}, thought="Hm.")
    return FakeEngine(replies, eos=MODEL.text.config.eos_token_ids, **options)


@contextmanager
def two_workers(**options: Any) -> Iterator[tuple[RunningWorker, RunningWorker, Gateway]]:
    with (
        running_worker(lambda: engine(**options)) as first,
        running_worker(lambda: engine(**options)) as second,
        running_gateway(first, second, policy="round_robin") as gateway,
    ):
        assert eventually(lambda: len(gateway.workers()) == 2)
        yield first, second, gateway


def test_client_that_leaves_frees_its_request_within_a_second():
    fake = engine(step_seconds=0.005)
    with running_worker(lambda: fake) as worker, running_gateway(worker) as gateway:
        stream = ask(client(gateway), "long", stream=True)
        for _, _ in zip(range(5), stream, strict=False):
            pass
        stream.close()
        left = time.monotonic()

        assert eventually(lambda: worker.worker.loop.open_requests == 0, 5)
        assert time.monotonic() - left < 1.5
        assert len(fake.aborted) == 1


def test_client_that_leaves_the_queue_frees_its_request_within_a_second():
    fake = engine()
    fake.hold.set()
    with running_worker(lambda: fake) as worker, running_gateway(worker) as gateway:
        with pytest.raises(openai.APITimeoutError):
            ask(client(gateway, timeout=0.5), "long")
        left = time.monotonic()

        assert eventually(lambda: worker.worker.loop.open_requests == 0, 5)
        assert time.monotonic() - left < 1.5


def test_full_queue_is_429_and_recovers():
    fake = engine(max_waiting=1)
    fake.hold.set()
    with (
        running_worker(lambda: fake) as worker,
        running_gateway(worker, extra=("--disable-retries",)) as gateway,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(ask, client(gateway))
        assert eventually(lambda: fake.stats().waiting == 1)

        with pytest.raises(openai.RateLimitError):
            ask(client(gateway))

        fake.hold.clear()
        assert waiting.result().choices[0].message.content == "Hello."
        assert ask(client(gateway)).choices[0].message.content == "Hello."


def test_drain_of_one_worker_finishes_its_streams_and_loses_no_request():
    with two_workers(step_seconds=0.003) as (first, _, gateway), ThreadPoolExecutor(16) as pool:
        live = [pool.submit(ask, client(gateway), "long") for _ in range(6)]
        assert eventually(lambda: first.worker.loop.open_requests >= 2)

        drain = threading.Thread(target=first.drain, args=(20,))
        drain.start()
        assert eventually(lambda: not first.worker.state.ready)
        later = [pool.submit(ask, client(gateway)) for _ in range(6)]
        reasons = {future.result().choices[0].finish_reason for future in (*live, *later)}
        drain.join()

    assert reasons == {"stop"}


def test_gateway_ends_when_its_last_stream_has_and_not_before():
    with (
        running_worker(lambda: engine(step_seconds=0.003)) as worker,
        running_gateway(worker, grace_seconds=20) as gateway,
    ):
        stream = iter(ask(client(gateway), "long", stream=True))
        next(stream)
        stop = threading.Thread(target=gateway.stop)
        stop.start()
        reason = finish(stream)
        stop.join()

    assert reason == "stop"
    assert gateway.process.returncode == -signal.SIGKILL, "it was left to its five idle seconds"


def test_workers_join_and_leave_while_requests_run():
    with (
        running_worker(lambda: engine(step_seconds=0.001)) as first,
        running_worker(lambda: engine(step_seconds=0.001)) as second,
        running_gateway(first, policy="round_robin") as gateway,
        ThreadPoolExecutor(8) as pool,
    ):
        stop = threading.Event()

        def keep_asking() -> list[str]:
            reasons = []
            while not stop.is_set():
                reasons.append(ask(client(gateway)).choices[0].finish_reason)
            return reasons

        asking = [pool.submit(keep_asking) for _ in range(4)]
        gateway.add_worker(second.url)
        joined = eventually(lambda: second.worker.requests.latest and served(second) > 3, 20)
        gateway.remove_worker(first.url)
        before = served(second)
        went_on = eventually(lambda: served(second) > before + 3, 20)
        stop.set()
        reasons = {reason for future in asking for reason in future.result()}

    assert joined and went_on
    assert reasons == {"stop"}


def served(worker: RunningWorker) -> int:
    return sum(record.state == "finished" for record in worker.worker.requests.latest(1000))


WORKER = """
import sys, time
from tests.serving.test_gateway_failures import engine
from tests.serving.running import running_worker
with running_worker(lambda: engine(step_seconds=0.005)) as worker:
    print(worker.url, flush=True)
    time.sleep(60)
"""


class Killable:
    """A worker in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def test_killed_worker_ends_its_streams_and_the_others_go_on():
    doomed = Killable()
    try:
        with (
            running_worker(lambda: engine(step_seconds=0.005)) as other,
            running_gateway(doomed, other, policy="round_robin") as gateway,  # pyright: ignore[reportArgumentType]
        ):
            assert eventually(lambda: len(gateway.workers()) == 2)
            api = client(gateway)
            streams = [iter(ask(api, "long", stream=True)) for _ in range(4)]
            for stream in streams:
                for _ in range(3):
                    next(stream)
            assert other.worker.loop.open_requests == 2

            doomed.kill()
            ends = [finish(stream) for stream in streams]
            later = [ask(api).choices[0].finish_reason for _ in range(4)]
    finally:
        doomed.kill()

    assert sorted(ends) == ["error", "error", "stop", "stop"]
    assert later == ["stop"] * 4


def finish(stream: Iterator[Any]) -> str:
    reason = "nothing"
    try:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                reason = chunk.choices[0].finish_reason
    except openai.APIError:
        return "error"
    return reason
