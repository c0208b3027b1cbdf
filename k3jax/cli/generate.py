"""`k3jax generate`: replies to one prompt, or to every line of a file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from k3jax.cli.arguments import Subparsers, count
from k3jax.cli.kernels import add_kernel_argument, checked
from k3jax.cli.loading import add_model_arguments, load_params, open_text_model, plan_for
from k3jax.cli.sampling_arguments import (
    add_sampling_arguments,
    add_thinking_arguments,
    chat_options,
    sampling_fields,
)

if TYPE_CHECKING:
    from k3jax.cli.jobs import Job
    from k3jax.model.params import K3Params
    from k3jax.text_model import TextModel
    from pallas_kernels.implementation import KernelPlan

DEFAULT_BATCH = 8

_DESCRIPTION = """\
Generate a reply to --prompt, to the text on stdin (-), or to every line of --file.

A line of FILE is a JSON object with "prompt" (text), "messages" (OpenAI's form, with images as
paths or data URLs) or "tokens" (ids as they are). It may add "tools", "tool_choice",
"response_format", "thinking", "effort", "id" and any sampling option, as "max_tokens" or
"stop_ids". All lines are checked before anything runs. Replies have the form of "response_format",
if there is one; "tool_choice" is auto or none, as only `k3jax serve` can make the model call.

Sampling follows --seed; line n of a file adds n to it, so that equal prompts get different replies.
"""

_EXAMPLES = """\
examples:
  k3jax generate k3-nano --prompt "What is 12+30?"
  echo "Sort: pear apple" | k3jax generate k3-nano - --no-thinking --temperature 0
  k3jax generate WEIGHTS --file requests.jsonl --json --batch 16 > replies.jsonl
  k3jax generate WEIGHTS --prompt "What is this?" --image cat.png
  k3jax generate WEIGHTS --prompt "Once upon a" --raw --max-tokens 100 --stop-id 13
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="reply to a prompt, or to every line of a file",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("stdin", metavar="-", nargs="?", choices=["-"], help="read the prompt here")
    source.add_argument("--prompt", metavar="TEXT", help="the user's message")
    source.add_argument("--file", metavar="FILE", help="JSON lines; - reads them from stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object per reply")
    parser.add_argument("--system", metavar="TEXT", help="system message before a plain prompt")
    parser.add_argument(
        "--image", metavar="PATH", action="append", default=[], help="show it with the prompt"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue plain prompts as text, without chat template"
    )
    parser.add_argument(
        "--batch",
        type=count,
        default=DEFAULT_BATCH,
        metavar="N",
        help=f"lines of a file that run together (default {DEFAULT_BATCH})",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities, with N alternatives per token",
    )
    add_kernel_argument(parser)
    add_sampling_arguments(parser)
    add_thinking_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check everything, load the weights, then reply in the order of the prompts."""
    _check_combination(args)
    kernels = checked(args.kernel)
    model = open_text_model(args.weights)
    jobs = _jobs(args, model)
    params = load_params(model, dtype=args.dtype, dequantize=args.dequantize)
    plan = plan_for(model, params, kernels, batch=min(args.batch, len(jobs)))
    _reply(args, model, params, jobs, plan)
    return 0


def _check_combination(args: argparse.Namespace) -> None:
    if args.file is not None and args.image:
        raise ValueError("--image goes with --prompt; lines of a file name images in messages")
    if args.raw and (args.image or args.system is not None or args.no_thinking or args.effort):
        raise ValueError(
            "--raw leaves the chat template out, and with it --image, --system, --no-thinking "
            "and --effort"
        )
    if args.logprobs is not None and not args.json:
        raise ValueError("--logprobs needs --json")


def _jobs(args: argparse.Namespace, model: TextModel) -> list[Job]:
    from k3jax.cli.jobs import JobMaker

    fields = sampling_fields(args)
    if args.logprobs is not None:
        fields["logprobs"] = args.logprobs
    maker = JobMaker(
        model=model,
        sampling=replace(model.sampling, **fields),
        options=chat_options(args),
        system=args.system,
        raw=args.raw,
    )
    if args.file == "-":
        return maker.from_lines(sys.stdin.buffer, "stdin")
    if args.file is not None:
        with Path(args.file).open("rb") as lines:
            return maker.from_lines(lines, args.file)
    text = sys.stdin.read() if args.stdin else args.prompt
    return [maker.from_text(text.removesuffix("\n") if args.stdin else text, args.image)]


def _reply(
    args: argparse.Namespace, model: TextModel, params: K3Params, jobs: list[Job], plan: KernelPlan
) -> None:
    from tqdm import tqdm

    from k3jax.cli.answers import BatchRunner, batches, show, to_json, totals
    from k3jax.cli.compile_clock import CompileClock
    from k3jax.cli.terminal import Style, rate

    style = Style.of(sys.stdout)
    prompt_tokens = new_tokens = 0
    start = time.perf_counter()
    hidden = len(jobs) <= args.batch or not sys.stderr.isatty()
    with CompileClock() as clock, tqdm(total=len(jobs), unit="prompt", disable=hidden) as bar:
        runner = BatchRunner(params, model, jobs, args.batch, plan)
        for group in batches(jobs, args.batch):
            answers = runner.run(group)
            for answer in answers:
                if args.json:
                    print(json.dumps(to_json(model, answer), ensure_ascii=False), flush=True)
                    continue
                if len(jobs) > 1:
                    print(style.bold(f"[{answer.job.id}]"))
                show(answer, sys.stdout, style)
            more_prompt, more_new = totals(answers)
            prompt_tokens, new_tokens = prompt_tokens + more_prompt, new_tokens + more_new
            bar.update(len(group))
        running = time.perf_counter() - start - clock.seconds
        compiling = f" and {clock.seconds:.1f} s compiling" if clock.seconds >= 0.1 else ""
    noun = "prompt" if len(jobs) == 1 else "prompts"
    print(
        f"{len(jobs)} {noun}: {prompt_tokens} prompt tokens, {new_tokens} generated in "
        f"{running:.2f} s{compiling}: {rate(new_tokens, running)}",
        file=sys.stderr,
    )
