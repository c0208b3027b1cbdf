from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestReport]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestReport, _Mapping]]] = ...) -> None: ...

class RequestReport(_message.Message):
    __slots__ = ("request_id", "state", "prompt_tokens", "cached_tokens", "completion_tokens", "finish_reasons", "queue_seconds", "first_token_seconds", "total_seconds", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: _containers.RepeatedScalarFieldContainer[str]
    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    error: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., finish_reasons: _Optional[_Iterable[str]] = ..., queue_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheReport(_message.Message):
    __slots__ = ("stats", "prefixes")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    stats: _containers.ScalarMap[str, float]
    prefixes: _containers.RepeatedCompositeFieldContainer[Prefix]
    def __init__(self, stats: _Optional[_Mapping[str, float]] = ..., prefixes: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("num_tokens", "block_hash")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    block_hash: int
    def __init__(self, num_tokens: _Optional[int] = ..., block_hash: _Optional[int] = ...) -> None: ...

class GetReadinessRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadinessReport(_message.Message):
    __slots__ = ("ready", "reason", "phases")
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    reason: str
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    def __init__(self, ready: _Optional[bool] = ..., reason: _Optional[str] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("name", "seconds", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    bytes: int
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...
