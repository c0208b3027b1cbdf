"""`k3jax info`: what a model folder holds."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from k3jax.bundled import weights_folder
from k3jax.cli.arguments import Subparsers
from k3jax.cli.kernels import add_kernel_argument, checked

_EXAMPLES = """\
examples:
  k3jax info k3-nano
  k3jax info ~/models/Kimi-K3 --json | python3 -m json.tool
  k3jax info WEIGHTS --kernels --dtype bfloat16
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments of `k3jax info`."""
    parser = subparsers.add_parser(
        "info",
        help="show what a model folder holds",
        description=(
            "Show format, layers, sizes and parts of a model, and check its headers against its\n"
            "config. No weights are read."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="model folder, or k3-nano")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--kernels", action="store_true", help="add what each op runs as on this machine, and why"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="with --kernels: what weights are loaded as (default: as other commands do)",
    )
    add_kernel_argument(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report as aligned lines, or as one JSON object."""
    from k3jax.weights.summary import summarize

    if not args.kernels and (args.kernel or args.dtype):
        raise ValueError("--kernel and --dtype go with --kernels")
    kernels = checked(args.kernel)
    report = summarize(weights_folder(args.weights))
    plan = _plan(args, kernels) if args.kernels else None
    if args.json:
        print(json.dumps(report | ({} if plan is None else {"kernels": plan.as_dict()})))
        return 0
    for line in _lines(report):
        print(line)
    if plan is not None:
        print(f"\n{plan}")
    return 0


def _plan(args: argparse.Namespace, kernels: dict[str, str]) -> Any:
    """What one sequence would run as; the service plans for its own batch and context."""
    import jax.numpy as jnp

    from k3jax.config import K3Config
    from k3jax.engine.generate import PAGE_SIZE
    from k3jax.engine.kernel_plan import kernel_plan
    from k3jax.model.params import abstract
    from k3jax.weights.load import stored_dtype
    from k3jax.weights.model_folder import is_native

    folder = weights_folder(args.weights)
    config = K3Config.from_hf(folder)
    default = stored_dtype(folder) if is_native(folder) else jnp.float32
    params = abstract(config, args.dtype or default)
    return kernel_plan(params, config, kernels, page_size=PAGE_SIZE, batch=1)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for name, value in (_storage(report) | _architecture(report["config"])).items():
        yield f"{name:<10} {value}"
    yield ""
    yield f"{'part':<26} {'weights':>9} {'bytes':>9} {'share':>7}"
    for name, part in report["parts"].items():
        share = part["bytes"] / report["bytes"]
        yield f"{name:<26} {_si(part['weights']):>9} {_si(part['bytes']):>8}B {share:>7.1%}"


def _storage(report: dict[str, Any]) -> dict[str, str]:
    files = f" in {report['files']} files" if report.get("files", 1) > 1 else ""
    missing = report["missing_tokenizer_files"]
    return {
        "model": f"{report['path']} ({report['layout']} layout)",
        "format": report["format"] + files,
        "stored as": f"{report['dtype']}, routed experts {report['expert_format']}",
        "weights": f"{_si(report['weights'])}, {_si(report['weights_per_token'])} used per token",
        "bytes": _si(report["bytes"]) + "B",
        "tokenizer": f"missing {' and '.join(missing)}" if missing else "yes",
    }


def _architecture(config: dict[str, Any]) -> dict[str, str]:
    kda, mla = config["kda_heads"], config["mla_heads"]
    pattern = "".join(kind[0].upper() for kind in config["layer_kinds"])
    groups = " ".join(pattern[i : i + 4] for i in range(0, len(pattern), 4))
    block, sparse = config["attn_res_block_size"], len(config["sparse_layers"])
    chosen = f"{config['num_experts_per_token']} of {config['num_experts']}"
    return {
        "context": f"{config['max_context']} tokens, vocabulary {config['vocab_size']}",
        "stop ids": ", ".join(map(str, config["eos_token_ids"])) or "none",
        "layers": f"{config['num_layers']}, width {config['hidden_size']}, {config['activation']}",
        "pattern": f"{groups}  (K = KDA, M = MLA)",
        "KDA": f"{kda[0]} heads of {kda[1]}",
        "MLA": f"{mla[0]} heads of {mla[1]}, {config['latent_width']} values cached per token",
        "experts": f"{chosen} in each of {sparse} layers" if config["num_experts"] else "none",
        "residuals": f"depth blocks of {block} layers" if block else "plain",
        "vision": "yes" if config["vision"] else "no",
    }


def _si(number: int) -> str:
    """Three digits and a decimal suffix: 2.78 T."""
    value, suffixes = float(number), iter(("", " k", " M", " G", " T"))
    suffix = next(suffixes)
    while value >= 999.5:
        value, suffix = value / 1000, next(suffixes)
    return f"{value:.3g}{suffix or ' '}"
