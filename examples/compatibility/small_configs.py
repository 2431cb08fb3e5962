"""Tiny configurations of transformers' model types: the names of their sizes, and what a few types need in addition.

Contract: `tiny_config(model_type)` is the type's default configuration with small sizes, three layers that cover every
kind of layer in the default, and windows and chunks of a few tokens. This module knows names of fields and of model
types, and nothing of models.
"""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

LAYERS = 3
SIZES = [  # a value, and the fields that get it
    (32, "hidden_size n_embd d_model embedding_dim emb_dim dim_model dim_model_base word_embed_proj_dim"),
    (32, "hidden_dim attention_hidden_size lru_width backbone_hidden_size"),
    (32, "adapter_in_dim adapter_out_dim adapter_input_size out_hidden_size vision_output_dim output_channels"),
    (32, "projector_input_dim projector_output_dim"),
    (48, "intermediate_size intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size n_inner dff"),
    (48, "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size ffn_dim d_ff"),
    (48, "dense_intermediate_size prefix_dense_intermediate_size expert_ffn_hidden_size ffn_hidden_size dim_ff"),
    (16, "embedding_size input_embedding_size output_embedding_size"),  # these differ from the hidden size
    (48, "decoder_ffn_dim encoder_ffn_dim feed_forward_size mlp_dim d_inner"),
    (64, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size shape_vocab_size"),
    (64, "encoder_hash_byte_group_vocab pronunciation_vocab_size mamba_d_ssm"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers depth"),
    (LAYERS, "num_encoder_layers num_blocks"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    (4, "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
    (4, "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    (2, "num_key_value_heads num_kv_heads kv_n_heads num_global_key_value_heads swa_num_key_value_heads"),
    (2, "linear_num_key_heads num_query_groups n_groups mamba_n_groups"),
    (8, "head_dim global_head_dim d_head dim_head d_kv kv_channels attention_head_size index_head_dim swa_head_dim"),
    (8, "qk_rope_head_dim qk_nope_head_dim v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim"),
    (8, "query_pre_attn_scalar rotary_dim swa_v_head_dim"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim gated_norm_rank attention_head_dim"),
    (8, "hidden_size_per_layer_input laurel_rank hc_lowrank shape_embed_dim pronunciation_embed_dim"),
    (8, "router_hidden_size d_rel nemo_conv_channels depthwise_separable_out_channel ext_pw_out_channel"),
    (6, "sliding_window sliding_window_size local_attention window_size attention_window_size"),
    (6, "local_attention_window_len keep_window_size attention_chunk_size"),
    (8, "index_topk index_topk_blocks block_size index_block_size"),
    (16, "original_max_position_embeddings log_scaling_n_floor"),
    (128, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions"),
    (128, "context_length model_max_length"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group num_expert_group"),
    (1, "topk_group first_k_dense_replace num_dense_layers max_window_layers num_kv_shared_layers"),
    (8, "state_size ssm_state_size mamba_d_state time_step_rank mamba_dt_rank"),
    (16, "mamba_d_head mamba_head_dim mamba_headdim mamba_chunk_size chunk_size"),
    (16, "image_size index_n_heads"),
    (8, "patch_size"),
    (4, "image_seq_length"),
]
SMALL: dict[str, Any] = {name: value for value, names in SIZES for name in names.split()}
# A decoder with a cache, with windows if it supports them, and with a padding token that is in the vocabulary.
SMALL |= dict(is_decoder=True, use_cache=True, use_sliding_window=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
EVEN_IF_NONE = ("is_decoder", "sliding_window")

CONVOLUTIONS = dict(layer_types=["conv", "full_attention", "conv"])
RECURRENT = dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
GEMMA3N = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2)
QSA = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)
DOTS3_WINDOWS = dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, head_dim=16)
DOTS3_WINDOWS |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
DOTS3 = dict(per_layer_config={1: DOTS3_WINDOWS})
RESTART = dict(original_max_position_embeddings=2)  # longer prompts, and texts that grow past it, get another cache
ROPE = dict(rope_type="default", rope_theta=10000.0)

# Types that cannot be built here, whatever their configuration, and the reason.
ASSISTANT = "it drafts for a Gemma 4 model from that model's keys and values, and generates nothing alone"
MUSIC = "transformers makes its class from its decoder's configuration only; it writes several tokens at a time"
NOT_HERE = {
    "gemma3n": "its vision tower needs the package timm; its text decoder is `gemma3n_text`",
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    "big_bird": dict(num_random_blocks=1, block_size=2),
    "cohere_compass_text": dict(rope_parameters={"full_attention": ROPE | dict(mrope_section=[2, 1, 1])}),
    "dbrx": dict(attn_config=dict(rope_theta=10000.0, clip_qkv=8.0)),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note": dict(text_config=DOTS3),
    "dots3_note_text": DOTS3,
    "dory": dict(n_input_layers=1, n_recurrent_layers=1, n_output_layers=1),
    "gemma3n_text": GEMMA3N,
    "granitemoehybrid": RECURRENT,
    "hrm_text": dict(num_hidden_layers=1, num_layers_per_stack=None, L_cycles=2),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "mamba2": dict(head_dim=16),
    "ministral": dict(head_dim=8),
    "nemotron": dict(num_key_value_heads=2),
    "moshi": dict(sliding_window=64),  # beyond it the cache drops positions that the mask still shows
    "phi3": RESTART,
    "phi4_multimodal": RESTART,
    "qwen4_exp": dict(text_config=QSA),
    "qwen4_exp_text": QSA,
    "reformer": dict(axial_pos_embds=False, attn_layers=["local", "lsh", "local"], hash_seed=0),
    "roformer": dict(embedding_size=32),
    "xlstm": dict(hidden_size=128, embedding_dim=128),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(layers_block_type=["linear_attention", "hybrid", "hybrid"], attention_hidden_size=64),
    "zamba2": dict(attention_hidden_size=64),
    "zaya": dict(num_experts_per_tok=1),
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_merged(_small_values(config_class()), OVERRIDES.get(model_type, {})))


def _small_values(default: PreTrainedConfig) -> dict[str, Any]:
    """The fields that differ from `default`, including those of its sub-configurations."""
    values: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in type(default).sub_configs:
            part = getattr(default, name)
            if part is not None:
                values[name] = {"model_type": part.model_type, **_small_values(part)}
        elif name == "rope_parameters" and value:
            values[name] = _small_rope(value)
        elif name in SMALL and (value is not None or name in EVEN_IF_NONE):
            values[name] = SMALL[name]
        elif _is_a_kind_per_layer(value, default):
            kinds = list(dict.fromkeys(value))
            values[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
    if "kv_lora_rank" in values:  # every head has its own keys and values of the latent
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    """Small rope parameters; `value` may hold parameters for each kind of layer."""
    return {k: _small_rope(v) if isinstance(v, dict) else SMALL.get(k, v) for k, v in value.items()}


def _is_a_kind_per_layer(value: Any, default: PreTrainedConfig) -> bool:
    """Whether `value` is a list such as `layer_types`. A list of only "full_attention" does not count: it follows from
    other fields."""
    is_list = isinstance(value, (list, tuple)) and len(value) == getattr(default, "num_hidden_layers", None)
    return is_list and all(isinstance(kind, str) for kind in value) and set(value) != {"full_attention"}


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {name for name, value in more.items() if isinstance(value, dict) and isinstance(values.get(name), dict)}
    return {**values, **more, **{name: _merged(values[name], more[name]) for name in both}}
