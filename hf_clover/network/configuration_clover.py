"""The configuration of Clover heads.

Contract: a `CloverConfig` says everything that is needed to build the network and nothing about how it is run.
`variant` names a preset, one of the papers' or `clover-x`. Every part of a preset is a field of its own, so any row of
the ablations is a config. Impossible values are refused by name here, before anything is allocated: a config may come
from a stranger. This file is pushed to the Hub beside `modeling_clover.py`, so it imports only torch and transformers.
"""

from typing import ClassVar

from .configuration_heads import LEFT_OPEN, HeadsConfig
from .variants import MOST_PARAMETERS, VARIANTS

RECALL_DEPTH = 8  # default levels of a draft with recall: copied text is longer than the heads were trained for


class CloverConfig(HeadsConfig):
    r"""
    The configuration of Clover heads. `variant` names a preset. Every part of a preset is a field of its own, and a
    field that is left out takes the preset's value.

    Args:
        variant (`str`, *optional*, defaults to `"clover-2"`):
            `"clover-2"`, `"clover"` (the first paper), `"medusa"` (Clover with its parts taken away) or `"clover-x"`
            (this library's own, of the same family). A config that names none is Clover-2's; heads made with
            `CloverHeads.from_target` are clover-x unless told otherwise.
        vocab_size (`int`, *optional*, defaults to 32000):
            Size of the target's vocabulary.
        hidden_size (`int`, *optional*, defaults to 4096):
            Hidden size of the target.
        num_heads (`int`, *optional*):
            Number of draft heads. Head i, counted from 0, guesses the token i + 2 places ahead.
        num_augmenting_layers (`int`, *optional*):
            Number of layers in the Augmenting Block.
        augmenting_block (`str`, *optional*):
            `"full"`, `"attention"` (no MLP), `"mlp"` (no attention) or `"none"`.
        num_attention_heads (`int`, *optional*, defaults to 32):
            Attention heads of each layer in the Augmenting Block. `from_target` copies this and the block's other
            shapes from the target.
        num_key_value_heads (`int`, *optional*):
            Key and value heads of each layer in the Augmenting Block; as many as attention heads by default.
        head_dim (`int`, *optional*):
            Size of an attention head in the Augmenting Block; `hidden_size / num_attention_heads` by default.
        intermediate_size (`int`, *optional*, defaults to 11008):
            Width of the Augmenting Block's MLP.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the Augmenting Block's MLP, as transformers names it.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether queries, keys and values of the Augmenting Block have biases.
        attention_output_bias (`bool`, *optional*, defaults to `False`):
            Whether the output projection of the block's attention has a bias.
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether the block's MLP has biases.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether the block's queries and keys are normalised.
        rope_parameters (`dict`, *optional*):
            Rotary embedding of the Augmenting Block; plain, with base 10000, by default.
        use_rope (`bool`, *optional*, defaults to `True`):
            Whether the Augmenting Block has rotary positions. Some targets' layers have none.
        max_position_embeddings (`int`, *optional*, defaults to 2048):
            As in the target, for kinds of rotary embeddings that need it.
        rms_norm_eps (`float`, *optional*, defaults to 1e-5):
            Epsilon of every norm, and of the cosine gate.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of new weights for which no other start is set.
        decoder (`str`, *optional*):
            The layer that mixes a token into the state: `"attention"` (the Attention Decoder), `"mlp"` in its place,
            `"gated"` (clover-x's gated layer of state and token) or `"none"`.
        decoder_position (`str`, *optional*):
            Where decoders are. `"before"` (Clover-2): one before the Augmenting Block, so that the block already sees
            the target's token, and one in every head except head 0. `"after"` (Clover): one in every head, none before
            the block. `"both"` (clover-x): one before the block and one in every head.
        decoder_num_heads (`int`, *optional*):
            Heads of the Attention Decoder's gate; `num_attention_heads` by default.
        decoder_bias (`bool`, *optional*):
            Whether the decoder has biases.
        decoder_activation (`str`, *optional*):
            Activation after the Attention Decoder's gated value: `"silu"`, or `None` for no activation.
        decoder_width (`int`, *optional*):
            Width of a gated decoder; the hidden size by default.
        entry (`str`, *optional*):
            The layer before the Augmenting Block, if `decoder_position` asks for one: a `"decoder"` like the others,
            or `"fc"`, a linear layer of state and token.
        recall (`bool`, *optional*):
            Whether a gated decoder also reads what followed the same tokens earlier in the text. A drafted token, with
            up to three tokens before it, is searched in the text. Of the places with the longest match the last one is
            taken, and the decoder reads the last layer's attention values there. So drafts find earlier text again
            without attention. On by default for clover-x if the other fields allow it.
        regressive (`bool`, *optional*, defaults to `True`):
            The Regressive Connection. Without it no head sees a drafted token: each starts from the Augmenting Block's
            output and the target's own token.
        output_projector (`str`, *optional*):
            The layer between a head's state and lm_head: `"fc"` (Clover-2, shared by the later heads), `"residual"`
            (Medusa's block, one per head) or `"none"`: only the last norm (clover-x).
        token_embedding (`str`, *optional*):
            Where heads read the embedding of a token: its row in the target's `"lm_head"` (the papers) or in its
            `"input"` embedding (clover-x). If that table cannot be read, they take the other one.
        normalize_embeddings (`bool`, *optional*):
            Whether rows of the embedding table are scaled to length 1.
        embedding_scale (`float`, *optional*, defaults to 1.0):
            Factor of the embeddings; `from_target` measures it for clover-x.
        normalize_hidden_states (`bool`, *optional*):
            Whether heads read the target's states after its final norm. Everything that heads add to such a state
            starts at zero, and only the heads' last norm precedes lm_head.
        hidden_state_scale (`float`, *optional*, defaults to 1.0):
            Factor of states read after the final norm; `from_target` measures it for clover-x.
        loss_type (`str`, *optional*):
            The loss that the trainer uses: `"kl"`, `"clover-2"`, `"clover"` or `"acceptance"`.
        hidden_loss_weight (`float`, *optional*):
            Weight of the loss term for hidden states.
        token_loss_weight (`float`, *optional*, defaults to 1.0):
            Weight of the loss term for tokens.
        loss_decay (`float`, *optional*, defaults to 0.7):
            Head i has the weight `loss_decay ** i` in the loss.
        draft_vocab_size (`int`, *optional*):
            Number of token ids that the heads score; all by default. The ids are a buffer of the heads.
        draft_tree (`str`, *optional*, defaults to `"global"`):
            How a tree is grown: `"global"` (best nodes of a beam), `"levels"` (Clover's rule) or `"chain"`. The number
            of nodes is `heads.generation_config.num_assistant_tokens`.
        draft_depth (`int`, *optional*):
            Levels of a tree. Defaults to `num_heads`; to 8 for heads that share their weights and recall.
        draft_beam_width (`int`, *optional*, defaults to 10):
            Nodes per level from which the next level grows, in a `"global"` tree.
        draft_top_k (`int`, *optional*, defaults to 10):
            Tokens that are tried below each node, in a `"global"` tree.
        draft_copies (`int`, *optional*, defaults to 0):
            Most tokens that are copied from earlier in the text, from after the same last two tokens, and drafted
            beside the heads' own draft. 0 copies none, and a `"chain"` gets none. `from_target` sets 15 for heads with
            recall.
        draft_top_p (`float`, *optional*, defaults to 0.8):
            Share of the probability that a level keeps, in a tree of `"levels"`.
        draft_min_p (`float`, *optional*, defaults to 0.25):
            Least probability of a kept token, as a share of the level's best one, in a tree of `"levels"`.
        bos_token_id (`int`, *optional*):
            As in the target. transformers' pipelines compare it to see that target and heads share a tokenizer; heads
            do not read it.
        eos_token_id (`int` or `list[int]`, *optional*):
            As `bos_token_id`.
        pad_token_id (`int`, *optional*):
            As `bos_token_id`.
        target_name_or_path (`str`, *optional*):
            The target that these heads were made for.
        target_revision (`str`, *optional*):
            The target's commit on the Hub.
        target_fingerprint (`str`, *optional*):
            A short hash of the target's lm_head. Heads refuse a target with another one.

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
        """Layers of a cache for these heads."""
        return self.num_augmenting_layers

    @property
    def has_entry_decoder(self) -> bool:
        """Whether a decoder precedes the Augmenting Block (Clover-2's information extraction order)."""
        return self.decoder != "none" and self.decoder_position in ("before", "both")

    @property
    def can_draft_beyond_heads(self) -> bool:
        """Whether the later heads share their weights, so that a tree may have more levels than there are heads."""
        return self.regressive and self.output_projector != "residual" and self.num_later_heads > 0

    @property
    def _can_recall(self) -> bool:
        """Whether attention keeps values and a gated decoder sees drafted tokens. Fields are not yet checked here."""
        layers, heads = self.num_augmenting_layers, self.num_heads
        keeps = self.augmenting_block in ("full", "attention") and type(layers) is int and layers != 0
        is_alone = self.decoder_position == "before" and type(heads) is int and heads == 1
        has_cell = self.decoder == "gated" and not is_alone
        return keeps and has_cell and self.regressive is not False

    @property
    def num_later_heads(self) -> int:
        """How many heads decode a token: all, or all but head 0 if the only other decoder is before the block."""
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
        """Refuse sizes that are possible one by one, but not together; each part is counted at its largest."""
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
