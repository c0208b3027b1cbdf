"""The released `config.json` → `K3Config`: which fields exist, must agree or may be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from k3jax.config import K3Config, VisionConfig

# Fields that no released forward pass reads. Everything else must be understood or refused.
_INERT = frozenset(
    """
    _name_or_path _attn_implementation _attn_implementation_autoset add_cross_attention
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index image_placeholder
    initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate rope_theta
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p topk_method torch_dtype torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache use_grouped_topk
    router_aux_loss_coef aux_loss_alpha seq_aux output_router_logits attention_dropout
    """.split()
)

_REQUIRED_TEXT = (
    "vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads hidden_act "
    "rms_norm_eps kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_attn_config"
).split()

_OPTIONAL_TEXT = frozenset(
    """
    num_key_value_heads activation_situ_beta activation_situ_linear_beta q_lora_rank mla_use_nope
    mla_use_output_gate num_experts num_experts_per_token moe_intermediate_size num_shared_experts
    routed_expert_hidden_size latent_moe_use_norm first_k_dense_replace moe_layer_freq
    num_expert_group topk_group moe_router_activation_func moe_renormalize routed_scaling_factor
    attn_res_block_size tie_word_embeddings max_position_embeddings model_max_length bos_token_id
    eos_token_id pad_token_id num_nextn_predict_layers quantization_config rope_scaling
    latent_norm_eps
    """.split()
)

_WRAPPER = frozenset(
    """
    text_config vision_config media_placeholder_token_id bos_token_id eos_token_id pad_token_id
    tie_word_embeddings quantization_config vocab_size hidden_size num_hidden_layers
    num_attention_heads num_key_value_heads max_position_embeddings
    """.split()
)

_LINEAR_ATTN = frozenset(
    """
    num_heads head_dim short_conv_kernel_size kda_layers full_attn_layers gate_lower_bound
    use_full_rank_gate
    """.split()
)

_VISION = frozenset(
    """
    activation_func attn_bias init_pos_emb_height init_pos_emb_time init_pos_emb_width linear_bias
    merge_kernel_size merge_type mlp_type mm_hidden_size mm_projector_type norm_eps norm_type
    patch_embed_proj_bias patch_size pos_emb_interpolation_mode pos_emb_type projector_hidden_act
    projector_ln_eps qkv_hidden_size text_hidden_size vt_hidden_size vt_intermediate_size
    vt_num_attention_heads vt_num_hidden_layers video_attn_type
    """.split()
)


class _Fields:
    """One JSON object whose fields are read with their types checked and their names reported."""

    def __init__(self, data: Mapping[str, Any], where: str, known: frozenset[str]) -> None:
        self.data, self.where = data, where
        unknown = sorted(set(data) - known - _INERT)
        if unknown:
            raise ValueError(
                f"config: unknown field {self.name(unknown[0])} = {data[unknown[0]]!r}; "
                "it could change the computation, so it is refused rather than ignored"
            )

    def name(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def bad(self, key: str, rule: str) -> ValueError:
        return ValueError(f"config: {self.name(key)} = {self.data.get(key)!r}, {rule}")

    def require(self, key: str) -> Any:
        if self.data.get(key) is None:
            raise ValueError(f"config: missing field {self.name(key)}")
        return self.data[key]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.require(key) if default is None else self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.bad(key, f"expected an integer of at least {minimum}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.data.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.require(key) if default is None else self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.bad(key, "expected a number")
        if not abs(value) < 1e30 or (positive and value <= 0):  # also refuses NaN
            raise self.bad(key, f"expected a finite number{' above 0' if positive else ''}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(key, "expected true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a present value that we do not implement."""
        value = self.data.get(key)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            raise self.bad(key, f"only {' or '.join(map(repr, allowed))} is supported")

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.require(key)
        if not isinstance(value, Mapping):
            raise self.bad(key, "expected an object")
        return value


def parse_config(data: Mapping[str, Any]) -> K3Config:
    """Check a released config (K3 wrapper or flat Kimi-Linear) and build `K3Config`."""
    if "text_config" not in data:
        if data.get("model_type") not in ("kimi_linear", None):
            raise ValueError(
                f"config: model_type = {data['model_type']!r}, expected 'kimi_linear' or a "
                "'kimi_k3' wrapper with text_config"
            )
        known = frozenset(_REQUIRED_TEXT) | _OPTIONAL_TEXT
        return _parse_text(_Fields(data, "", known), data.get("quantization_config"), None)

    wrapper = _Fields(data, "", _WRAPPER)
    wrapper.only("model_type", "kimi_k3")
    wrapper.only("tie_word_embeddings", False)
    text_data = wrapper.mapping("text_config")
    text = _Fields(text_data, "text_config", frozenset(_REQUIRED_TEXT) | _OPTIONAL_TEXT)
    text.only("model_type", "kimi_linear")
    for key in sorted(set(data) & set(text_data) & (_WRAPPER - {"text_config"})):
        if data[key] is not None and text_data[key] is not None and data[key] != text_data[key]:
            raise ValueError(
                f"config: {key} = {data[key]!r} contradicts text_config.{key} = {text_data[key]!r}"
            )
    vision = None
    if data.get("vision_config") is not None:
        media_token_id = wrapper.integer("media_placeholder_token_id", minimum=0)
        vision = _parse_vision(
            _Fields(wrapper.mapping("vision_config"), "vision_config", _VISION), media_token_id
        )
    quantization = data.get("quantization_config") or text_data.get("quantization_config")
    return _parse_text(text, quantization, vision, fallback=data)


def _parse_text(
    text: _Fields,
    quantization: Any,
    vision: VisionConfig | None,
    fallback: Mapping[str, Any] | None = None,
) -> K3Config:
    for key in _REQUIRED_TEXT:
        text.require(key)
    text.only("mla_use_nope", True)
    text.only("tie_word_embeddings", False)
    text.only("num_nextn_predict_layers", 0)
    text.only("topk_method", "noaux_tc")
    text.only("hidden_act", "situ", "silu")
    if text.data.get("rope_scaling") is not None:
        raise text.bad("rope_scaling", "Kimi's attention has no rotary embedding to scale")
    heads = text.integer("num_attention_heads")
    if text.integer("num_key_value_heads", heads) != heads:
        raise text.bad("num_key_value_heads", f"must equal num_attention_heads = {heads}")
    if vision is not None and vision.text_hidden_size != text.integer("hidden_size"):
        raise ValueError(
            f"config: vision_config.text_hidden_size = {vision.text_hidden_size} contradicts "
            f"{text.name('hidden_size')} = {text.integer('hidden_size')}"
        )
    activation: Literal["situ", "silu"] = text.require("hidden_act")
    beta = text.number("activation_situ_beta", 1.0)
    if beta < 0:
        raise text.bad("activation_situ_beta", "expected a number of at least 0")
    linear_beta = None
    if text.data.get("activation_situ_linear_beta") is not None:
        linear_beta = text.number("activation_situ_linear_beta", positive=True)
    ids = {
        key: text.data.get(key) if text.data.get(key) is not None else (fallback or {}).get(key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    vocab_size = text.integer("vocab_size")
    eos = ids["eos_token_id"]
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    for key, values in (
        ("bos_token_id", (ids["bos_token_id"],)),
        ("eos_token_id", eos_ids),
        ("pad_token_id", (ids["pad_token_id"],)),
    ):
        for value in values:
            if value is not None and not (type(value) is int and 0 <= value < vocab_size):
                raise ValueError(
                    f"config: {key} = {value!r} is no token id below vocab_size = {vocab_size}"
                )
    limits = [
        text.integer(key)
        for key in ("max_position_embeddings", "model_max_length")
        if text.data.get(key) is not None
    ]
    if not limits:
        raise ValueError(f"config: missing field {text.name('max_position_embeddings')}")
    attn_res_block_size = text.optional_integer("attn_res_block_size")
    return K3Config(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        num_layers=text.integer("num_hidden_layers"),
        intermediate_size=text.integer("intermediate_size"),
        rms_norm_eps=text.number("rms_norm_eps", positive=True),
        activation=activation,
        # The released class reads `beta or 1.0`: None and 0 both become 1.
        situ_beta=beta or 1.0,
        situ_linear_beta=linear_beta,
        **_kda_fields(text),
        num_heads=heads,
        q_lora_rank=text.optional_integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        mla_output_gate=text.flag("mla_use_output_gate", False),
        **_moe_fields(text, quantization),
        attn_res_block_size=attn_res_block_size,
        max_context=min(limits),
        bos_token_id=ids["bos_token_id"],
        eos_token_ids=eos_ids,
        pad_token_id=ids["pad_token_id"],
        latent_norm_eps=text.number("latent_norm_eps", 1e-6, positive=True),
        vision=vision,
    )


def _kda_fields(text: _Fields) -> dict[str, Any]:
    attn = _Fields(
        text.mapping("linear_attn_config"), text.name("linear_attn_config"), _LINEAR_ATTN
    )
    num_layers = text.integer("num_hidden_layers")
    lists = {key: attn.require(key) for key in ("kda_layers", "full_attn_layers")}
    for key, layers in lists.items():
        valid = isinstance(layers, list | tuple) and all(
            type(layer) is int and 1 <= layer <= num_layers for layer in layers
        )
        if not valid or len(set(layers)) != len(layers):
            raise attn.bad(key, f"expected distinct 1-based layer numbers up to {num_layers}")
    kda, full = set(lists["kda_layers"]), set(lists["full_attn_layers"])
    if kda & full:
        raise ValueError(
            f"config: layer {min(kda & full)} is in both {attn.name('kda_layers')} and "
            f"{attn.name('full_attn_layers')}"
        )
    missing = set(range(1, num_layers + 1)) - kda - full
    if missing:
        raise ValueError(
            f"config: layer {min(missing)} is in neither {attn.name('kda_layers')} nor "
            f"{attn.name('full_attn_layers')}"
        )
    bound = attn.data.get("gate_lower_bound")
    if bound is not None and attn.number("gate_lower_bound") >= 0:
        raise attn.bad("gate_lower_bound", "expected a negative number")
    return {
        "kda_layers": tuple(sorted(layer - 1 for layer in kda)),
        "kda_num_heads": attn.integer("num_heads"),
        "kda_head_dim": attn.integer("head_dim"),
        "kda_conv_size": attn.integer("short_conv_kernel_size", minimum=2),
        "kda_gate_lower_bound": None if bound is None else float(bound),
        "kda_full_rank_gate": attn.flag("use_full_rank_gate", False),
    }


def _moe_fields(text: _Fields, quantization: Any) -> dict[str, Any]:
    num_experts = text.integer("num_experts", 0, minimum=0)
    groups = text.integer("num_expert_group", 1)
    top_groups = text.integer("topk_group", 1)
    latent = text.optional_integer("routed_expert_hidden_size")
    latent_norm = text.flag("latent_moe_use_norm", False)
    text.only("moe_router_activation_func", "sigmoid", "softmax")
    if latent_norm and latent is None:
        raise text.bad("latent_moe_use_norm", "needs routed_expert_hidden_size")
    per_token = text.integer("num_experts_per_token") if num_experts else 1
    if num_experts:
        if per_token > num_experts:
            raise text.bad("num_experts_per_token", f"exceeds num_experts = {num_experts}")
        if num_experts % groups:
            raise text.bad("num_expert_group", f"does not divide num_experts = {num_experts}")
        if top_groups > groups:
            raise text.bad("topk_group", f"exceeds num_expert_group = {groups}")
        if groups > top_groups and per_token > top_groups * (num_experts // groups):
            raise text.bad("topk_group", f"leaves fewer experts than {per_token} per token")
    return {
        "num_experts": num_experts,
        "num_experts_per_token": per_token,
        "moe_intermediate_size": text.integer("moe_intermediate_size") if num_experts else 1,
        "num_shared_experts": text.integer("num_shared_experts", 0, minimum=0),
        "expert_latent_size": latent,
        "expert_latent_norm": latent_norm,
        "first_dense_layers": text.integer("first_k_dense_replace", 0, minimum=0),
        "moe_layer_freq": text.integer("moe_layer_freq", 1),
        "num_expert_groups": groups,
        "top_expert_groups": top_groups,
        "router_activation": text.data.get("moe_router_activation_func") or "sigmoid",
        "router_renormalize": text.flag("moe_renormalize", True),
        "routed_scaling_factor": text.number("routed_scaling_factor", 1.0),
        "expert_format": _expert_format(quantization),
    }


def _expert_format(quantization: Any) -> Literal["mxfp4"] | None:
    """Only compressed-tensors' packed MXFP4 on the routed experts is a released format."""
    if not quantization:
        return None
    rule = "only compressed-tensors 'mxfp4-pack-quantized' with 4-bit groups of 32 is supported"
    if (
        not isinstance(quantization, Mapping)
        or quantization.get("format") != "mxfp4-pack-quantized"
    ):
        found = quantization.get("format") if isinstance(quantization, Mapping) else quantization
        raise ValueError(f"config: quantization_config.format = {found!r}, {rule}")
    if quantization.get("kv_cache_scheme") is not None:
        raise ValueError("config: quantization_config.kv_cache_scheme must be null")
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ValueError(f"config: quantization_config.config_groups = {groups!r}, {rule}")
    for name, group in groups.items():
        weights = (group.get("weights") or {}) if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            where = f"quantization_config.config_groups.{name}"
            raise ValueError(f"config: {where} = {group!r}, {rule}")
        for key, expected in (("num_bits", 4), ("group_size", 32), ("type", "float")):
            if weights.get(key, expected) != expected:
                where = f"quantization_config.config_groups.{name}.weights.{key}"
                raise ValueError(f"config: {where} = {weights[key]!r}, {rule}")
        if group.get("input_activations") is not None:
            where = f"quantization_config.config_groups.{name}.input_activations"
            raise ValueError(f"config: {where} must be null, activations are not quantised")
    return "mxfp4"


def _parse_vision(vision: _Fields, media_token_id: int) -> VisionConfig:
    vision.only("activation_func", "gelu_pytorch_tanh")
    vision.only("merge_type", "sd2_tpool")
    vision.only("mlp_type", "mlp2")
    vision.only("mm_projector_type", "patchmergerv2")
    vision.only("norm_type", "rmsnorm")
    vision.only("pos_emb_interpolation_mode", "bilinear")
    vision.only("pos_emb_type", "divided_fixed")
    vision.only("projector_hidden_act", "gelu")
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        vision.only(key, False)
    merge = vision.require("merge_kernel_size")
    if not (
        isinstance(merge, list | tuple)
        and [type(size) for size in merge] == [int, int]
        and merge[0] == merge[1] >= 1
    ):
        raise vision.bad("merge_kernel_size", "expected two equal integers of at least 1")
    hidden = vision.integer("vt_hidden_size")
    if vision.integer("mm_hidden_size", hidden) != hidden:
        raise vision.bad("mm_hidden_size", f"must equal vt_hidden_size = {hidden}")
    qkv, heads = vision.integer("qkv_hidden_size"), vision.integer("vt_num_attention_heads")
    if qkv % heads or (qkv // heads) % 4:
        raise vision.bad("qkv_hidden_size", f"must give {heads} heads of a multiple of 4")
    return VisionConfig(
        hidden_size=hidden,
        qkv_hidden_size=qkv,
        num_heads=heads,
        num_layers=vision.integer("vt_num_hidden_layers"),
        intermediate_size=vision.integer("vt_intermediate_size"),
        patch_size=vision.integer("patch_size"),
        pos_emb_height=vision.integer("init_pos_emb_height"),
        pos_emb_width=vision.integer("init_pos_emb_width"),
        pos_emb_time=vision.integer("init_pos_emb_time"),
        merge_size=merge[0],
        projector_ln_eps=vision.number("projector_ln_eps", 1e-5, positive=True),
        text_hidden_size=vision.integer("text_hidden_size"),
        media_token_id=media_token_id,
        norm_eps=vision.number("norm_eps", VisionConfig.norm_eps, positive=True),
    )
