"""The configuration of EAGLE-3 heads, one for all the formats in which they are published.

Contract: as `configuration_heads`. What the formats leave to be known from elsewhere (layers of the target, which
norms there are, what is lent by the target) is a field here.
"""

from typing import Any, ClassVar

from .configuration_heads import LEFT_OPEN, HeadsConfig
from .variants import MOST_PARAMETERS

UNROLLED = 7  # steps of training, as the authors take them
DEPTH = 8  # levels of a draft: the last layer's own output may be fed back once more than in training


class Eagle3Config(HeadsConfig):
    r"""
    What EAGLE-3 heads are built from.

    Args:
        layer_ids (`list[int]`, *optional*, defaults to `[2, 16, 29]`):
            The target's layers whose states are read, counted as transformers' `hidden_states` are: 0 is the
            embeddings, k what the k-th layer gives.
        vocab_size (`int`, *optional*, defaults to 32000):
            Of the target.
        hidden_size (`int`, *optional*, defaults to 4096):
            Of the heads.
        target_hidden_size (`int`, *optional*):
            Of the target; as wide as the heads by default.
        num_heads (`int`, *optional*, defaults to 7):
            Steps that training unrolls, and that `forward` gives.
        num_hidden_layers (`int`, *optional*, defaults to 1):
            Layers; the first reads token and feature side by side.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            The first layer adds its attention to the normed feature, and not to the feature.
        norm_before_fc (`bool`, *optional*, defaults to `False`):
            A norm over all the target's states comes before they are fused.
        fc_norm (`bool`, *optional*, defaults to `False`):
            A norm over the states of each layer comes before they are fused.
        norm_output (`bool`, *optional*, defaults to `False`):
            Drafts go on from the state behind the last norm, and not before it.
        own_lm_head (`bool`, *optional*, defaults to `False`):
            The heads have an lm_head of their own and do not borrow the target's.
        own_embedding (`bool`, *optional*, defaults to `False`):
            Likewise for the embedding of tokens.
        num_attention_heads (`int`, *optional*, defaults to 32):
            Of the layers.
        num_key_value_heads (`int`, *optional*):
            Of the layers; as many as attention heads by default.
        head_dim (`int`, *optional*):
            Of attention; `hidden_size / num_attention_heads` by default.
        intermediate_size (`int`, *optional*, defaults to 11008):
            Of the MLP.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the MLP, as transformers names it.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether queries, keys and values of the layers have biases.
        attention_output_bias (`bool`, *optional*, defaults to `False`):
            Whether the output of attention has one.
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether the MLP has biases.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether queries and keys are normed.
        rope_parameters (`dict`, *optional*):
            Rotary embedding of the layers; plain, with base 10000, by default.
        use_rope (`bool`, *optional*, defaults to `True`):
            Off, the layers know no positions, as some targets' layers.
        max_position_embeddings (`int`, *optional*, defaults to 2048):
            As in the target, for kinds of rotary embeddings that need it.
        rms_norm_eps (`float`, *optional*, defaults to 1e-5):
            Of every norm.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Spread of fresh weights that nothing else starts.
        loss_type (`str`, *optional*, defaults to `"clover"`):
            The loss that the trainer takes: `"kl"`, `"clover-2"`, `"clover"` or `"acceptance"`.
        hidden_loss_weight (`float`, *optional*):
            Weight of the loss's term of hidden states.
        token_loss_weight (`float`, *optional*, defaults to 1.0):
            Weight of its term of tokens.
        loss_decay (`float`, *optional*, defaults to 0.8):
            Step i counts `loss_decay ** i` in the loss.
        draft_vocab_size (`int`, *optional*):
            How many ids the heads score, all by default; the ids are a buffer of the heads.
        draft_tree (`str`, *optional*, defaults to `"global"`):
            How a tree is grown: `"global"` (best nodes of a beam), `"levels"` (Clover's rule) or `"chain"`. The number
            of nodes is `heads.generation_config.num_assistant_tokens`.
        draft_depth (`int`, *optional*, defaults to 8):
            Levels of a tree, at least `num_heads` by default.
        draft_beam_width (`int`, *optional*, defaults to 10):
            Nodes of a level that the next one grows from, in a `"global"` tree.
        draft_top_k (`int`, *optional*, defaults to 10):
            Tokens that are looked at below a node, in a `"global"` tree.
        draft_copies (`int`, *optional*, defaults to 0):
            Where the last two tokens stood in the text before, so many of those that followed them are drafted beside
            what the heads draft; 0 for none, and none beside a `"chain"`.
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
        source_name_or_path (`str`, *optional*):
            Where others published these heads.
        target_name_or_path (`str`, *optional*):
            The target that these heads were made for.
        target_revision (`str`, *optional*):
            Its commit on the Hub.
        target_fingerprint (`str`, *optional*):
            Of its lm_head, by which another target is refused.

    Example:

    ```python
    >>> from hf_clover import Eagle3Config

    >>> config = Eagle3Config(hidden_size=512, num_attention_heads=8, layer_ids=[2, 14, 25])
    >>> config.head_dim, config.draft_depth
    (64, 8)
    ```
    """

    model_type: ClassVar[str] = "clover_eagle3"
    variant: ClassVar[str] = "eagle-3"  # in tables and logs
    # What Clover's heads may have otherwise.
    recall: ClassVar[bool] = False
    regressive: ClassVar[bool] = True
    has_augmenting_block: ClassVar[bool] = True

    layer_ids: list = LEFT_OPEN
    target_hidden_size: int = LEFT_OPEN
    num_hidden_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_lm_head: bool = False
    own_embedding: bool = False
    source_name_or_path: str | None = None

    num_heads: int = UNROLLED
    loss_type: str = "clover"
    hidden_loss_weight: float = 0.0
    loss_decay: float = 0.8

    @property
    def num_cache_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def target_width(self) -> int:
        return self.target_hidden_size

    @property
    def _default_depth(self) -> int:
        return max(DEPTH, self.num_heads)

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.layer_ids is None:
            self.layer_ids = [2, 16, 29]

    def _validate(self) -> None:
        super()._validate()
        ids = self.layer_ids
        are_ids = isinstance(ids, list | tuple) and all(type(one) is int and 0 <= one < 1 << 12 for one in ids)
        self._require("layer_ids", are_ids and 0 < len(ids) <= 64, "a list of the target's layers")
        self.layer_ids = list(ids)
        self._validate_name("source_name_or_path")
        d, wide = self.hidden_size, self.target_hidden_size
        projections = 2 * (self.num_attention_heads + self.num_key_value_heads) * (self.head_dim or d)
        layers = self.num_hidden_layers * d * (2 * projections + 3 * self.intermediate_size)
        own = (self.own_lm_head + self.own_embedding) * self.vocab_size * d
        parameters = layers + len(ids) * wide * d + own
        wanted = f"smaller: with the other sizes it makes heads of about {parameters:.1e} parameters"
        self._require("hidden_size", parameters <= MOST_PARAMETERS, wanted)

    def to_dict(self) -> dict[str, Any]:
        """All fields that say what the network is, also where they are the default."""
        return {**super().to_dict(), "layer_ids": list(self.layer_ids)}


Eagle3Config.register_for_auto_class()

__all__ = ["Eagle3Config"]
