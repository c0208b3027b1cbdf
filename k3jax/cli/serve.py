"""`k3jax serve`: a model behind an HTTP and a gRPC port."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3jax.cli.arguments import Subparsers, count
from k3jax.cli.kernels import add_kernel_argument, checked
from k3jax.cli.loading import DTYPES, add_model_arguments
from k3jax.compilation_cache import SWITCH as CACHE_SWITCH

_DESCRIPTION = """\
Serve a model with OpenAI's HTTP API and native gRPC, on this machine only unless told otherwise.
The HTTP side is the smg gateway in front of one or more workers; --grpc-only starts none.

Requests are taken once every program has been compiled and representative requests have succeeded.
Ctrl-C or SIGTERM lets open requests finish.

Every option can also be given in the environment: --max-rows as K3JAX_MAX_ROWS, and so on.
Numbers may be written as 128k (k = 1024, m = 1024²).
"""

_EXAMPLES = """\
examples:
  k3jax serve k3-nano
  k3jax serve WEIGHTS --replicas 2 --http-port 8080 --api-key SECRET
  K3JAX_MAX_CONTEXT=32k k3jax serve WEIGHTS
  k3jax serve WEIGHTS --grpc-only --listen 0.0.0.0:50051 --tls-cert c.pem --tls-key c.key
"""

_SWITCHES = ("--dequantize", "--grpc-only", "--no-prefix-cache", "--no-warm-up")

_POLICIES = ("cache_aware", "least_load", "power_of_two", "round_robin", "random")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP and gRPC",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add_model_arguments(parser)
    _add_service_arguments(parser.add_argument_group("service"))
    _add_security_arguments(parser.add_argument_group("security"))
    _add_engine_arguments(parser.add_argument_group("engine (defaults follow from the model)"))
    dtype, dequantize = _variable("--dtype"), _variable("--dequantize")
    parser.set_defaults(dtype=os.environ.get(dtype), dequantize=_switch(dequantize))
    flags = (text for action in parser._actions for text in action.option_strings)
    parser.set_defaults(variables=sorted(_variable(f) for f in flags if f.startswith("--")))
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from serving.gateway import GatewayFailed
    from serving.memory import NotEnoughMemory
    from serving.readiness import ProbeFailed
    from serving.server import run as serve

    _check_environment(args)
    try:
        return serve(_options(args))
    except (GatewayFailed, NotEnoughMemory, ProbeFailed) as error:
        print(f"k3jax: error: {error}", file=sys.stderr)
        return 1


def _options(args: argparse.Namespace) -> Any:
    from serving.gateway import bracketed
    from serving.options import EngineSizes, ServeOptions, WorkerOptions

    host = bracketed(args.host)
    worker = WorkerOptions(
        weights=args.weights,
        name=args.name or Path(args.weights).name,
        listen=args.listen,
        metrics=None if args.metrics_port is None else f"{host}:{args.metrics_port}",
        dtype=args.dtype,
        dequantize=args.dequantize,
        sizes=EngineSizes(
            max_rows=args.max_rows,
            max_context=args.max_context,
            num_pages=args.num_pages,
            num_slots=args.num_slots,
            token_budget=args.token_budget,
            max_waiting=args.max_waiting,
            checkpoint_interval=args.checkpoint_interval,
            host_bytes=args.host_bytes,
            prefix_cache=not args.no_prefix_cache,
            kernels=checked(args.kernel) or None,
        ),
        warm_up=not args.no_warm_up,
        token=args.api_key if args.grpc_only else None,
        tls_certificate=args.tls_cert,
        tls_key=args.tls_key,
        tls_client_ca=args.tls_client_ca,
        otlp=args.otlp,
        drain_seconds=args.drain_seconds,
        log_level=args.log_level,
        log_format=args.log_format,
    )
    return ServeOptions(
        worker=worker,
        replicas=args.replicas,
        http=None if args.grpc_only else f"{host}:{args.http_port}",
        api_key=None if args.grpc_only else args.api_key,
        policy=args.policy,
    )


def _add_service_arguments(group: argparse._ArgumentGroup) -> None:
    _add(group, "--name", metavar="NAME", help="what clients call it (default: the folder's name)")
    _add(group, "--host", default="127.0.0.1", metavar="HOST", help="of HTTP and metrics")
    _add(group, "--http-port", type=_port, default=8000, metavar="N", help="0 finds a free one")
    _add(group, "--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="of gRPC")
    _add(group, "--metrics-port", type=_port, default=9100, metavar="N", help="of the worker")
    _add(group, "--replicas", type=count, default=1, metavar="N", help="workers, on ports in a row")
    _add(group, "--policy", choices=_POLICIES, default=_POLICIES[0], help="of routing to replicas")
    _add_flag(group, "--grpc-only", help="no gateway and no HTTP")
    text = "OpenTelemetry collector that gets a span of every request; needs the extra otel"
    _add(group, "--otlp", metavar="HOST:PORT", help=text)
    _add(group, "--drain-seconds", type=float, default=30.0, metavar="X", help="after SIGTERM")
    _add(group, "--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    _add(group, "--log-format", choices=("text", "json"), default="text")


def _add_security_arguments(group: argparse._ArgumentGroup) -> None:
    text = "key that HTTP callers must send, or gRPC callers with --grpc-only"
    _add(group, "--api-key", metavar="KEY", help=text)
    _add(group, "--tls-cert", metavar="FILE", help="PEM certificate of gRPC; needs --grpc-only")
    _add(group, "--tls-key", metavar="FILE", help="its key")
    _add(group, "--tls-client-ca", metavar="FILE", help="callers need certificates signed by this")


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    _add(group, "--max-rows", type=count, metavar="N", help="sequences that run at once")
    _add(group, "--max-context", type=count, metavar="N", help="tokens of prompt and answer")
    _add(group, "--num-pages", type=count, metavar="N", help="pages of 64 tokens in the cache")
    _add(group, "--num-slots", type=count, metavar="N", help="recurrent states: rows and cached")
    _add(group, "--token-budget", type=count, metavar="N", help="prompt tokens of one step")
    _add(group, "--max-waiting", type=count, metavar="N", help="requests that may queue")
    _add(
        group, "--checkpoint-interval", type=count, metavar="N", help="of cached states, in tokens"
    )
    _add(group, "--host-bytes", type=count, metavar="N", help="host memory for evicted prefixes")
    add_kernel_argument(group, default=os.environ.get(_variable("--kernel")))
    _add_flag(group, "--no-prefix-cache", help="keep nothing between requests")
    _add_flag(group, "--no-warm-up", help="take requests at once, and compile as they come")


def _add(group: argparse._ArgumentGroup, flag: str, **options: Any) -> None:
    """Declare an option that the environment can give too; argparse parses a text default."""
    choices = options.pop("choices", None)
    if choices:
        options |= {"type": _one_of(choices), "metavar": "{" + ",".join(choices) + "}"}
    default = options.get("default")
    parts = [options.pop("help", ""), "" if default is None else f"(default {default})"]
    options["default"] = os.environ.get(_variable(flag), default)
    group.add_argument(flag, help=" ".join(filter(None, parts)), **options)


def _add_flag(group: argparse._ArgumentGroup, flag: str, **options: Any) -> None:
    """Declare a switch; `run` refuses values of the environment that are neither 0 nor 1."""
    default = _switch(_variable(flag))
    group.add_argument(flag, action="store_true", default=default, **options)


def _switch(variable: str) -> bool | str:
    value = os.environ.get(variable, "0")
    return {"0": False, "1": True}.get(value, value)


def _check_environment(args: argparse.Namespace) -> None:
    """Raise ValueError for values of the environment that argparse does not look at, and for a
    variable of ours that no option has."""
    for name in sorted(os.environ):
        if name.startswith("K3JAX_") and name not in (*args.variables, CACHE_SWITCH):
            near = difflib.get_close_matches(name, [*args.variables, CACHE_SWITCH], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name} is set, but no option of `k3jax serve` has it{hint}")
    if args.dtype not in (None, *DTYPES):
        raise ValueError(f"K3JAX_DTYPE = {args.dtype!r}, expected one of {', '.join(DTYPES)}")
    for flag in _SWITCHES:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if not isinstance(value, bool):
            raise ValueError(f"{_variable(flag)} = {value!r}, expected 0 or 1")


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return parse


def _variable(flag: str) -> str:
    return "K3JAX_" + flag.removeprefix("--").replace("-", "_").upper()


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 0 to 65535")
    return int(text)
