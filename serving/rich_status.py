"""Errors as gRPC reports them: a code, a sentence, and details that a program can read."""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from k3jax.engine.engine import QueueFull
from serving.engine_loop import EngineFailed, SlowReader
from serving.wire import FieldError

RETRY_SECONDS = 1.0
"""When to come back to a full queue."""


class Unavailable(RuntimeError):
    """The service is starting or draining."""


def to_status(error: Exception) -> status_pb2.Status:
    """The status of an error of this service; an unknown one is INTERNAL."""
    details: list[Message] = []
    match error:
        case FieldError():
            code = code_pb2.INVALID_ARGUMENT
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=error.field, description=error.problem
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        case ValueError():
            code = code_pb2.INVALID_ARGUMENT
        case QueueFull() | SlowReader():
            code = code_pb2.RESOURCE_EXHAUSTED
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(RETRY_SECONDS * 1e9))
            if isinstance(error, QueueFull):
                details.append(retry)
        case Unavailable():
            code = code_pb2.UNAVAILABLE
        case KeyError():
            code = code_pb2.NOT_FOUND
        case EngineFailed():
            code = code_pb2.INTERNAL
        case _:
            code = code_pb2.INTERNAL
    status = status_pb2.Status(code=code, message=_sentence(error))
    for detail in details:
        status.details.add().Pack(detail)
    return status


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """End a call with the status of an error."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))
    raise AssertionError("abort returned")


def from_call(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The rich status that came with a failed call, if one did."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            return status_pb2.Status.FromString(value)
    return None


def _sentence(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text or type(error).__name__
