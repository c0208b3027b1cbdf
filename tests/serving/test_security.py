"""Who may call: a token, TLS, and certificates of clients."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as pb_grpc

from serving.security import Tls
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import request, running_worker, tokens

FOLDER = Path(__file__).parent / "certificates"
TLS = Tls(FOLDER / "server.pem", FOLDER / "server.key")
MUTUAL = Tls(FOLDER / "server.pem", FOLDER / "server.key", client_ca=FOLDER / "ca.pem")


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def answer(channel: grpc.Channel, **call: object) -> list[int]:
    stub = pb_grpc.TokenSpeedSchedulerStub(channel)
    return tokens(list(stub.Generate(request(max_new_tokens=2), timeout=10, **call)))


def test_without_the_token_only_health_answers():
    with running_worker(FakeEngine, token="secret") as worker:
        outcomes = []
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            for call in (
                lambda m: answer(worker.channel, metadata=m),
                lambda m: worker.stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=m),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    call(metadata)
                outcomes.append(refused.value.code())
        right = answer(worker.channel, metadata=(("authorization", "Bearer secret"),))
        stub: Any = health_pb2_grpc.HealthStub(worker.channel)
        health = stub.Check(health_pb2.HealthCheckRequest())

    assert outcomes == [grpc.StatusCode.UNAUTHENTICATED] * 6
    assert right == [3, 4]
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_tls_is_spoken_and_plain_text_refused():
    with running_worker(FakeEngine, tls=TLS) as worker:
        credentials = grpc.ssl_channel_credentials(read("ca.pem"))
        with grpc.secure_channel(worker.address, credentials) as channel:
            over_tls = answer(channel)
        with pytest.raises(grpc.RpcError):
            answer(worker.channel)

    assert over_tls == [3, 4]


def test_mutual_tls_needs_a_certificate_of_the_client():
    with running_worker(FakeEngine, tls=MUTUAL) as worker:
        known = grpc.ssl_channel_credentials(read("ca.pem"), read("client.key"), read("client.pem"))
        with grpc.secure_channel(worker.address, known) as channel:
            with_certificate = answer(channel)
        unknown = grpc.ssl_channel_credentials(read("ca.pem"))
        with (
            grpc.secure_channel(worker.address, unknown) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            answer(channel)

    assert with_certificate == [3, 4]
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
