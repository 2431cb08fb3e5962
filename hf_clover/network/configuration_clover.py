"""The configuration of Clover heads.

Contract: a `CloverConfig` says everything that is needed to build the network and nothing about how it is run.
`variant` names a preset, one of the papers' or `clover-x`; every part of a preset is a field of its own, so any row of
the ablations is a config. Impossible values are refused by name here, before anything is allocated: a config may come
from a stranger. This file travels to the Hub beside `modeling_clover.py`, so it knows torch and transformers alone.
"""

from typing import ClassVar

from .configuration_heads import LEFT_OPEN, HeadsConfig
from .variants import MOST_PARAMETERS, VARIANTS

RECALL_DEPTH = 8  # levels of a draft, by default: a copy of earlier text goes on longer than heads were trained for


class CloverConfig(HeadsConfig):
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
    num_augmenting_layers: int = LEFT_OPEN
    augmenting_block: str = LEFT_OPEN

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

    def _fill_in(self) -> None:
        self._require_choice("variant")
        leaves_open = self.recall is None
        for field, value in VARIANTS[self.variant].items():
            if getattr(self, field) is None:
                setattr(self, field, value)
        super()._fill_in()
        if self.decoder_num_heads is None:
            self.decoder_num_heads = self.num_attention_heads
        if self.decoder_width is None and isinstance(self.hidden_size, int):
            self.decoder_width = self.hidden_size
        if leaves_open and self.recall:
            self.recall = self._can_recall

    @property
    def _default_depth(self) -> int:
        goes_on = self.recall and self.can_draft_beyond_heads
        return max(self.num_heads, RECALL_DEPTH) if goes_on else self.num_heads

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
        layers, heads = self.num_augmenting_layers, self.num_heads
        keeps = self.augmenting_block in ("full", "attention") and type(layers) is int and layers != 0
        is_alone = self.decoder_position == "before" and type(heads) is int and heads == 1
        has_cell = self.decoder == "gated" and not is_alone
        return keeps and has_cell and self.regressive is not False

    @property
    def num_later_heads(self) -> int:
        """The heads that decode a token: all, or all but head 0 where the first decoder stands before the block."""
        return self.num_heads - (self.decoder_position == "before")

    @property
    def token_table(self) -> str:
        return self.token_embedding

    @property
    def starts_at_nothing(self) -> bool:
        return self.normalize_hidden_states

    @property
    def has_rope(self) -> bool:
        return self.has_augmenting_block

    @property
    def turns_pairs(self) -> bool:
        return self.has_augmenting_block and self.augmenting_block != "mlp" and self.use_rope

    def _validate(self) -> None:
        super()._validate()
        if self.decoder == "none" or not self.regressive:
            wanted = "'fc' or 'residual' without a decoder or the Regressive Connection: all heads would say the same"
            self._require("output_projector", self.output_projector != "none", wanted)
        wanted = "False without a gated decoder, the Regressive Connection, or attention in the Augmenting Block"
        self._require("recall", not self.recall or self._can_recall, wanted)
        if self.decoder == "attention":
            divides = self.hidden_size % self.decoder_num_heads == 0
            self._require("decoder_num_heads", divides, f"a divisor of hidden_size={self.hidden_size}")
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


CloverConfig.register_for_auto_class()

__all__ = ["VARIANTS", "CloverConfig"]
