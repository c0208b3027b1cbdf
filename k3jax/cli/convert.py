"""`k3jax convert`: a model folder into the native or the released format."""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from k3jax.bundled import weights_folder
from k3jax.cli.arguments import Subparsers

_EXAMPLES = """\
examples:
  k3jax convert ~/models/Kimi-K3 ~/models/k3-native
  k3jax convert trained/ published/ --to hf           share a trained model
  k3jax convert ~/models/Kimi-K3 k3-bf16 --to hf --dequantize
"""

# What makes a folder usable for text beside its weights.
_COMPANIONS = (
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "LICENSE",
)


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax convert`."""
    parser = subparsers.add_parser(
        "convert",
        help="convert a model between the released and the native format",
        description=(
            "Read the model in SRC, of either format, and write it to DST together with its\n"
            "tokenizer files. Without further options every weight keeps its bits."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument("source", metavar="SRC", help="model folder to read, or k3-nano")
    parser.add_argument("target", metavar="DST", help="folder to write; it may not hold a model")
    parser.add_argument(
        "--to",
        choices=("native", "hf"),
        default="native",
        help="native: Orbax (default); hf: safetensors as released",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of matrices and norms (default: as SRC stores them)",
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="write quantised weights as plain floats"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert, then say what was written."""
    from k3jax.weights import load_model, save_hf, save_native
    from k3jax.weights.load import stored_dtype
    from k3jax.weights.model_folder import check_free

    source, target = weights_folder(args.source), Path(args.target)
    check_free(target)  # before minutes of loading
    dtype = args.dtype or stored_dtype(source)
    params, config = load_model(source, dtype=dtype, dequantize_experts=args.dequantize)
    if args.dequantize:
        config = replace(config, expert_format=None)
    if args.to == "native":
        save_native(params, config, target)
    else:
        save_hf(params, config, target, dtype=dtype)
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    print(f"wrote {target} ({args.to}, {dtype}); see `k3jax info {target}`")
    return 0
