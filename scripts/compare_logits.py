"""Compare a weights folder with reference values of the same model: logits, layers, decode, states.

The NPZ holds `input_ids [B,T]`, `split`, `logits [B,T,V]` and optionally `layers [L,B,T,D]`,
`decode_logits [B,T-split+1,V]`, `prefill_recurrent` and `final_recurrent` `[KDA,B,H,V,K]` (value
first) and `prefill_conv [KDA,3,B,H*K,4]`, all evaluated in float64 by the released code.

  python scripts/compare_logits.py tests/golden/k3-tiny tests/golden/k3-tiny/text.npz
  python scripts/compare_logits.py WEIGHTS_DIR TEXT_NPZ --json

Exits with 1 when a difference exceeds its tolerance: logits and decode 1e-3, layers and states
3e-4, absolute, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.engine.host import COMPILER_OPTIONS
from k3jax.model import backbone
from k3jax.model.params import K3Params
from k3jax.state import DecodeState, Spans
from k3jax.weights.hf import load

TOLERANCES = {
    "logits": 1e-3,
    "layers": 3e-4,
    "decode_logits": 1e-3,
    "prefill_recurrent": 3e-4,
    "prefill_conv": 3e-4,
    "final_recurrent": 3e-4,
}
PAGE_SIZE = 16


@dataclass(frozen=True)
class Difference:
    """One compared quantity."""

    name: str
    max_abs: float
    tolerance: float
    largest_expected: float

    @property
    def ok(self) -> bool:
        """Whether the difference is a number within the tolerance."""
        return self.max_abs <= self.tolerance


@partial(jax.jit, static_argnames="config", compiler_options=COMPILER_OPTIONS)
def _whole(params: K3Params, config: K3Config, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    x = backbone.embed(params, tokens)
    hidden, layers, _ = backbone.forward(
        params, config, x, Spans.fresh(lengths), None, keep_layers=True
    )
    return backbone.logits(params, hidden), jnp.stack(layers)


@partial(
    jax.jit,
    static_argnames="config",
    donate_argnames="state",
    compiler_options=COMPILER_OPTIONS,
)
def _advance(
    params: K3Params, config: K3Config, tokens: jax.Array, spans: Spans, state: DecodeState
) -> tuple[jax.Array, DecodeState]:
    x = backbone.embed(params, tokens)
    hidden, _, after = backbone.forward(params, config, x, spans, state)
    assert after is not None
    return backbone.logits(params, hidden), after


def compare(
    params: K3Params, config: K3Config, expected: dict[str, np.ndarray]
) -> list[Difference]:
    """Every quantity of `TOLERANCES` that `expected` holds, in that order."""
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    rows, length = tokens.shape
    found: dict[str, np.ndarray] = {}
    logits, layers = _whole(params, config, tokens)
    found["logits"], found["layers"] = np.asarray(logits), np.asarray(layers)

    split = int(expected.get("split", length))
    pages = -(-length // PAGE_SIZE)
    state = DecodeState.init(config, num_slots=rows, num_pages=rows * pages, page_size=PAGE_SIZE)
    slots = jnp.arange(rows, dtype=jnp.int32)

    def spans(start: int, width: int) -> Spans:
        return Spans(
            lengths=jnp.full(rows, width, jnp.int32),
            starts=jnp.full(rows, start, jnp.int32),
            read_slots=slots if start else jnp.full(rows, -1, jnp.int32),
            write_slots=slots,
            page_table=jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
        )

    logits, state = _advance(params, config, tokens[:, :split], spans(0, split), state)
    decoded = [np.asarray(logits[:, -1])]
    found["prefill_recurrent"] = _value_first(state)
    found["prefill_conv"] = _conv_columns(state, config)
    for position in range(split, length):
        token = tokens[:, position : position + 1]
        logits, state = _advance(params, config, token, spans(position, 1), state)
        decoded.append(np.asarray(logits[:, 0]))
    found["decode_logits"] = np.stack(decoded, axis=1)
    found["final_recurrent"] = _value_first(state)

    if "prefill_conv" in expected:
        # The reference keeps one column more than the next token needs.
        kept = found["prefill_conv"].shape[-1]
        expected = {**expected, "prefill_conv": expected["prefill_conv"][..., -kept:]}
    return [
        _difference(name, found[name], expected[name]) for name in TOLERANCES if name in expected
    ]


def _difference(name: str, found: np.ndarray, expected: np.ndarray) -> Difference:
    if found.shape != expected.shape:
        raise ValueError(f"{name}: the file has shape {expected.shape}, the model {found.shape}")
    gap = float(np.abs(found.astype(np.float64) - expected).max())
    return Difference(name, gap, TOLERANCES[name], float(np.abs(expected).max()))


def _value_first(state: DecodeState) -> np.ndarray:
    return np.stack([np.asarray(s).swapaxes(-1, -2) for s in state.recurrent.matrices])


def _conv_columns(state: DecodeState, config: K3Config) -> np.ndarray:
    width = config.kda_num_heads * config.kda_head_dim
    windows = np.stack([np.asarray(w) for w in state.recurrent.windows])
    layers, rows, taps, _ = windows.shape
    return windows.reshape(layers, rows, taps, 3, width).transpose(0, 3, 1, 4, 2)


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 when everything is within tolerance, 1 when not, 2 on bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("expected", type=Path, help="NPZ with reference values")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        config = K3Config.from_hf(args.weights)
        params = load(args.weights, config)
        with np.load(args.expected) as archive:
            expected = {name: archive[name] for name in archive.files}
        for name in ("input_ids", "logits"):
            if name not in expected:
                raise ValueError(f"{args.expected} has no array {name!r}")
        results = compare(params, config, expected)
    except (ValueError, OSError) as error:
        print(f"compare_logits: error: {error}", file=sys.stderr)
        return 2
    good = all(result.ok for result in results)
    if args.json:
        print(json.dumps({"ok": good, "results": [asdict(r) | {"ok": r.ok} for r in results]}))
    else:
        print(f"{'quantity':<18} {'max |diff|':>11} {'tolerance':>10} {'max |value|':>12}")
        for r in results:
            verdict = "ok" if r.ok else "FAIL"
            line = (
                f"{r.name:<18} {r.max_abs:>11.2e} {r.tolerance:>10.0e} {r.largest_expected:>12.3g}"
            )
            print(f"{line}  {verdict}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
