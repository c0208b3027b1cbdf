"""The options of sampling and thinking, shared by the subcommands that generate."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from k3jax.cli.arguments import count

if TYPE_CHECKING:
    from k3jax.chat import ChatOptions

EFFORTS = ("none", "low", "high", "max")

DEFAULT_MAX_TOKENS = 1024

_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "keep the likeliest tokens up to this probability"),
    ("top_k", int, "keep this many of the likeliest tokens; 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("repetition_penalty", float, "divide the scores of tokens that occurred; 1 is none"),
    ("presence_penalty", float, "subtract from the scores of generated tokens"),
    ("frequency_penalty", float, "the same, times how often they were generated"),
    ("seed", int, "whole number from which the draws follow (default 0)"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `sampling_fields` reads."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json)")
    group.add_argument(
        "--max-tokens",
        type=count,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"tokens to generate at most, as 300 or 2k (default {DEFAULT_MAX_TOKENS})",
    )
    for name, kind, text in _NUMBERS:
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument(
        "--stop-id",
        type=int,
        action="append",
        metavar="N",
        help="also stop at this id (repeatable)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the model's own end ids"
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the options set."""
    fields = {name: getattr(args, name) for name, _, _ in _NUMBERS}
    fields |= {"max_tokens": args.max_tokens, "ignore_eos": args.ignore_eos or None}
    fields["stop_ids"] = tuple(args.stop_id) if args.stop_id else None
    return {name: value for name, value in fields.items() if value is not None}


def add_thinking_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `chat_options` reads."""
    group = parser.add_argument_group("thinking")
    group.add_argument("--no-thinking", action="store_true", help="answer at once")
    group.add_argument(
        "--effort", choices=EFFORTS, help="how much to think (default max; none: not at all)"
    )


def chat_options(args: argparse.Namespace, **fields: Any) -> ChatOptions:
    """The thinking options, with other fields of ChatOptions. Raises ValueError as its makers."""
    from k3jax.chat import ChatOptions, thinking_from_openai

    thinking, effort = thinking_from_openai("none" if args.no_thinking else args.effort)
    return ChatOptions(thinking=thinking, effort=effort, **fields)
