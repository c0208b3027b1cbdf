"""The scheduler protocol over a real port, before an engine computed by hand."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from k3jax.engine.request import Request
from serving.proto import k3jax_v1_pb2, k3jax_v1_pb2_grpc
from serving.worker import INTROSPECTION, MAX_MESSAGE_BYTES, SCHEDULER
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import (
    RunningWorker,
    completes,
    request,
    running_worker,
    tokens,
)
from tests.serving.waiting import eventually

LONG = 8_000


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(eos=(1857, 1858))


@pytest.fixture(scope="module")
def worker(engine: FakeEngine) -> Iterator[RunningWorker]:
    with running_worker(lambda: engine) as running:
        yield running


@pytest.fixture
def slow() -> Iterator[tuple[RunningWorker, FakeEngine]]:
    """A worker of its own whose steps take two milliseconds."""
    engine = FakeEngine(step_seconds=0.002)
    with running_worker(lambda: engine) as running:
        yield running, engine


def refused(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def detail(error: Any, kind: Any) -> Any:
    """A detail of an error's rich status."""
    status = rpc_status.from_call(error)
    assert status is not None
    found = kind()
    assert any(entry.Unpack(found) for entry in status.details)
    return found


def test_streamed_and_whole_answers_agree(worker: RunningWorker):
    streamed = worker.generate(5, 6, 7, max_new_tokens=9)
    whole = worker.generate(5, 6, 7, max_new_tokens=9, stream=False)

    (complete,) = completes(whole)
    assert tokens(streamed) == list(complete.output_ids) == list(range(3, 12))
    assert completes(streamed)[0] == complete
    assert len(whole) == 1


def test_every_choice_has_its_own_end(worker: RunningWorker):
    responses = worker.generate(5, 6, 7, max_new_tokens=4, n=3)

    ends = completes(responses)
    assert [complete.index for complete in ends] == [0, 1, 2]
    assert [tokens(responses, i) for i in range(3)] == [
        [3 + i + j for j in range(4)] for i in range(3)
    ]


def test_no_tokens_asked_for_gives_an_empty_answer(worker: RunningWorker):
    (complete,) = completes(worker.generate(5, 6, max_new_tokens=0))

    assert (complete.completion_tokens, complete.finish_reason) == (0, "length")


def test_bad_field_is_named_in_code_text_and_details(worker: RunningWorker):
    error = refused(lambda: worker.generate(temperature=-1.0))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature = -1.0" in str(error.details())
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert violation.field == "sampling_params.temperature"


def test_request_id_in_use_is_refused(slow: tuple[RunningWorker, FakeEngine]):
    worker, _ = slow
    call = worker.stub.Generate(request(request_id="same", max_new_tokens=LONG))
    next(call)

    error = refused(lambda: worker.generate(request_id="same"))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'same' is in use" in str(error.details())
    assert next(call).chunk.token_ids
    call.cancel()


def test_full_queue_says_when_to_come_back():
    engine = FakeEngine(max_waiting=1)
    engine.hold.set()
    with running_worker(lambda: engine) as worker, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.generate, max_new_tokens=2)
        assert eventually(lambda: engine.stats().waiting == 1)

        error = refused(worker.generate)

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToSeconds() >= 1
        engine.hold.clear()
        assert tokens(waiting.result()) == [3, 4]
        assert tokens(worker.generate(max_new_tokens=2)) == [3, 4]


def test_cancelled_call_frees_its_request(slow: tuple[RunningWorker, FakeEngine]):
    worker, engine = slow
    call = worker.stub.Generate(request(request_id="gone", max_new_tokens=LONG))
    next(call)

    call.cancel()

    assert eventually(lambda: engine.aborted == ["gone"])
    assert eventually(lambda: worker.worker.loop.open_requests == 0)


def test_cancelled_call_in_the_queue_frees_its_request():
    engine = FakeEngine()
    engine.hold.set()
    with running_worker(lambda: engine) as worker:
        call = worker.stub.Generate(request(request_id="gone"))
        assert eventually(lambda: engine.stats().waiting == 1)

        call.cancel()

        assert eventually(lambda: engine.aborted == ["gone"])


def test_deadline_ends_the_request(slow: tuple[RunningWorker, FakeEngine]):
    worker, engine = slow

    error = refused(lambda: list(worker.stub.Generate(request(max_new_tokens=LONG), timeout=0.2)))

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert eventually(lambda: len(engine.aborted) == 1)


def test_abort_ends_a_stream_with_its_reason(slow: tuple[RunningWorker, FakeEngine]):
    worker, _ = slow
    call = worker.stub.Generate(request(request_id="a", max_new_tokens=LONG))
    next(call)

    answer = worker.stub.Abort(pb.AbortRequest(request_id="a"))
    again = worker.stub.Abort(pb.AbortRequest(request_id="never was"))

    assert completes(list(call))[0].finish_reason == "abort"
    assert (answer.success, again.success) == (True, False)


def test_stop_string_ends_the_engines_work(slow: tuple[RunningWorker, FakeEngine]):
    worker, engine = slow
    tokenizer = worker.model.text.tokenizer
    ids = tokenizer.encode("one two three four five six seven")
    engine.script = lambda request, choice: ids * 1000
    stop = "two thr"

    (complete,) = completes(worker.generate(max_new_tokens=5000, stop=[stop]))

    assert complete.matched_stop_str == stop
    assert tokenizer.decode(complete.output_ids).count("one") == 1
    assert eventually(lambda: len(engine.aborted) == 1)


def test_crash_fails_streams_and_turns_health_off():
    engine = FakeEngine(crash_at=5)
    with running_worker(lambda: engine) as worker:
        first = refused(lambda: worker.generate(max_new_tokens=LONG))
        later = refused(worker.generate)
        healthy = worker.stub.HealthCheck(pb.HealthCheckRequest())
        health: Any = health_pb2_grpc.HealthStub(worker.channel)
        status = health.Check(health_pb2.HealthCheckRequest(service=SCHEDULER)).status

    assert first.code() is grpc.StatusCode.INTERNAL
    assert "device lost" in str(first.details())
    assert later.code() is grpc.StatusCode.UNAVAILABLE
    assert not healthy.healthy and "device lost" in healthy.message
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_nothing_is_accepted_before_ready():
    with running_worker(FakeEngine, ready=False) as worker:
        error = refused(worker.generate)
        before = worker.stub.HealthCheck(pb.HealthCheckRequest())
        worker.set_ready()
        after = worker.generate(max_new_tokens=1)

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "starting" in str(error.details())
    assert not before.healthy
    assert tokens(after) == [3]


def test_drain_finishes_live_streams_refuses_new_ones_and_is_seen_by_watchers():
    engine = FakeEngine(step_seconds=0.002)
    with running_worker(lambda: engine) as worker:
        health: Any = health_pb2_grpc.HealthStub(worker.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SCHEDULER))
        seen = [next(watch).status]
        live = [worker.stub.Generate(request(max_new_tokens=300)) for _ in range(4)]
        for call in live:
            next(call)

        drain = threading.Thread(target=worker.drain, args=(20,))
        drain.start()
        seen.append(next(watch).status)
        error = refused(worker.generate)
        answers = [list(call) for call in live]
        drain.join()

    assert seen == [
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    ]
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert [completes(answer)[0].completion_tokens for answer in answers] == [300] * 4


def test_concurrent_streams_equal_their_solo_results(worker: RunningWorker):
    prompts = [tuple(range(1, 2 + i)) for i in range(64)]

    def run(prompt: tuple[int, ...]) -> list[int]:
        return tokens(worker.generate(*prompt, max_new_tokens=17))

    solo = [run(prompt) for prompt in prompts]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(run, prompts))

    assert together == solo


def test_times_come_with_the_end(worker: RunningWorker):
    call = worker.stub.Generate(request(max_new_tokens=3))
    list(call)

    times = dict(call.trailing_metadata())
    assert 0 <= float(times["k3jax-queue-seconds"]) <= float(times["k3jax-first-token-seconds"])
    assert times["k3jax-cached-tokens"] == "0"


def test_oversized_message_is_refused_and_the_service_goes_on(worker: RunningWorker):
    huge = pb.GenerateRequest()
    huge.tokenized.original_text = "x" * (MAX_MESSAGE_BYTES + 1)
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(worker.address, options=options) as channel:
        call = channel.unary_stream(
            f"/{SCHEDULER}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        error = refused(lambda: list(call(huge)))

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert tokens(worker.generate(max_new_tokens=1)) == [3]


def test_malformed_message_is_refused_and_the_service_goes_on(worker: RunningWorker):
    call = worker.channel.unary_stream(f"/{SCHEDULER}/Generate")

    error = refused(lambda: list(call(b"\xff\xff\xff")))

    assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert tokens(worker.generate(max_new_tokens=1)) == [3]


def test_reflection_names_every_service(worker: RunningWorker):
    services = set(ProtoReflectionDescriptorDatabase(worker.channel).get_services())

    assert {SCHEDULER, INTROSPECTION, "grpc.health.v1.Health"} < services


def test_tokenizer_arrives_whole_with_its_digest(worker: RunningWorker):
    chunks = list(worker.stub.GetTokenizer(common.GetTokenizerRequest()))

    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    archive = zipfile.ZipFile(io.BytesIO(data))
    folder = worker.model.text.folder
    assert archive.read("tiktoken.model") == (folder / "tiktoken.model").read_bytes()


def test_model_info_says_what_the_gateway_needs(worker: RunningWorker):
    info = worker.stub.GetModelInfo(pb.GetModelInfoRequest())

    assert info.architectures == ["KimiK3ForConditionalGeneration"]
    assert info.model_type == "kimi_k3"
    assert set(info.eos_token_ids) == {1857, 1858}
    assert (info.vocab_size, info.max_context_length) == (2112, 8192)
    assert info.served_model_name == "nano"
    assert not info.supports_vision


def test_loads_count_running_and_waiting_requests(slow: tuple[RunningWorker, FakeEngine]):
    worker, engine = slow
    calls = [worker.stub.Generate(request(max_new_tokens=LONG)) for _ in range(3)]
    for call in calls:
        next(call)
    engine.hold.set()
    calls.append(worker.stub.Generate(request(*range(1, 12))))

    def load() -> pb.SchedulerLoad:
        return worker.stub.GetLoads(pb.GetLoadsRequest()).loads[0]

    assert eventually(lambda: (load().num_running_reqs, load().num_waiting_reqs) == (3, 1))
    assert load().num_waiting_uncached_tokens == 11
    assert load().gen_throughput > 0
    # The cache is full of prefixes, which is no reason to send anybody away.
    assert load().token_usage == load().active_token_usage == pytest.approx(0.03)
    for call in calls:
        call.cancel()


def test_images_are_refused_without_a_vision_tower(worker: RunningWorker):
    message = request()
    message.mm_inputs.items.add(modality=common.IMAGE)

    error = refused(lambda: list(worker.stub.Generate(message)))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "mm_inputs"


def test_flush_waits_for_requests_and_gives_up_in_time(slow: tuple[RunningWorker, FakeEngine]):
    worker, _ = slow
    call = worker.stub.Generate(request(max_new_tokens=LONG))
    next(call)
    busy = worker.stub.FlushCache(common.FlushCacheRequest(timeout_s=0.05))
    call.cancel()
    idle = worker.stub.FlushCache(common.FlushCacheRequest(timeout_s=5))

    assert (busy.success, idle.success) == (False, True)
    assert "1 requests are open" in busy.message


def test_introspection_reports_open_finished_and_failed_requests(
    slow: tuple[RunningWorker, FakeEngine],
):
    worker, _ = slow
    stub = k3jax_v1_pb2_grpc.IntrospectionStub(worker.channel)
    worker.generate(request_id="done", max_new_tokens=2)
    refused(lambda: worker.generate(request_id="bad", top_p=2.0))
    call = worker.stub.Generate(request(request_id="open", max_new_tokens=LONG))
    next(call)

    done = stub.GetRequest(k3jax_v1_pb2.GetRequestRequest(request_id="done"))
    bad = stub.GetRequest(k3jax_v1_pb2.GetRequestRequest(request_id="bad"))
    listed = stub.ListRequests(k3jax_v1_pb2.ListRequestsRequest(limit=2)).requests
    unknown = refused(lambda: stub.GetRequest(k3jax_v1_pb2.GetRequestRequest(request_id="?")))
    call.cancel()

    assert (done.state, done.completion_tokens, list(done.finish_reasons)) == (
        "finished",
        2,
        ["length"],
    )
    assert done.queue_seconds <= done.first_token_seconds <= done.total_seconds
    assert "top_p" in bad.error
    assert [(entry.request_id, entry.state) for entry in listed] == [
        ("open", "running"),
        ("bad", "finished"),
    ]
    assert unknown.code() is grpc.StatusCode.NOT_FOUND


def test_introspection_reports_start_up(worker: RunningWorker):
    with worker.worker.state.phase("weights") as phase:
        phase.bytes = 17
    stub = k3jax_v1_pb2_grpc.IntrospectionStub(worker.channel)

    worker.set_ready()
    report = stub.GetReadiness(k3jax_v1_pb2.GetReadinessRequest())

    assert report.ready and not report.reason
    assert [(phase.name, phase.bytes) for phase in report.phases] == [("weights", 17)]


def test_trace_of_the_caller_is_in_the_log_line(
    worker: RunningWorker, caplog: pytest.LogCaptureFixture
):
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    with caplog.at_level("INFO", "k3jax.serving.requests"):
        list(worker.stub.Generate(request(request_id="t", max_new_tokens=1), metadata=metadata))
        assert eventually(lambda: caplog.records)

    (record,) = caplog.records
    assert record.__dict__["fields"]["trace_id"] == trace
    assert record.__dict__["fields"]["request_id"] == "t"


def test_cache_events_reach_a_subscriber_with_the_load(
    slow: tuple[RunningWorker, FakeEngine],
):
    worker, engine = slow
    subscribe = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
    call = worker.stub.SubscribeKvEvents(subscribe, timeout=20)
    call.initial_metadata()

    engine.store(range(1, 130))
    worker.generate(max_new_tokens=1)
    batch = next(batch for batch in call if batch.events)
    heartbeat = next(call)
    call.cancel()

    (event,) = batch.events
    assert [list(block.token_ids) for block in event.stored.blocks] == [
        list(range(1, 65)),
        list(range(65, 129)),
    ]
    assert batch.load.max_running_requests == 16
    assert heartbeat.load.load_only and heartbeat.sequence_number == batch.sequence_number


def test_same_seedless_request_is_drawn_anew(worker: RunningWorker, engine: FakeEngine):
    seen: list[Request] = []
    script, engine.script = engine.script, lambda request, choice: (seen.append(request), [1])[1]
    worker.generate()
    worker.generate()
    engine.script = script

    assert seen[0].sampling.seed != seen[1].sampling.seed
