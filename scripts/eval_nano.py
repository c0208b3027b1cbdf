"""Measure k3-nano, or any model with its tokenizer, on exercises held out from its training."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from k3jax.chat.tokenizer import Tokenizer
from k3jax.engine.generate import generate
from k3jax.engine.request import SamplingParams
from k3jax.weights.load import load_model
from scripts.nano import tasks
from scripts.nano.evaluation import as_json, evaluate, table


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="a model folder with its tokenizer files")
    parser.add_argument("--count", type=int, default=100, help="exercises per row (default 100)")
    parser.add_argument("--tasks", nargs="+", choices=list(tasks.TASKS), default=list(tasks.TASKS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count {args.count}: at least one exercise per row is needed")
    try:
        tokenizer = Tokenizer.from_dir(args.weights)
        params, config = load_model(args.weights, progress=False)
    except (FileNotFoundError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    sampling = SamplingParams(max_tokens=96)

    def reply(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(one.tokens) for one in generate(params, config, prompts, sampling)]

    results = evaluate(reply, tokenizer, count=args.count, names=args.tasks)
    print(json.dumps(as_json(results), indent=1) if args.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
