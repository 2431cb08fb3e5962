"""What the configurations of all draft heads have in common.

Contract: a `HeadsConfig` says everything that is needed to build a network of draft heads and nothing about how it is
run. Impossible values are refused by name, before anything is allocated: a config may come from a stranger. This file
is pushed to the Hub beside the network, so it imports only torch and transformers.
"""

import dataclasses
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .variants import (
    CHOICES,
    INTEGERS,
    LONGEST_NAME,
    MAY_BE_NONE,
    NUMBERS,
    SWITCHES,
)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEFT_OPEN: Any = None  # a field that a user may leave out and `__post_init__` fills in


class HeadsConfig(PreTrainedConfig):
    """`CloverConfig` describes each field."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_heads: int = LEFT_OPEN

    num_attention_heads: int = 32
    num_key_value_heads: int = LEFT_OPEN
    head_dim: int = LEFT_OPEN
    intermediate_size: int = 11008
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_parameters: dict = LEFT_OPEN
    use_rope: bool = True
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    loss_type: str = LEFT_OPEN
    hidden_loss_weight: float = LEFT_OPEN
    token_loss_weight: float = 1.0
    loss_decay: float = 0.7

    draft_vocab_size: int | None = None
    draft_tree: str = "global"
    draft_depth: int = LEFT_OPEN
    draft_beam_width: int = 10
    draft_top_k: int = 10
    draft_copies: int = 0
    draft_top_p: float = 0.8
    draft_min_p: float = 0.25

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._validate_what_transformers_reads(kwargs)
        self._fill_in()
        self._validate()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.draft_depth is None:
            self.draft_depth = self._default_depth
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        self._validate_rope_frequencies()

    def _fill_in(self) -> None:
        """Fill in the fields that the user left out, before anything is checked."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads

    @property
    def _default_depth(self) -> int:
        return self.num_heads

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; fields that are changed while loading are checked too."""
        methods = [name for name in config_dict if name.startswith("__") or callable(getattr(cls, name, None))]
        if methods:
            raise ValueError(f"{cls.__name__}: `{methods[0]}` is impossible: it is no field of a configuration.")
        try:
            loaded = super().from_dict(config_dict, **kwargs)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{cls.__name__}: a field has an impossible type: {error}.") from error
        (loaded[0] if isinstance(loaded, tuple) else loaded)._validate()
        return loaded

    def get_text_config(self, *args: Any, **kwargs: Any) -> "HeadsConfig":
        """Itself: transformers would take the field `decoder` for a nested config."""
        return self

    @property
    def token_table(self) -> str:
        """The target's table whose rows are the heads' token embeddings: "lm_head" or "input"."""
        return "input"

    @property
    def target_width(self) -> int:
        """The target's hidden size."""
        return self.hidden_size

    @property
    def starts_at_nothing(self) -> bool:
        """Whether new layers add nothing to what they read until they are trained."""
        return False

    @property
    def has_rope(self) -> bool:
        """Whether the network makes rotary embeddings."""
        return True

    @property
    def turns_pairs(self) -> bool:
        """Whether some layer uses rotary embeddings."""
        return self.has_rope

    def _require(self, field: str, condition: bool, wanted: str) -> None:
        if not condition:
            value = repr(getattr(self, field))[:LONGEST_NAME]
            raise ValueError(f"{type(self).__name__}: `{field}={value}` is impossible: it must be {wanted}.")

    def _require_choice(self, field: str) -> None:
        value, choices = getattr(self, field), CHOICES[field]
        self._require(field, isinstance(value, str | None) and value in choices, f"one of {list(choices)}")

    def _validate_name(self, field: str) -> None:
        value = getattr(self, field)
        is_name = isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME
        self._require(field, value is None or is_name, f"a string of at most {LONGEST_NAME} printable characters")

    def _validate(self) -> None:
        """Check each field alone, and the shapes of the layers together."""
        fields = {field.name for field in dataclasses.fields(self)}
        for field in CHOICES:
            if field in fields:
                self._require_choice(field)
        for kinds, table, wanted in ((int, INTEGERS, "an integer"), ((int, float), NUMBERS, "a number")):
            for field, (low, high) in table.items():
                if field not in fields:
                    continue
                value = getattr(self, field)
                is_one = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
                is_open = value is None and field in MAY_BE_NONE
                self._require(field, is_one or is_open, f"{wanted} from {low} to {high}")
        for field in SWITCHES:
            if field in fields:
                self._require(field, isinstance(getattr(self, field), bool), "True or False")
        for field in SPECIAL_TOKENS:
            value = getattr(self, field)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            self._require(field, all(type(one) is int for one in ids), "a token id, a list of them, or None")
        for field in ("target_name_or_path", "target_revision", "target_fingerprint"):
            self._validate_name(field)
        is_hex = set(self.target_fingerprint or "0") <= set("0123456789abcdef")
        self._require("target_fingerprint", is_hex and self.target_fingerprint != "", "a hexadecimal number")
        known = isinstance(self.hidden_act, str) and self.hidden_act in ACT2FN
        self._require("hidden_act", known, "an activation function that transformers names")
        self._validate_rope_parameters()
        divides = self.num_attention_heads % self.num_key_value_heads == 0
        self._require("num_key_value_heads", divides, f"a divisor of num_attention_heads={self.num_attention_heads}")
        if self.head_dim is None:
            divides = self.hidden_size % self.num_attention_heads == 0
            wanted = f"a divisor of hidden_size={self.hidden_size}, or come with a head_dim"
            self._require("num_attention_heads", divides, wanted)
        if self.turns_pairs:
            is_even = (self.head_dim or self.hidden_size // self.num_attention_heads) % 2 == 0
            field = "num_attention_heads" if self.head_dim is None else "head_dim"
            self._require(field, is_even, "such that head_dim is even: rotary embeddings turn pairs")
        if self.draft_vocab_size is not None:
            fits = self.draft_vocab_size <= self.vocab_size
            self._require("draft_vocab_size", fits, f"at most vocab_size={self.vocab_size}")

    def _validate_what_transformers_reads(self, kwargs: dict[str, Any]) -> None:
        """Refuse values that transformers itself reads from every config, and that would take memory, fetch a kernel
        from the Hub, or raise an error that names no field."""
        kwargs.pop("num_labels", None)  # for classifiers only: transformers makes a table of that many labels
        refused = {field: kwargs.get(field) for field in ("per_layer_config", "base_model_tp_plan")}
        for field in ("attn_implementation", "_attn_implementation"):
            value = kwargs.get(field)
            refused[field] = None if isinstance(value, str) and "/" not in value else value
        for field, value in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            dtype = getattr(torch, value, None) if isinstance(value, str) else value
            refused[field] = None if isinstance(dtype, torch.dtype) and dtype.is_floating_point else value
        for field, value in refused.items():
            if value is not None:
                raise ValueError(f"{type(self).__name__}: `{field}={value!r}` is impossible in heads: leave it out.")
        for field in ("transformers_version", "problem_type"):
            self._require(field, isinstance(getattr(self, field), str | None), "a text")
        for field in ("is_encoder_decoder", "return_dict", "output_hidden_states"):
            self._require(field, isinstance(getattr(self, field), bool | None), "True or False")
        self._require("chunk_size_feed_forward", type(self.chunk_size_feed_forward) is int, "an integer")
        names = [] if self.architectures is None else self.architectures
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        self._require("architectures", is_list, "a list of texts")
        for field, is_entry in (
            ("id2label", lambda number, label: str(number).isdecimal() and isinstance(label, str)),
            ("label2id", lambda label, number: isinstance(label, str) and type(number) is int),
        ):
            table = {} if getattr(self, field) is None else getattr(self, field)
            is_table = isinstance(table, dict) and all(is_entry(*entry) for entry in table.items())
            self._require(field, is_table, "a table of labels and their numbers")

    def _validate_rope_parameters(self) -> None:
        rope = self.rope_parameters
        is_table = rope is None or (isinstance(rope, dict) and all(isinstance(name, str) for name in rope))
        self._require("rope_parameters", is_table, "a dictionary of names")
        rope = rope or {}
        kinds = ["default", *ROPE_INIT_FUNCTIONS]
        self._require("rope_parameters", rope.get("rope_type", "default") in kinds, f"of a `rope_type` among {kinds}")
        theta = rope.get("rope_theta", 10000.0)
        is_possible = isinstance(theta, int | float) and 0 < theta <= 1e15
        self._require("rope_parameters", is_possible, "such that its `rope_theta` is a positive number, at most 1e15")

    def _validate_rope_frequencies(self) -> None:
        """Each `rope_type` has parameters of its own; transformers' function for it is run to check them."""
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_parameters["rope_type"])
        if compute is None or not self.has_rope:
            return
        try:
            with torch.device("cpu"):
                frequencies, _ = compute(self, device="cpu")
        except Exception as error:
            wanted = f"complete and of the right types for its `rope_type` ({type(error).__name__}: {error})"
            self._require("rope_parameters", False, wanted)
        fits = bool(frequencies.isfinite().all()) and len(frequencies) == self.head_dim // 2
        self._require("rope_parameters", fits or not self.turns_pairs, f"such that head_dim={self.head_dim} is turned")


__all__ = ["LEFT_OPEN", "SPECIAL_TOKENS", "HeadsConfig"]
