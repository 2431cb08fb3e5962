"""The configuration of Clover heads.

Contract: a `CloverConfig` says everything that is needed to build the network and nothing about how it is run.
`variant` names a preset, one of the papers' or `clover-x`; every part of a preset is a field of its own, so any row of
the ablations is a config. Impossible values are refused by name here, before anything is allocated: a config may come
from a stranger. This file travels to the Hub beside `modeling_clover.py`, so it knows torch and transformers alone.
"""

from typing import Any, ClassVar

import torch
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .variants import (
    CHOICES,
    INTEGERS,
    LONGEST_NAME,
    MAY_BE_NONE,
    MOST_PARAMETERS,
    NUMBERS,
    SWITCHES,
    VARIANTS,
)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEFT_OPEN: Any = None  # what a user may leave out and `__post_init__` fills in: from the variant, or from other fields
RECALL_DEPTH = 8  # levels of a draft, by default: a copy of earlier text goes on longer than heads were trained for


class CloverConfig(PreTrainedConfig):
    r"""
    What heads are built from. `variant` names a preset; every part of a preset is a field of its own, and a field
    that is left out takes the preset's value.

    Args:
        variant (`str`, *optional*, defaults to `"clover-2"`):
            `"clover-2"`, `"clover"` (the first paper), `"medusa"` (Clover with its parts taken away) or `"clover-x"`
            (this library's own, of the same family). A config that names none is Clover-2's; heads made with
            `CloverHeads.from_target` are clover-x unless told otherwise.
        vocab_size (`int`, *optional*, defaults to 32000):
            Of the target.
        hidden_size (`int`, *optional*, defaults to 4096):
            Of the target.
        num_heads (`int`, *optional*):
            Draft heads. Head i, counted from 0, guesses the token i + 2 places ahead.
        num_augmenting_layers (`int`, *optional*):
            Depth of the Augmenting Block.
        augmenting_block (`str`, *optional*):
            `"full"`, `"attention"` (no MLP), `"mlp"` (no attention) or `"none"`.
        num_attention_heads (`int`, *optional*, defaults to 32):
            Of the Augmenting Block's layers; `from_target` takes this and the other shapes of those from the target.
        num_key_value_heads (`int`, *optional*):
            Of the Augmenting Block's layers; as many as attention heads by default.
        head_dim (`int`, *optional*):
            Of the Augmenting Block's attention; `hidden_size / num_attention_heads` by default.
        intermediate_size (`int`, *optional*, defaults to 11008):
            Of the Augmenting Block's MLP.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the Augmenting Block's MLP, as transformers names it.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether queries, keys and values of the Augmenting Block have biases.
        attention_output_bias (`bool`, *optional*, defaults to `False`):
            Whether the output of its attention has one.
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether its MLP has biases.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether its queries and keys are normed.
        rope_parameters (`dict`, *optional*):
            Rotary embedding of the Augmenting Block; plain, with base 10000, by default.
        use_rope (`bool`, *optional*, defaults to `True`):
            Off, the Augmenting Block knows no positions, as some targets' layers.
        max_position_embeddings (`int`, *optional*, defaults to 2048):
            As in the target, for kinds of rotary embeddings that need it.
        rms_norm_eps (`float`, *optional*, defaults to 1e-5):
            Of every norm, and of the cosine gate.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Spread of fresh weights that nothing else starts.
        decoder (`str`, *optional*):
            What brings a token into the state: `"attention"` (the Attention Decoder), `"mlp"` in its place, `"gated"`
            (a gated layer of state and token, clover-x's) or `"none"`.
        decoder_position (`str`, *optional*):
            `"before"`: a first decoder stands before the Augmenting Block, so that the block sees the target's token
            already (Clover-2). `"after"`: every head decodes, none before (Clover). `"both"`: one before, and every
            head decodes too, head 0 among them (clover-x).
        decoder_num_heads (`int`, *optional*):
            Heads of the Attention Decoder's gate; the target's by default.
        decoder_bias (`bool`, *optional*):
            Whether the decoder has biases.
        decoder_activation (`str`, *optional*):
            What follows the Attention Decoder's gated value: `"silu"`, or nothing.
        decoder_width (`int`, *optional*):
            Of a gated decoder; the hidden size by default.
        entry (`str`, *optional*):
            What stands before the block where something does: a `"decoder"` like the others, or `"fc"`, a linear layer
            of state and token.
        recall (`bool`, *optional*):
            At each token of a draft a gated decoder is also told what followed in the text the last time that the
            longest run of this token and up to three before it came, by what the last layer's attention keeps of it:
            drafts find earlier text again without attention. On by default for clover-x, wherever it can be.
        regressive (`bool`, *optional*, defaults to `True`):
            The Regressive Connection. Off, no head sees a drafted token: each starts from the Augmenting Block's
            output and the target's own token.
        output_projector (`str`, *optional*):
            `"fc"` (Clover-2, shared by the later heads), `"residual"` (Medusa's block, one per head) or `"none"`: the
            state goes through the last norm into lm_head (clover-x).
        token_embedding (`str`, *optional*):
            What a token is to the heads: its row in the target's `"lm_head"` (the papers), or in its `"input"`
            embedding (clover-x); the other one where that cannot be read.
        normalize_embeddings (`bool`, *optional*):
            Rows of the embedding table scaled to length 1.
        embedding_scale (`float`, *optional*, defaults to 1.0):
            Factor of the embeddings; `from_target` measures it for clover-x.
        normalize_hidden_states (`bool`, *optional*):
            Take the target's states after its final norm. All that heads add to such a state starts at zero, and no
            norm closes before that in front of lm_head.
        hidden_state_scale (`float`, *optional*, defaults to 1.0):
            Factor of such states; `from_target` measures it for clover-x.
        loss_type (`str`, *optional*):
            The loss that the trainer takes: `"kl"`, `"clover-2"`, `"clover"` or `"acceptance"`.
        hidden_loss_weight (`float`, *optional*):
            Weight of the loss's term of hidden states.
        token_loss_weight (`float`, *optional*, defaults to 1.0):
            Weight of its term of tokens.
        loss_decay (`float`, *optional*, defaults to 0.7):
            Head i counts `loss_decay ** i` in the loss.
        draft_vocab_size (`int`, *optional*):
            How many ids the heads score, all by default; the ids are a buffer of the heads.
        draft_tree (`str`, *optional*, defaults to `"global"`):
            How a tree is grown: `"global"` (best nodes of a beam), `"levels"` (Clover's rule) or `"chain"`. The number
            of nodes is `heads.generation_config.num_assistant_tokens`.
        draft_depth (`int`, *optional*):
            Levels of a tree. Defaults to `num_heads`, and to 8 where heads that share their weights recall.
        draft_beam_width (`int`, *optional*, defaults to 10):
            Nodes of a level that the next one grows from, in a `"global"` tree.
        draft_top_k (`int`, *optional*, defaults to 10):
            Tokens that are looked at below a node, in a `"global"` tree.
        draft_copies (`int`, *optional*, defaults to 0):
            Where the last two tokens stood in the text before, so many of those that followed them are drafted beside
            what the heads draft; 0 for none, and none beside a `"chain"`. `from_target` sets 15 for heads with recall.
        draft_top_p (`float`, *optional*, defaults to 0.8):
            Share of the probability that a level keeps, in a tree of `"levels"`.
        draft_min_p (`float`, *optional*, defaults to 0.25):
            Of the level's best probability, what a token needs to be kept there.
        bos_token_id (`int`, *optional*):
            Of the target, by which transformers' pipelines tell that the two share a tokenizer. Heads do not read it.
        eos_token_id (`int` or `list[int]`, *optional*):
            Likewise.
        pad_token_id (`int`, *optional*):
            Likewise.
        target_name_or_path (`str`, *optional*):
            The target that these heads were made for.
        target_revision (`str`, *optional*):
            Its commit on the Hub.
        target_fingerprint (`str`, *optional*):
            Of its lm_head, by which another target is refused.

    Example:

    ```python
    >>> from hf_clover import CloverConfig

    >>> config = CloverConfig(variant="clover-x", hidden_size=512, num_attention_heads=8)
    >>> config.num_heads, config.decoder, config.draft_depth
    (5, 'gated', 8)
    >>> CloverConfig(variant="clover", num_heads=0)
    Traceback (most recent call last):
    ValueError: CloverConfig: `num_heads=0` is impossible: it must be an integer from 1 to 64.
    ```
    """

    model_type: ClassVar[str] = "clover"

    variant: str = "clover-2"
    vocab_size: int = 32000
    hidden_size: int = 4096
    num_heads: int = LEFT_OPEN

    num_augmenting_layers: int = LEFT_OPEN
    augmenting_block: str = LEFT_OPEN
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

    decoder: str = LEFT_OPEN
    decoder_position: str = LEFT_OPEN
    decoder_num_heads: int = LEFT_OPEN
    decoder_bias: bool = LEFT_OPEN
    decoder_activation: str | None = None
    decoder_width: int = LEFT_OPEN
    entry: str = LEFT_OPEN
    recall: bool = LEFT_OPEN
    regressive: bool = True
    output_projector: str = LEFT_OPEN
    token_embedding: str = LEFT_OPEN
    normalize_embeddings: bool = LEFT_OPEN
    embedding_scale: float = 1.0
    normalize_hidden_states: bool = LEFT_OPEN
    hidden_state_scale: float = 1.0

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
        self._require_choice("variant")
        leaves_open = self.recall is None
        for field, value in VARIANTS[self.variant].items():
            if getattr(self, field) is None:
                setattr(self, field, value)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.decoder_num_heads is None:
            self.decoder_num_heads = self.num_attention_heads
        if self.decoder_width is None and isinstance(self.hidden_size, int):
            self.decoder_width = self.hidden_size
        if leaves_open and self.recall:
            self.recall = self._can_recall
        self._validate_clover()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.draft_depth is None:
            goes_on = self.recall and self.can_draft_beyond_heads
            self.draft_depth = max(self.num_heads, RECALL_DEPTH) if goes_on else self.num_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
        super().__post_init__(**kwargs)
        self._validate_rope_frequencies()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`; fields changed in loading are checked too, which transformers sets without
        a word."""
        methods = [name for name in config_dict if name.startswith("__") or callable(getattr(cls, name, None))]
        if methods:
            raise ValueError(f"CloverConfig: `{methods[0]}` is impossible: it is no field of a configuration.")
        try:
            loaded = super().from_dict(config_dict, **kwargs)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"CloverConfig: a field has an impossible type: {error}.") from error
        (loaded[0] if isinstance(loaded, tuple) else loaded)._validate_clover()
        return loaded

    def get_text_config(self, *args: Any, **kwargs: Any) -> "CloverConfig":
        """Itself: transformers would take the field `decoder` for a nested config."""
        return self

    @property
    def has_augmenting_block(self) -> bool:
        return self.augmenting_block != "none" and self.num_augmenting_layers > 0

    @property
    def num_cache_layers(self) -> int:
        """Of a cache for these heads: one for each layer of the block, and one for the tokens where they recall."""
        return self.num_augmenting_layers + self.recall

    @property
    def has_entry_decoder(self) -> bool:
        """Whether a decoder stands before the Augmenting Block (Clover-2's information extraction order)."""
        return self.decoder != "none" and self.decoder_position in ("before", "both")

    @property
    def can_draft_beyond_heads(self) -> bool:
        """Whether later heads are one network, so that a tree may be grown deeper than the heads trained."""
        return self.regressive and self.output_projector != "residual" and self.num_later_heads > 0

    @property
    def _can_recall(self) -> bool:
        """Whether attention keeps something, and a cell sees drafted tokens; judged before anything was checked."""
        keeps = self.augmenting_block in ("full", "attention") and self.num_augmenting_layers != 0
        has_cell = self.decoder == "gated" and (self.decoder_position, self.num_heads) != ("before", 1)
        return keeps and has_cell and self.regressive is not False

    @property
    def num_later_heads(self) -> int:
        """The heads that decode a token: all, or all but head 0 where the first decoder stands before the block."""
        return self.num_heads - (self.decoder_position == "before")

    def _require(self, field: str, condition: bool, wanted: str) -> None:
        if not condition:
            value = repr(getattr(self, field))[:LONGEST_NAME]
            raise ValueError(f"CloverConfig: `{field}={value}` is impossible: it must be {wanted}.")

    def _require_choice(self, field: str) -> None:
        value, choices = getattr(self, field), CHOICES[field]
        self._require(field, isinstance(value, str | None) and value in choices, f"one of {list(choices)}")

    def _validate_clover(self) -> None:
        for field in CHOICES:
            self._require_choice(field)
        for kinds, table, wanted in ((int, INTEGERS, "an integer"), ((int, float), NUMBERS, "a number")):
            for field, (low, high) in table.items():
                value = getattr(self, field)
                is_one = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
                is_open = value is None and field in MAY_BE_NONE
                self._require(field, is_one or is_open, f"{wanted} from {low} to {high}")
        for field in SWITCHES:
            self._require(field, isinstance(getattr(self, field), bool), "True or False")
        for field in SPECIAL_TOKENS:
            value = getattr(self, field)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            self._require(field, all(type(one) is int for one in ids), "a token id, a list of them, or None")
        for field in ("target_name_or_path", "target_revision", "target_fingerprint"):
            value = getattr(self, field)
            is_name = isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME
            self._require(field, value is None or is_name, f"a string of at most {LONGEST_NAME} printable characters")
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
        if self.has_augmenting_block and self.augmenting_block != "mlp" and self.use_rope:
            is_even = (self.head_dim or self.hidden_size // self.num_attention_heads) % 2 == 0
            field = "num_attention_heads" if self.head_dim is None else "head_dim"
            self._require(field, is_even, "such that head_dim is even: rotary embeddings turn pairs")
        if self.decoder == "none" or not self.regressive:
            wanted = "'fc' or 'residual' without a decoder or the Regressive Connection: all heads would say the same"
            self._require("output_projector", self.output_projector != "none", wanted)
        wanted = "False without a gated decoder, the Regressive Connection, or attention in the Augmenting Block"
        self._require("recall", not self.recall or self._can_recall, wanted)
        if self.decoder == "attention":
            divides = self.hidden_size % self.decoder_num_heads == 0
            self._require("decoder_num_heads", divides, f"a divisor of hidden_size={self.hidden_size}")
        if self.draft_vocab_size is not None:
            fits = self.draft_vocab_size <= self.vocab_size
            self._require("draft_vocab_size", fits, f"at most vocab_size={self.vocab_size}")
        if self.draft_depth is not None and not self.can_draft_beyond_heads:
            wanted = f"at most num_heads={self.num_heads}, since these heads do not share their weights"
            self._require("draft_depth", self.draft_depth <= self.num_heads, wanted)
        self._validate_size()

    def _validate_size(self) -> None:
        """All parts together; each is counted at its largest."""
        d, head_dim = self.hidden_size, self.head_dim or self.hidden_size // self.num_attention_heads
        projections = 2 * (self.num_attention_heads + self.num_key_value_heads) * head_dim
        block = self.num_augmenting_layers * d * (projections + 3 * self.intermediate_size)
        read = 2 * self.num_key_value_heads * head_dim if self.recall else 0
        cell = (5 * d + read) * self.decoder_width if self.decoder == "gated" else 0
        parameters = block + (8 + 2 * self.num_heads) * d * d + 2 * cell
        wanted = f"smaller: with the other sizes it makes heads of about {parameters:.1e} parameters"
        self._require("hidden_size", parameters <= MOST_PARAMETERS, wanted)

    def _validate_what_transformers_reads(self, kwargs: dict[str, Any]) -> None:
        """Fields of every config that would cost memory, fetch a kernel from the Hub, or fail without a name."""
        kwargs.pop("num_labels", None)  # of classifiers: transformers makes a table of so many labels
        refused = {field: kwargs.get(field) for field in ("per_layer_config", "base_model_tp_plan")}
        for field in ("attn_implementation", "_attn_implementation"):
            value = kwargs.get(field)
            refused[field] = None if isinstance(value, str) and "/" not in value else value
        for field, value in (("dtype", self.dtype), ("torch_dtype", kwargs.get("torch_dtype"))):
            dtype = getattr(torch, value, None) if isinstance(value, str) else value
            refused[field] = None if isinstance(dtype, torch.dtype) and dtype.is_floating_point else value
        for field, value in refused.items():
            if value is not None:
                raise ValueError(f"CloverConfig: `{field}={value!r}` is impossible in heads: leave it out.")
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
        """Each `rope_type` has numbers of its own: transformers' function for it says whether they will do."""
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_parameters["rope_type"])
        if compute is None or not self.has_augmenting_block:
            return
        try:
            with torch.device("cpu"):
                frequencies, _ = compute(self, device="cpu")
        except Exception as error:
            wanted = f"complete and of the right types for its `rope_type` ({type(error).__name__}: {error})"
            self._require("rope_parameters", False, wanted)
        fits = bool(frequencies.isfinite().all()) and len(frequencies) == self.head_dim // 2
        self._require("rope_parameters", fits or not self.use_rope, f"such that head_dim={self.head_dim} is turned")


CloverConfig.register_for_auto_class()

__all__ = ["VARIANTS", "CloverConfig"]
