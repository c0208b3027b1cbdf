"""`k3jax chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3jax.cli.arguments import Subparsers
from k3jax.cli.kernels import add_kernel_argument, checked
from k3jax.cli.loading import add_model_arguments, load_params, open_text_model, plan_for
from k3jax.cli.sampling_arguments import (
    add_sampling_arguments,
    add_thinking_arguments,
    chat_options,
    sampling_fields,
)

_DESCRIPTION = """\
Talk to a model. Thinking is dim, tool calls are marked, and a line after each reply says what it
cost. /help shows the commands. Ctrl-C stops a reply, and leaves at the prompt; so does Ctrl-D.

With --tools the model may call the declared functions; you are asked for each result.
Input may be piped: one line is one message, command or tool result.
"""

_EXAMPLES = """\
examples:
  k3jax chat k3-nano
  k3jax chat WEIGHTS --tools tools.json --effort low
  k3jax chat --server 127.0.0.1:50051        with a model that `k3jax serve` runs
  printf 'What is 12+30?\\n/think off\\nSort: pear apple\\n' | k3jax chat k3-nano
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax chat`."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add_model_arguments(parser, optional=True)
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="gRPC address of a running service, instead of WEIGHTS",
    )
    parser.add_argument("--token", metavar="KEY", help="what that service asks of its callers")
    parser.add_argument("--system", metavar="TEXT", help="system message to start with")
    parser.add_argument(
        "--tools", metavar="FILE", help="JSON list of tool declarations in OpenAI's form"
    )
    add_kernel_argument(parser)
    add_sampling_arguments(parser)
    add_thinking_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check everything, load the weights, then converse until the end of the input."""
    if (args.weights is None) == (args.server is None):
        raise ValueError("expected either WEIGHTS or --server HOST:PORT")
    if args.server is not None:
        if args.kernel:
            raise ValueError("--kernel goes with WEIGHTS; a server has chosen its kernels")
        return _run_with_server(args)
    kernels = checked(args.kernel)
    model = open_text_model(args.weights)
    sampling = replace(model.sampling, **sampling_fields(args))
    options = chat_options(args, tools=_read_tools(args.tools))
    _check(model, options)
    params = load_params(model, dtype=args.dtype, dequantize=args.dequantize)

    from k3jax.cli.chat_loop import ChatLoop
    from k3jax.cli.compile_clock import CompileClock
    from k3jax.cli.conversation import Conversation, model_source

    with CompileClock() as clock:
        source = model_source(model, params, plan_for(model, params, kernels, batch=1))
        conversation = Conversation(model, source, sampling, options, clock=clock.running)
        ChatLoop(conversation, compiling=lambda: clock.seconds, system=args.system).run()
    return 0


def _run_with_server(args: argparse.Namespace) -> int:
    from k3jax.cli.chat_loop import ChatLoop
    from k3jax.cli.conversation import Conversation
    from k3jax.cli.server_source import ServerSource
    from serving.client import Client

    with Client(args.server, token=args.token) as client:
        sampling = replace(client.model.sampling, **sampling_fields(args))
        options = chat_options(args, tools=_read_tools(args.tools))
        _check(client.model, options)
        source = ServerSource(client)
        conversation = Conversation(client.model, source, sampling, options)
        ChatLoop(conversation, cached=lambda: source.cached_tokens, system=args.system).run()
    return 0


def _read_tools(file: str | None) -> Any:
    if file is None:
        return None
    try:
        return json.loads(Path(file).read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None


def _check(model: Any, options: Any) -> None:
    """Fail before the weights are read if no conversation can be had with these options."""
    model.chat_prompt([{"role": "user", "content": "Hello"}], options)
