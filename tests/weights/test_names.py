"""The name table against what is known of the released indices."""

import math
from collections import defaultdict

import pytest

from k3jax.config import K3Config, k3, kimi_linear_48b
from k3jax.model.params import abstract
from k3jax.quant import QuantArray
from k3jax.weights.leaves import by_path
from k3jax.weights.names import Piece, pieces, plain_name, stored_name
from tests.helpers import K3_TINY, KIMI_LINEAR_TINY, tiny_config
from tests.weights.folders import tensors_of

# Of the K3 index, with the padding of A_log.
K3_TENSORS, K3_BYTES = 497_220, 1_560_860_324_864
KIMI_LINEAR_TENSORS = 20_493


def stored_bytes(found: list[Piece]) -> int:
    return sum(math.prod(p.shape) * (1 if p.part else 4 if p.float32 else 2) for p in found)


@pytest.fixture(scope="module")
def k3_pieces() -> list[Piece]:
    return list(pieces(k3()))


def test_k3_has_the_tensors_and_bytes_of_the_released_index(k3_pieces: list[Piece]):
    assert len({piece.name for piece in k3_pieces}) == len(k3_pieces) == K3_TENSORS
    assert stored_bytes(k3_pieces) == K3_BYTES


def test_kimi_linear_has_the_tensors_of_the_released_index():
    found = [piece.name for piece in pieces(kimi_linear_48b())]

    assert len(set(found)) == len(found) == KIMI_LINEAR_TENSORS


@pytest.mark.parametrize(
    ("name", "shape", "float32"),
    [
        ("language_model.model.embed_tokens.weight", (163840, 7168), False),
        ("language_model.lm_head.weight", (163840, 7168), False),
        ("language_model.model.norm.weight", (7168,), False),
        ("language_model.model.output_attn_res_proj.weight", (1, 7168), False),
        ("language_model.model.layers.0.self_attn.q_conv1d.weight", (12288, 1, 4), True),
        ("language_model.model.layers.0.self_attn.A_log", (128,), True),
        ("language_model.model.layers.0.self_attn.dt_bias", (12288,), True),
        ("language_model.model.layers.0.self_attn.o_norm.weight", (128,), True),
        ("language_model.model.layers.0.mlp.gate_proj.weight", (33792, 7168), False),
        ("language_model.model.layers.0.mlp.down_proj.weight", (7168, 33792), False),
        ("language_model.model.layers.92.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), False),
        ("language_model.model.layers.92.self_attn.q_b_proj.weight", (18432, 1536), False),
        ("language_model.model.layers.92.self_attention_res_proj.weight", (1, 7168), False),
        (
            "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
            (896,),
            True,
        ),
        (
            "language_model.model.layers.1.block_sparse_moe.experts.895.w1.weight_packed",
            (3072, 1792),
            False,
        ),
        (
            "language_model.model.layers.1.block_sparse_moe.experts.895.w2.weight_scale",
            (3584, 96),
            False,
        ),
        (
            "language_model.model.layers.9.block_sparse_moe.shared_experts.up_proj.weight",
            (6144, 7168),
            False,
        ),
        (
            "language_model.model.layers.9.block_sparse_moe.routed_expert_up_proj.weight",
            (7168, 3584),
            False,
        ),
        ("vision_tower.patch_embed.proj.weight", (1024, 3, 14, 14), False),
        ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1024), False),
        ("vision_tower.encoder.blocks.26.mlp.fc0.weight", (4096, 1024), False),
        ("mm_projector.proj.2.weight", (7168, 4096), False),
    ],
)
def test_k3_tensor_is_as_released(
    k3_pieces: list[Piece], name: str, shape: tuple[int, ...], float32: bool
):
    (piece,) = [piece for piece in k3_pieces if stored_name(piece.name, "k3") == name]

    assert (piece.shape, piece.float32) == (shape, float32)
    assert plain_name(name) == piece.name


@pytest.mark.parametrize(
    ("name", "shape", "float32"),
    [
        ("model.layers.0.self_attn.A_log", (1, 1, 32, 1), True),
        ("model.layers.0.self_attn.dt_bias", (4096,), True),
        ("model.layers.0.self_attn.v_conv1d.weight", (4096, 1, 4), False),
        ("model.layers.0.self_attn.o_norm.weight", (128,), False),
        ("model.layers.0.self_attn.g_b_proj.weight", (4096, 128), False),
        ("model.layers.3.self_attn.q_proj.weight", (6144, 2304), False),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (256,), False),
        ("model.layers.1.block_sparse_moe.experts.255.w2.weight", (2304, 1024), False),
    ],
)
def test_kimi_linear_tensor_is_as_released(name: str, shape: tuple[int, ...], float32: bool):
    (piece,) = [piece for piece in pieces(kimi_linear_48b()) if piece.name == name]

    assert (piece.shape, piece.float32) == (shape, float32)


@pytest.mark.parametrize("folder", [K3_TINY, KIMI_LINEAR_TINY])
def test_golden_folder_has_exactly_the_tensors_of_the_table(folder):
    layout = "k3" if folder == K3_TINY else "kimi-linear"
    found = {stored_name(piece.name, layout): piece for piece in pieces(K3Config.from_hf(folder))}
    stored = tensors_of(folder)

    assert {name: piece.shape for name, piece in found.items()} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    assert {name for name, piece in found.items() if piece.float32} == {
        name for name, tensor in stored.items() if tensor.dtype == "float32"
    }


@pytest.mark.parametrize(
    "config", [K3Config.from_hf(K3_TINY), K3Config.from_hf(KIMI_LINEAR_TINY), tiny_config()]
)
def test_pieces_cover_every_leaf_once(config: K3Config):
    runs = defaultdict(list)
    for piece in pieces(config):
        runs[piece.leaf, piece.part].append((piece.start, piece.start + piece.size))
    sizes = {}
    for name, leaf in by_path(abstract(config)).items():
        parts = ("values", "scales") if isinstance(leaf, QuantArray) else ("",)
        for part in parts:
            sizes[name, part] = math.prod((getattr(leaf, part) if part else leaf).shape)

    for key, spans in runs.items():
        spans.sort()
        assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]], key
        assert (spans[0][0], spans[-1][1]) == (0, sizes.pop(key)), key
    assert sizes == {}
