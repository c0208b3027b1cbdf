"""Everything that `k3jax serve` can be told, as one plain object that can be sent to a process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.security import Tls


@dataclass(frozen=True)
class EngineSizes:
    """Fields of `EngineConfig` by their names there; None leaves the engine's default."""

    max_rows: int | None = None
    max_context: int | None = None
    num_pages: int | None = None
    num_slots: int | None = None
    token_budget: int | None = None
    max_waiting: int | None = None
    checkpoint_interval: int | None = None
    host_bytes: int | None = None
    prefix_cache: bool = True
    kernels: dict[str, str] | None = None

    def given(self) -> dict[str, Any]:
        """The ones that are set."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True)
class WorkerOptions:
    """One worker.

    Attributes:
        weights: model folder, or the bundled model's name.
        name: what clients call the model.
        listen: `HOST:PORT` of gRPC.
        metrics: `HOST:PORT` of the Prometheus side, None for none.
        warm_up: compile everything, and try representative requests, before becoming ready.
        token: what callers must show.
        otlp: `HOST:PORT` of an OpenTelemetry collector, None for no traces.
        drain_seconds: how long open requests may go on after SIGTERM.
    """

    weights: str
    name: str
    listen: str = "127.0.0.1:50051"
    metrics: str | None = None
    dtype: str | None = None
    dequantize: bool = False
    sizes: EngineSizes = EngineSizes()
    warm_up: bool = True
    token: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    otlp: str | None = None
    drain_seconds: float = 30.0
    log_level: str = "warning"
    log_format: str = "text"

    @property
    def tls(self) -> Tls | None:
        """Raises ValueError for a certificate without its key, or the reverse."""
        if not (self.tls_certificate or self.tls_key or self.tls_client_ca):
            return None
        if not (self.tls_certificate and self.tls_key):
            raise ValueError("TLS needs both a certificate and its key")
        client_ca = Path(self.tls_client_ca) if self.tls_client_ca else None
        return Tls(Path(self.tls_certificate), Path(self.tls_key), client_ca)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerOptions:
        """The reverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": EngineSizes(**fields["sizes"])})


@dataclass(frozen=True)
class ServeOptions:
    """Workers, and the gateway before them.

    Attributes:
        worker: of the first replica; the others listen on the ports after its own.
        http: `HOST:PORT` of the OpenAI-compatible side; None starts no gateway.
        api_key: asked of HTTP callers.
        policy: how the gateway spreads requests.
    """

    worker: WorkerOptions
    replicas: int = 1
    http: str | None = "127.0.0.1:8000"
    api_key: str | None = None
    policy: str = "cache_aware"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[HOST]:PORT`. Raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ValueError(f"{address!r} is no HOST:PORT such as 127.0.0.1:50051")
    return host.removeprefix("[").removesuffix("]"), int(port)
