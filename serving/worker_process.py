"""One worker as a process: start-up in phases, then requests until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from k3jax.compilation_cache import enable_compilation_cache
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.text_model import TextModel
from k3jax.weights import load_model
from serving.logs import set_up_logs
from serving.memory import NotEnoughMemory, num_bytes, plan_memory, size
from serving.options import WorkerOptions, split_address
from serving.readiness import ProbeFailed
from serving.served_model import ServedModel
from serving.service_state import Phase, ServiceState
from serving.tracing import exporting
from serving.warm_up import WarmUp
from serving.worker import Worker

Say = Callable[[str], None]


def main() -> int:
    """Read options, one line of JSON, from stdin; serve until SIGTERM, or until stdin ends.

    The end of stdin means that whoever started the process is gone.
    """
    options = WorkerOptions.from_json(sys.stdin.readline())
    try:
        asyncio.run(serve(options, parent_gone=True))
    except (NotEnoughMemory, ProbeFailed, ValueError, OSError) as error:
        print(f"k3jax: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


async def serve(
    options: WorkerOptions,
    *,
    parent_gone: bool = False,
    say: Say = print,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Start, become ready, and serve until SIGTERM or SIGINT; then drain.

    `say` gets one line per phase and the memory table; `parent_gone` also stops at the end of
    stdin. A start that is called off ends the process here, with code 0.
    Raises NotEnoughMemory, ProbeFailed, or ValueError and OSError for options that cannot be met.
    """
    set_up_logs(options.log_level, options.log_format)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent_gone:
        loop.add_reader(sys.stdin, _watch_parent, stop)
    starting = asyncio.create_task(_start(options, say))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        # A thread may be deep in the compiler or in reading weights: the interpreter would wait for
        # it for minutes, or abort when it is torn down around it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    worker = starting.result()
    on_ready()
    await stop.wait()
    if worker.requests.num_open:
        say(f"draining {worker.requests.num_open} requests, {options.drain_seconds:.0f} s at most")
    await worker.drain(options.drain_seconds)


async def _start(options: WorkerOptions, say: Say) -> Worker:
    """All phases, up to a worker that takes requests."""
    tls = options.tls
    spans = exporting(options.otlp, options.name) if options.otlp else None
    state = ServiceState(on_phase=lambda phase: say(phase_line(phase)))
    with state.phase("tokenizer"):
        text = TextModel.open(options.weights)
    sizes: dict[str, Any] = options.sizes.given()
    settings = EngineConfig(**sizes).resolve(text.config)
    with state.phase("weights") as phase:
        enable_compilation_cache()
        params, _ = await asyncio.to_thread(
            load_model,
            text.folder,
            dtype=options.dtype,
            dequantize_experts=options.dequantize,
            progress=False,
        )
        phase.bytes = num_bytes(params)
    with state.phase("caches") as phase:
        plan = plan_memory(params, text.config, settings)
        plan.check()
        engine = Engine(params, text.config, EngineConfig(**sizes))
        phase.bytes = plan.wanted
    for line in str(engine.kernel_plan).splitlines():
        say(f"  {line}")
    model = ServedModel(text, options.name, settings.max_context, str(params.embed.dtype))
    worker = Worker(
        model,
        engine,
        state,
        max_rows=settings.max_rows,
        page_size=settings.page_size,
        vision=params.vision,
        spans=spans,
    )
    await worker.start(options.listen, tls=tls, token=options.token)
    try:
        if options.warm_up:
            plan = await WarmUp(worker, engine, plan, say).run()
        for line in plan.lines():
            say(line)
    except BaseException:
        await worker.drain(0)
        raise
    if options.metrics:
        host, port = split_address(options.metrics)
        worker.metrics.serve(port, host)
    # A pass of Python's collector over programs and modules stops everything for 0.2 s. They stay
    # for good, so none will look at them again.
    gc.collect()
    gc.freeze()
    worker.metrics.note_ready()
    state.set_ready()
    return worker


def phase_line(phase: Phase) -> str:
    """A phase as one line."""
    amount = size(phase.bytes) if phase.bytes else ""
    return f"  {phase.name:<10} {phase.seconds:>7.1f} s {amount:>9}  {phase.note}".rstrip()


def _watch_parent(stop: asyncio.Event) -> None:
    if not sys.stdin.buffer.raw.read(1):  # pyright: ignore[reportAttributeAccessIssue]
        asyncio.get_running_loop().remove_reader(sys.stdin)
        stop.set()


if __name__ == "__main__":
    sys.exit(main())
