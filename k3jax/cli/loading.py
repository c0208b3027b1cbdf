"""The WEIGHTS argument of subcommands that run a model, and what it loads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3jax.model.params import K3Params
    from k3jax.text_model import TextModel
    from pallas_kernels.implementation import KernelPlan


DTYPES = ("float32", "bfloat16")


def add_model_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declare WEIGHTS, --dtype and --dequantize."""
    parser.add_argument(
        "weights",
        metavar="WEIGHTS",
        nargs="?" if optional else None,
        help="model folder with its tokenizer, or k3-nano for the bundled model",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of matrices and state (default: float32, or as a native folder stores them)",
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="turn packed experts into plain floats"
    )


def open_text_model(weights: str) -> TextModel:
    """All of the model but its weights. Raises as `TextModel.open`."""
    from k3jax.text_model import TextModel

    return TextModel.open(weights)


def load_params(
    model: TextModel, *, dtype: str | None = None, dequantize: bool = False
) -> K3Params:
    """The model's weights, with a progress bar on a terminal. Raises as `load_model`."""
    from k3jax.compilation_cache import enable_compilation_cache
    from k3jax.weights import load_model

    enable_compilation_cache()
    params, _ = load_model(model.folder, dtype=dtype, dequantize_experts=dequantize)
    return params


def plan_for(
    model: TextModel, params: K3Params, kernels: Mapping[str, str], *, batch: int
) -> KernelPlan:
    """What kernels run for batches of that size. Raises ValueError for variants that cannot."""
    from k3jax.engine.generate import PAGE_SIZE
    from k3jax.engine.kernel_plan import kernel_plan

    return kernel_plan(params, model.config, kernels, page_size=PAGE_SIZE, batch=batch)
