"""Components against float64 evaluations of the released modeling code (see tests/golden)."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.model.kda import kda
from k3jax.model.layers import activation, mlp, rms_norm
from k3jax.model.mla import mla
from k3jax.model.moe import moe, route
from k3jax.model.params import ResidualMix
from k3jax.state import Spans
from k3jax.weights.hf import load
from pallas_kernels.residual import mixture
from tests.helpers import GOLDEN, K3_TINY, KIMI_LINEAR_TINY

COMPONENTS = GOLDEN / "components"
MODELS = {"k3-tiny": K3_TINY, "kimi-linear-tiny": KIMI_LINEAR_TINY}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(COMPONENTS / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def assert_close(found, expected, tolerance: float = 1e-5) -> None:
    scale = max(float(np.abs(expected).max()), 1e-30)
    assert np.abs(np.asarray(found, np.float64) - expected).max() / scale <= tolerance


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request):
    config = K3Config.from_hf(MODELS[request.param])
    return config, load(MODELS[request.param], config, progress=False), request.param


@pytest.mark.parametrize(("name", "eps"), [("rms_eps1e6", 1e-6), ("rms_eps1e5", 1e-5)])
def test_rms_norm_matches_the_released_code(name, eps):
    g = golden("norms")
    assert_close(rms_norm(g["x"], g["weight"], eps), g[name])


def test_bfloat16_rms_norm_rounds_in_the_released_order():
    g = {k: jnp.asarray(v).view(jnp.bfloat16) for k, v in golden("norms_bf16").items()}
    found = rms_norm(g["x"], g["weight"], 1e-5)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.view(jnp.int16), g["y"].view(jnp.int16))


@pytest.mark.parametrize(
    ("name", "kind", "beta", "linear_beta"),
    [
        ("b4_l25", "situ", 4.0, 25.0),
        ("b1_none", "situ", 1.0, None),
        ("b2_l3", "situ", 2.0, 3.0),
        ("silu", "silu", 1.0, None),
    ],
)
def test_activation_matches_the_released_code(name, kind, beta, linear_beta):
    g = golden("situ")
    config = replace(
        K3Config.from_hf(K3_TINY), activation=kind, situ_beta=beta, situ_linear_beta=linear_beta
    )
    assert_close(activation(config)(jnp.asarray(g["gate"]), jnp.asarray(g["up"])), g[name])


@pytest.mark.parametrize("case", ["k3", "linear", "groups", "norenorm", "top1", "softmax"])
def test_router_picks_the_released_experts_and_weights(case):
    g = {k.removeprefix(f"{case}_"): v for k, v in golden("router").items() if k.startswith(case)}
    experts, top, groups, top_groups, softmax, renormalize = (int(v) for v in g["params"])
    config = replace(
        K3Config.from_hf(K3_TINY),
        num_experts=experts,
        num_experts_per_token=top,
        num_expert_groups=groups,
        top_expert_groups=top_groups,
        router_activation="softmax" if softmax else "sigmoid",
        router_renormalize=bool(renormalize),
        routed_scaling_factor=float(g["scale"]),
    )
    indices, weights = route(jnp.asarray(g["x"] @ g["weight"].T), g["bias"], config)
    order = np.argsort(indices, axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(indices), order, -1), g["idx_sorted"]
    )
    assert_close(np.take_along_axis(np.asarray(weights), order, -1), g["w_sorted"])


@pytest.mark.parametrize("blocks", [0, 1, 3, 8])
def test_residual_mix_matches_the_released_code(blocks):
    g = {k.removeprefix(f"nb{blocks}_"): v for k, v in golden("attn_res").items()}
    candidates = [jnp.asarray(g["blocks"][:, i]) for i in range(blocks)] + [
        jnp.asarray(g["prefix"])
    ]
    params = ResidualMix(norm=jnp.asarray(g["norm"]), proj=jnp.asarray(g["proj"][0]))
    assert_close(mixture(candidates, params.norm, params.proj, 1e-5), g["out"])


def test_sublayers_match_the_released_code(model):
    config, params, name = model
    g = golden(f"layers_{name}")
    x = jnp.asarray(g["x"])
    spans = Spans.fresh(jnp.full(x.shape[0], x.shape[1], jnp.int32))
    real = spans.token_mask(x.shape[1])
    sublayers = {
        "kda": lambda p: kda(p.mixer, config, x, spans, None)[0],
        "mla": lambda p: mla(p.mixer, config, x, spans, None)[0],
        "mlp": lambda p: mlp(p.ffn, config, x),
        "moe": lambda p: moe(p.ffn, config, x, real),
    }
    compared = 0
    for key, expected in g.items():
        kind, _, layer = key.partition("_layer")
        if kind in sublayers and layer.isdigit():
            assert_close(sublayers[kind](params.layers[int(layer)]), expected)
            compared += 1
    assert compared == (7 if name == "k3-tiny" else 4)
