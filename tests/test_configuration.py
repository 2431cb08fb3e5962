"""`CloverConfig`: variants are presets, ablations are fields, what cannot be is refused by name."""

import json

import pytest
from transformers import AutoConfig

from hf_clover import CloverConfig, CloverHeads
from hf_clover.network.configuration_clover import VARIANTS

TINY = dict(vocab_size=24, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)


def tiny(**fields) -> CloverConfig:
    return CloverConfig(**{**TINY, **fields})


# What PAPERS.md says of each variant, and the experiments of clover-x, written down a second time.
SHARED = dict(augmenting_block="full", regressive=True, loss_decay=0.7, token_loss_weight=1.0)
PRESETS = {
    "clover-x": SHARED
    | dict(num_heads=5, num_augmenting_layers=1, loss_type="kl", hidden_loss_weight=0.0)
    | dict(decoder="gated", decoder_position="both", decoder_bias=False, decoder_width=TINY["hidden_size"])
    | dict(entry="fc", output_projector="none", normalize_embeddings=False, normalize_hidden_states=True),
    "clover-2": SHARED
    | dict(num_heads=5, num_augmenting_layers=2, loss_type="clover-2", hidden_loss_weight=10.0)
    | dict(decoder="attention", decoder_position="before", decoder_bias=True, decoder_activation=None)
    | dict(entry="decoder", output_projector="fc", normalize_embeddings=False, normalize_hidden_states=False)
    | dict(embedding_scale=1.0),
    "clover": SHARED
    | dict(num_heads=3, num_augmenting_layers=1, loss_type="clover", hidden_loss_weight=0.0)
    | dict(decoder="attention", decoder_position="after", decoder_bias=False, decoder_activation="silu")
    | dict(output_projector="residual", normalize_embeddings=True, normalize_hidden_states=False),
    "medusa": dict(augmenting_block="none", num_augmenting_layers=0, decoder="none")
    | dict(output_projector="residual", hidden_loss_weight=0.0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_sets_the_fields_of_its_preset(variant):
    config = tiny(variant=variant)
    assert {field: getattr(config, field) for field in PRESETS[variant]} == PRESETS[variant]
    assert config.draft_depth == (8 if variant == "clover-x" else config.num_heads)
    assert (config.draft_tree, config.draft_top_p, config.draft_min_p) == ("global", 0.8, 0.25)


IMPOSSIBLE_ALONE = (
    *(("medusa", "output_projector", "none"), ("clover-x", "decoder", "none")),  # all heads would be one
    *((variant, "recall", True) for variant in ("clover", "clover-2", "medusa")),  # without a gated decoder
)
NOTHING_TO_RECALL_WITH = (
    ("regressive", False),
    ("decoder", "attention"),
    ("decoder", "none"),
    ("augmenting_block", "none"),
    ("num_augmenting_layers", 0),
)
ENDS_WITH_ITS_HEADS = (*NOTHING_TO_RECALL_WITH, ("recall", False), ("output_projector", "residual"))


@pytest.mark.parametrize(("field", "value"), NOTHING_TO_RECALL_WITH)
def test_recall_needs_attention_and_a_cell_that_sees_drafted_tokens(field, value):
    others = {"output_projector": "fc"} if value in ("none", False) else {}
    assert tiny(variant="clover-x", **others).recall
    assert not tiny(variant="clover-x", **{field: value}, **others).recall
    with pytest.raises(ValueError, match=r"`recall=True` is impossible: it must be False without a gated decoder"):
        tiny(variant="clover-x", recall=True, **{field: value}, **others)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_field_of_a_preset_can_be_changed_alone(variant):
    """Each field of the preset can be set to what another variant has, and nothing else changes."""
    preset = tiny(variant=variant).to_dict()
    for other in VARIANTS.values():
        for field, value in other.items():
            if value is None or (variant, field, value) in IMPOSSIBLE_ALONE:
                continue  # None asks for the preset
            changed = tiny(variant=variant, **{field: value}).to_dict()
            expected = {**preset, field: value}
            if field == "num_heads":  # which the depth follows
                expected["draft_depth"] = max(8, value) if variant == "clover-x" else value
            if variant == "clover-x" and (field, value) in ENDS_WITH_ITS_HEADS:
                expected["draft_depth"] = changed["num_heads"]
                if (field, value) in NOTHING_TO_RECALL_WITH:
                    expected["recall"] = False
            assert changed == expected


def test_missing_fields_are_derived_from_others():
    config = CloverConfig(vocab_size=24, hidden_size=32, num_attention_heads=4)
    assert (config.num_key_value_heads, config.decoder_num_heads, config.head_dim) == (4, 4, 8)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert CloverConfig().variant == "clover-2"


WITHOUT_PARTS = {"decoder": "none", "regressive": False, "augmenting_block": "none"}


@pytest.mark.parametrize(
    ("fields", "modules", "decoder"),
    [  # the rows of the ablation table, each with the modules that are left of the first paper's variant
        ({}, {"layers", "norm", "decoder", "residual_blocks"}, "AttentionDecoder"),
        ({"decoder": "mlp"}, {"layers", "norm", "decoder", "residual_blocks"}, "MLPDecoder"),
        ({"decoder": "none", "regressive": False}, {"layers", "norm", "residual_blocks"}, None),
        (WITHOUT_PARTS, {"residual_blocks"}, None),
        ({"augmenting_block": "none"}, {"decoder", "residual_blocks"}, "AttentionDecoder"),
    ],
)
def test_every_ablation_of_the_paper_can_be_configured(fields, modules, decoder):
    heads = CloverHeads(tiny(variant="clover", **fields))
    assert {name.split(".")[0] for name, _ in heads.named_parameters()} == modules
    assert decoder is None or type(heads.decoder).__name__ == decoder


def test_clover_without_its_parts_has_the_shapes_of_medusa():
    left = CloverHeads(tiny(variant="clover", num_heads=5, **WITHOUT_PARTS))
    medusa = CloverHeads(tiny(variant="medusa"))
    shapes = [{name: tuple(p.shape) for name, p in heads.named_parameters()} for heads in (left, medusa)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ("full", {"self_attn", "input_layernorm", "mlp", "post_attention_layernorm"}),
        ("attention", {"self_attn", "input_layernorm"}),
        ("mlp", {"mlp", "post_attention_layernorm"}),
    ],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_the_augmenting_block_has_the_configured_depth_and_parts(block, parts, depth):
    heads = CloverHeads(tiny(variant="clover", augmenting_block=block, num_augmenting_layers=depth))
    assert len(heads.layers) == depth
    assert {name.split(".")[0] for name, _ in heads.layers[0].named_parameters()} == parts


# ---------------------------------------------------------------------- round trips

UNUSUAL = dict(
    variant="clover",
    num_heads=4,
    num_augmenting_layers=3,
    augmenting_block="attention",
    head_dim=6,
    hidden_act="gelu",
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    use_rope=False,
    max_position_embeddings=99,
    rms_norm_eps=1e-4,
    initializer_range=0.01,
    decoder="mlp",
    decoder_position="before",
    decoder_num_heads=2,
    decoder_bias=True,
    regressive=False,
    output_projector="fc",
    normalize_embeddings=False,
    hidden_loss_weight=2.0,
    token_loss_weight=0.5,
    loss_decay=0.9,
    draft_vocab_size=7,
    draft_tree="levels",
    draft_depth=2,
    draft_beam_width=3,
    draft_top_k=2,
    draft_top_p=0.5,
    draft_min_p=0.1,
    target_name_or_path="org/target",
    target_revision="abc",
    target_fingerprint="0f" * 16,
)


def same(a: CloverConfig, b: CloverConfig) -> bool:
    drop = ("transformers_version", "auto_map", "_name_or_path")
    a, b = ({k: v for k, v in config.to_dict().items() if k not in drop} for config in (a, b))
    return a == b


@pytest.mark.parametrize("fields", [*({"variant": v} for v in VARIANTS), UNUSUAL], ids=[*VARIANTS, "unusual"])
def test_a_config_is_unchanged_after_saving_and_loading(fields, tmp_path):
    config = tiny(**fields)
    assert all(getattr(config, field) == value for field, value in fields.items())
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "clover"
    for again in (
        CloverConfig(**json.loads(config.to_json_string(use_diff=False))),
        CloverConfig(**json.loads(config.to_json_string())),
        CloverConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        AutoConfig.for_model("clover", **TINY, **fields),
    ):
        assert type(again) is CloverConfig
        assert same(again, config)


# ---------------------------------------------------------------------- what cannot be

INTEGERS_FROM_1 = (
    *("hidden_size", "num_heads", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("decoder_num_heads", "decoder_width", "max_position_embeddings", "draft_top_k", "draft_beam_width"),
    *("head_dim", "draft_depth", "draft_vocab_size"),
)
SWITCHES = (
    *("regressive", "normalize_embeddings", "decoder_bias", "attention_bias", "attention_output_bias", "mlp_bias"),
    *("qk_norm", "use_rope", "normalize_hidden_states"),
)
NUMBERS = (
    *("rms_norm_eps", "initializer_range", "loss_decay", "hidden_loss_weight", "token_loss_weight"),
    *("draft_top_p", "draft_min_p", "embedding_scale"),
)
CHOICES = (
    *("variant", "augmenting_block", "decoder", "decoder_position", "decoder_activation", "output_projector"),
    *("draft_tree", "entry", "loss_type"),
)
IMPOSSIBLE = [
    *((field, value) for field in INTEGERS_FROM_1 for value in (0, -1, 2.0, "2", True, 1 << 40)),
    *(("vocab_size", value) for value in (1, 0, 3.5, None)),
    *(("num_augmenting_layers", value) for value in (-1, 65, 1.5, "2", False)),
    *((field, value) for field in SWITCHES for value in (1, "yes")),
    *((field, value) for field in NUMBERS for value in (-0.1, 1e9, float("nan"), "0.5", True)),
    *((field, value) for field in CHOICES for value in ("nonsense", 3, "")),
    *(("hidden_act", value) for value in ("nonsense", None, 3)),
    *((f"target_{field}", 3) for field in ("name_or_path", "revision", "fingerprint")),
    *(("target_fingerprint", value) for value in ("not hexadecimal", "")),
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_type": "nonsense", "rope_theta": 10000.0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": -1.0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "10000"}),
    ("head_dim", 5),
    ("draft_vocab_size", 25),
    ("num_key_value_heads", 3),
    ("decoder_num_heads", 3),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [1, 2.0]),
    ("pad_token_id", True),
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE, ids=[f"{f}={v!r}" for f, v in IMPOSSIBLE])
def test_impossible_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"`{field}=.*` is impossible: it must be"):
        tiny(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(hidden_size=18), "num_attention_heads=4.*divisor of hidden_size=18"),
        (dict(hidden_size=12), "num_attention_heads=4.*head_dim is even"),
        (dict(variant="clover", draft_depth=4), "draft_depth=4.*at most num_heads=3"),
        (dict(regressive=False, draft_depth=6), "draft_depth=6.*at most num_heads=5"),
        (dict(num_heads=1, draft_depth=2), "draft_depth=2.*at most num_heads=1"),
        (dict(variant="clover-2", recall=True), "recall=True.*must be False without a gated decoder"),
        (dict(variant="medusa", output_projector="none"), "output_projector='none'.*without a decoder"),
        (dict(variant="clover-x", decoder="none"), "output_projector='none'.*without a decoder"),
        (dict(decoder="none", output_projector="none"), "output_projector='none'.*without a decoder"),
        (dict(variant="clover-x", regressive=False), "output_projector='none'.*or the Regressive Connection"),
        (dict(variant="clover-x", hidden_size=1 << 17, decoder_width=1 << 20), "hidden_size=.*smaller"),
    ],
)
def test_values_that_cannot_be_together_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        dict(draft_depth=9),  # Clover-2's later heads are one network
        dict(variant="clover-x", num_heads=1, draft_depth=9),  # so are all of clover-x's
        dict(hidden_size=18, head_dim=4, decoder_num_heads=3),
        dict(hidden_size=12, use_rope=False),
        dict(variant="medusa", hidden_size=12),
        dict(variant="medusa", num_heads=64),
        dict(decoder="none", decoder_num_heads=3),
        dict(draft_vocab_size=24, loss_decay=1, draft_top_p=1.0, draft_min_p=0.0),
    ],
)
def test_unusual_but_possible_values_build(fields):
    CloverHeads(tiny(**fields))
