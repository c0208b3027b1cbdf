"""Train the bundled model k3-nano on a corpus made on the fly, then write it in released form."""

import argparse
import sys
from pathlib import Path

import jax

from k3jax.chat.tokenizer import Tokenizer
from k3jax.config import K3Config
from k3jax.model.params import count
from k3jax.weights.hf_writer import save
from k3jax.weights.load import load_model
from scripts.nano import corpus, curve, shape, vocabulary
from scripts.nano.objective import trainable
from scripts.nano.training import Plan, finished, train

MODEL = Path(__file__).resolve().parent.parent / "k3jax" / "models" / "k3-nano"


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder for checkpoints, loss.csv and loss.png")
    parser.add_argument("--out", type=Path, help="write the trained model to this folder")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument(
        "--minutes", type=float, default=100.0, help="stop and save after this time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rate", type=float, default=1.0, help="scale all step sizes (a trained start wants less)"
    )
    parser.add_argument(
        "--start", type=Path, help="go on from this model folder instead of random weights"
    )
    parser.add_argument(
        "--stats", action="store_true", help="print the corpus's token lengths, stop"
    )
    parser.add_argument("--vocabulary", action="store_true", help="write the tokenizer files, stop")
    args = parser.parse_args()
    if args.vocabulary:
        vocabulary.write(args.run, vocabulary.learn(corpus.sample_texts(), shape.NUM_BASE))
        return 0
    tokenizer = Tokenizer.from_dir(MODEL)
    if args.stats:
        print(corpus.statistics(corpus.Encoder(tokenizer)))
        return 0
    config = K3Config.from_hf(shape.config_json())
    initial = None
    if args.start:
        initial, _ = load_model(args.start, dequantize_experts=True, progress=False)
    plan = Plan(args.run, args.steps, args.minutes, args.seed, rate=args.rate, initial=initial)
    progress = train(plan, trainable(config), tokenizer)
    curve.draw(args.run)
    if not finished(plan, progress):
        print(f"stopped at step {progress.step} of {plan.steps}; run again to go on")
        return 1
    print(f"{count(progress.params)} parameters, held-out exact replies: {progress.exact}")
    if args.out:
        save(jax.device_get(progress.params), config, args.out, overwrite=True)
        vocabulary.copy(MODEL, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
