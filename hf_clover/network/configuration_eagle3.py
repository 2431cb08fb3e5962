"""The configuration of EAGLE-3 heads, one for all the formats in which they are published.

Contract: as `configuration_heads`. Some formats leave out which layers of the target are read, which norms there are
and which parts the target lends; here each of these is a field.
"""

from typing import Any, ClassVar

from .configuration_heads import LEFT_OPEN, HeadsConfig
from .variants import MOST_PARAMETERS

UNROLLED = 7  # steps that training unrolls, as in the authors' code
DEPTH = 8  # levels of a draft: one more than the steps of training


class Eagle3Config(HeadsConfig):
    r"""
    The configuration of EAGLE-3 heads.

    Args:
        layer_ids (`list[int]`, *optional*, defaults to `[2, 16, 29]`):
            The target's layers whose states are read, numbered as in transformers' `hidden_states`: 0 is the
            embeddings, k the output of the k-th layer.
        vocab_size (`int`, *optional*, defaults to 32000):
            Size of the target's vocabulary.
        hidden_size (`int`, *optional*, defaults to 4096):
            Hidden size of the heads.
        target_hidden_size (`int`, *optional*):
            Hidden size of the target; `hidden_size` by default.
        num_heads (`int`, *optional*, defaults to 7):
            Number of steps that training unrolls and `forward` returns.
        num_hidden_layers (`int`, *optional*, defaults to 1):
            Number of layers; the first reads token and feature side by side.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            Whether the first layer adds its attention to the normalised feature instead of the feature.
        norm_before_fc (`bool`, *optional*, defaults to `False`):
            Whether one norm over the states of all layers precedes their fusion.
        fc_norm (`bool`, *optional*, defaults to `False`):
            Whether a norm over the states of each layer precedes their fusion.
        norm_output (`bool`, *optional*, defaults to `False`):
            Whether a draft's next level reads the state after the last norm instead of before it.
        own_lm_head (`bool`, *optional*, defaults to `False`):
            Whether the heads have an lm_head of their own instead of the target's.
        own_embedding (`bool`, *optional*, defaults to `False`):
            Whether the heads have a token embedding of their own instead of the target's.
        num_attention_heads (`int`, *optional*, defaults to 32):
            Attention heads of each layer.
        num_key_value_heads (`int`, *optional*):
            Key and value heads of each layer; as many as attention heads by default.
        head_dim (`int`, *optional*):
            Size of an attention head; `hidden_size / num_attention_heads` by default.
        intermediate_size (`int`, *optional*, defaults to 11008):
            Width of the MLP.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the MLP, as transformers names it.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether queries, keys and values of the layers have biases.
        attention_output_bias (`bool`, *optional*, defaults to `False`):
            Whether the output projection of attention has a bias.
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether the MLP has biases.
        qk_norm (`bool`, *optional*, defaults to `False`):
            Whether queries and keys are normalised.
        rope_parameters (`dict`, *optional*):
            Rotary embedding of the layers; plain, with base 10000, by default.
        use_rope (`bool`, *optional*, defaults to `True`):
            Whether the layers have rotary positions. Some targets' layers have none.
        max_position_embeddings (`int`, *optional*, defaults to 2048):
            As in the target, for kinds of rotary embeddings that need it.
        rms_norm_eps (`float`, *optional*, defaults to 1e-5):
            Epsilon of every norm.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of new weights for which no other start is set.
        loss_type (`str`, *optional*, defaults to `"clover"`):
            The loss that the trainer uses: `"kl"`, `"clover-2"`, `"clover"` or `"acceptance"`.
        hidden_loss_weight (`float`, *optional*):
            Weight of the loss term for hidden states.
        token_loss_weight (`float`, *optional*, defaults to 1.0):
            Weight of the loss term for tokens.
        loss_decay (`float`, *optional*, defaults to 0.8):
            Step i has the weight `loss_decay ** i` in the loss.
        draft_vocab_size (`int`, *optional*):
            Number of token ids that the heads score; all by default. The ids are a buffer of the heads.
        draft_tree (`str`, *optional*, defaults to `"global"`):
            How a tree is grown: `"global"` (best nodes of a beam), `"levels"` (Clover's rule) or `"chain"`. The number
            of nodes is `heads.generation_config.num_assistant_tokens`.
        draft_depth (`int`, *optional*, defaults to 8):
            Levels of a tree. The default is `num_heads` if that is more than 8.
        draft_beam_width (`int`, *optional*, defaults to 10):
            Nodes per level from which the next level grows, in a `"global"` tree.
        draft_top_k (`int`, *optional*, defaults to 10):
            Tokens that are tried below each node, in a `"global"` tree.
        draft_copies (`int`, *optional*, defaults to 0):
            Most tokens that are copied from earlier in the text, from after the same last two tokens, and drafted
            beside the heads' own draft. 0 copies none, and a `"chain"` gets none.
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
        source_name_or_path (`str`, *optional*):
            The repository or folder in which others published these heads.
        target_name_or_path (`str`, *optional*):
            The target that these heads were made for.
        target_revision (`str`, *optional*):
            The target's commit on the Hub.
        target_fingerprint (`str`, *optional*):
            A short hash of the target's lm_head. Heads refuse a target with another one.

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
    # Fields of `CloverConfig` that are fixed here.
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
        """As in transformers, and always with `layer_ids`, even if they are the default."""
        return {**super().to_dict(), "layer_ids": list(self.layer_ids)}


Eagle3Config.register_for_auto_class()

__all__ = ["Eagle3Config"]
