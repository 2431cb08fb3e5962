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
    Configuration of `Eagle3Heads`.

    Args:
        layer_ids (`list[int]`): the target's layers whose states are read, counted as transformers' `hidden_states`
            are: 0 is the embeddings, k what the k-th layer gives.
        vocab_size (`int`): that of the target.
        hidden_size (`int`): width of the heads.
        target_hidden_size (`int`, *optional*): width of the target; that of the heads by default.
        num_heads (`int`, defaults to 7): steps that training unrolls, and `forward` gives.
        num_hidden_layers (`int`, defaults to 1): layers; the first takes token and feature side by side.
        norm_before_residual (`bool`): the first layer adds its attention to the normed feature, not to the feature.
        norm_before_fc (`bool`): a norm over all the target's states comes before they are fused.
        fc_norm (`bool`): a norm over each layer's states comes before they are fused.
        norm_output (`bool`): drafts go on from the state after the last norm, not before it.
        own_lm_head, own_embedding (`bool`): the heads have these themselves and do not borrow the target's.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, hidden_act, attention_bias,
        attention_output_bias, mlp_bias, qk_norm, use_rope, rope_parameters, max_position_embeddings, rms_norm_eps,
        initializer_range: shape of the layers.
        loss_type, hidden_loss_weight, token_loss_weight, loss_decay: the loss, for the trainer.
        draft_vocab_size, draft_tree, draft_depth, draft_beam_width, draft_top_k, draft_copies, draft_top_p,
        draft_min_p: how drafts are made, as in `CloverConfig`.
        bos_token_id, eos_token_id, pad_token_id: those of the target.
        target_name_or_path, target_revision, target_fingerprint: which target these heads were made for.
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
