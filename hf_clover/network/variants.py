"""The presets of the variants of Clover heads, and the bounds of each field of a configuration.

Contract: tables, without code. This file is pushed to the Hub beside `configuration_clover.py`.
"""

from typing import Any

MODEL_TYPES = ("clover", "clover_eagle3")  # `model_type` of the configurations of heads

# The preset of each variant. A field that the user leaves at None takes its value from here.
VARIANTS: dict[str, dict[str, Any]] = {
    "clover-x": {
        "num_heads": 5,
        "num_augmenting_layers": 1,
        "augmenting_block": "full",
        "decoder": "gated",
        "decoder_position": "both",
        "decoder_bias": False,
        "decoder_activation": "silu",
        "output_projector": "none",
        "entry": "fc",
        "recall": True,
        "token_embedding": "input",
        "normalize_embeddings": False,
        "normalize_hidden_states": True,
        "loss_type": "kl",
        "hidden_loss_weight": 0.0,
    },
    "clover-2": {
        "num_heads": 5,
        "num_augmenting_layers": 2,
        "augmenting_block": "full",
        "decoder": "attention",
        "decoder_position": "before",
        "decoder_bias": True,
        "decoder_activation": None,
        "output_projector": "fc",
        "entry": "decoder",
        "recall": False,
        "token_embedding": "lm_head",
        "normalize_embeddings": False,
        "normalize_hidden_states": False,
        "loss_type": "clover-2",
        "hidden_loss_weight": 10.0,
    },
    "clover": {
        "num_heads": 3,
        "num_augmenting_layers": 1,
        "augmenting_block": "full",
        "decoder": "attention",
        "decoder_position": "after",
        "decoder_bias": False,
        "decoder_activation": "silu",
        "output_projector": "residual",
        "entry": "decoder",
        "recall": False,
        "token_embedding": "lm_head",
        "normalize_embeddings": True,
        "normalize_hidden_states": False,
        "loss_type": "clover",
        "hidden_loss_weight": 0.0,
    },
    "medusa": {
        "num_heads": 5,
        "num_augmenting_layers": 0,
        "augmenting_block": "none",
        "decoder": "none",
        "decoder_position": "after",
        "decoder_bias": False,
        "decoder_activation": None,
        "output_projector": "residual",
        "entry": "decoder",
        "recall": False,
        "token_embedding": "lm_head",
        "normalize_embeddings": False,
        "normalize_hidden_states": False,
        "loss_type": "clover",
        "hidden_loss_weight": 0.0,
    },
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "variant": tuple(VARIANTS),
    "augmenting_block": ("full", "attention", "mlp", "none"),
    "decoder": ("attention", "mlp", "gated", "none"),
    "decoder_position": ("before", "after", "both"),
    "decoder_activation": (None, "silu"),
    "output_projector": ("fc", "residual", "none"),
    "entry": ("decoder", "fc"),
    "token_embedding": ("lm_head", "input"),
    "loss_type": ("clover-2", "clover", "kl", "acceptance"),
    "draft_tree": ("global", "levels", "chain"),
}

# The smallest and the largest possible value of each field. The largest are far above any model there is: a config
# with a larger one is a mistake or an attack.
INTEGERS = {
    "hidden_size": (1, 1 << 17),
    "vocab_size": (2, 1 << 24),
    "intermediate_size": (1, 1 << 20),
    "num_heads": (1, 64),
    "num_augmenting_layers": (0, 64),
    "num_hidden_layers": (1, 64),
    "target_hidden_size": (1, 1 << 17),
    "num_attention_heads": (1, 1 << 12),
    "num_key_value_heads": (1, 1 << 12),
    "decoder_num_heads": (1, 1 << 12),
    "decoder_width": (1, 1 << 20),
    "head_dim": (1, 1 << 13),
    "max_position_embeddings": (1, 1 << 26),
    "draft_top_k": (1, 1 << 10),
    "draft_beam_width": (1, 1 << 10),
    "draft_copies": (0, 1 << 10),
    "draft_depth": (1, 256),
    "draft_vocab_size": (1, 1 << 24),
}
MAY_BE_NONE = ("head_dim", "draft_depth", "draft_vocab_size")
NUMBERS = {
    "rms_norm_eps": (1e-12, 1.0),
    "initializer_range": (0.0, 1.0),
    "embedding_scale": (1e-6, 1e6),
    "hidden_state_scale": (1e-6, 1e6),
    "loss_decay": (0.0, 1.0),
    "hidden_loss_weight": (0.0, 1e6),
    "token_loss_weight": (0.0, 1e6),
    "draft_top_p": (0.0, 1.0),
    "draft_min_p": (0.0, 1.0),
}
SWITCHES = (
    "recall",
    "regressive",
    "normalize_embeddings",
    "normalize_hidden_states",
    "decoder_bias",
    "attention_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
    "use_rope",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "own_lm_head",
    "own_embedding",
)
MOST_PARAMETERS = 1 << 36  # most parameters of heads: sizes may be possible one by one, but not together
LONGEST_NAME = 1024


__all__ = [
    "CHOICES",
    "INTEGERS",
    "LONGEST_NAME",
    "MAY_BE_NONE",
    "MODEL_TYPES",
    "MOST_PARAMETERS",
    "NUMBERS",
    "SWITCHES",
    "VARIANTS",
]
