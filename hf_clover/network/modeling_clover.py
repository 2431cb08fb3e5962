"""Clover heads: the network alone.

Contract: `heads(hidden_states, input_ids)` takes the target's hidden states *before* its final norm at positions
0..T-1 and the tokens that follow them (`input_ids[:, t]` is the token at position t+1). `out.head_outputs[i]` is what
head i feeds into the target's lm_head, teacher-forced; it is valid for the first T-i positions and zero after. Head i
guesses the token at position t+2+i. `heads.score(x)` applies the borrowed lm_head. Decoding calls the same parts one
at a time: `encode` (once per token of the target), `recall` and `step` (once per level of a draft).

The target's lm_head, embedding and final norm are borrowed with `bind(target)` and never stored: a checkpoint holds
head weights only. This module does not know trees, walks, losses or the Hub. It is pushed to the Hub as remote code,
so it imports only torch, transformers and its flat siblings.

Shapes: B batch, T positions, d hidden size, V vocabulary, K heads, `...` any leading dimensions.
"""

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .blocks import (
    AttentionDecoder,
    AugmentingLayer,
    CloverAttention,
    CloverMLP,
    CloverRMSNorm,
    EntryProjector,
    GatedDecoder,
    MLPDecoder,
    ResidualBlock,
    places_along,
    started_linear,
    values_at,
)
from .configuration_clover import CloverConfig
from .modeling_heads import CloverOutput, DraftHeads, package

INIT_NOISE = 0.01  # size of the noise in matrices that the papers start near the identity or near zero


class CloverHeads(DraftHeads):
    """
    Draft heads for one target, made by `from_target`, `from_pretrained` (or `AutoModel`) or
    `from_reference_checkpoint`.

    Pass them to the target's `generate` as `assistant_model`: they draft tokens, and the target verifies them. They
    borrow the target's lm_head, embedding and final norm; a checkpoint holds only the heads' own weights. Two
    attributes set how they draft: `generation_config.num_assistant_tokens`, the nodes of a tree (chosen by measured
    speed if it is `None`), and `text_memory`, a `TextMemory` to copy from.

    Args:
        config ([`CloverConfig`]):
            The configuration of the heads.

    Example:

    ```python
    >>> import hf_clover
    >>> from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    >>> tokenizer = AutoTokenizer.from_pretrained("org/target")
    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = AutoModel.from_pretrained("org/clover-heads")

    >>> inputs = tokenizer("def f(x):", return_tensors="pt")
    >>> plain = model.generate(**inputs, max_new_tokens=16)
    >>> drafted = model.generate(**inputs, assistant_model=heads, max_new_tokens=16)
    >>> bool((drafted == plain).all())
    True
    ```
    """

    config: CloverConfig
    config_class = CloverConfig
    _no_split_modules = ["AugmentingLayer"]

    def build(self, config: CloverConfig) -> None:
        decoders = {"attention": AttentionDecoder, "mlp": MLPDecoder, "gated": GatedDecoder, "none": None}
        decoder = decoders[config.decoder]
        size, eps, projector = config.hidden_size, config.rms_norm_eps, config.output_projector
        if decoder is not None and config.has_entry_decoder:
            self.entry_decoder = decoder(config) if config.entry == "decoder" else EntryProjector(config)
        if config.has_augmenting_block:
            self.layers = nn.ModuleList(AugmentingLayer(config, i) for i in range(config.num_augmenting_layers))
            self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # it reads what any config has
        # Without a norm of its own, the state is either unchanged, and takes the target's norm, or normalised before.
        if (config.has_augmenting_block or config.has_entry_decoder) and not config.normalize_hidden_states:
            self.norm = CloverRMSNorm(size, eps)
        if decoder is not None and config.num_later_heads > 0:
            self.decoder = decoder(config)
        if config.recall:
            values_size = config.num_key_value_heads * config.head_dim
            self.recalled = started_linear(values_size, 2 * config.decoder_width, False, "even")
        if projector == "fc":
            if config.decoder_position == "before":
                self.first_fc = started_linear(size, size, True, "identity")
            # One for all later heads. Without the Regressive Connection they would all guess the same: one each.
            count = 1 if config.can_draft_beyond_heads else config.num_later_heads
            self.fc = nn.ModuleList(started_linear(2 * size, size, True, "identity") for _ in range(count))
        if projector == "residual":
            self.residual_blocks = nn.ModuleList(ResidualBlock(size) for _ in range(config.num_heads))
        else:
            self.head_norm = CloverRMSNorm(size, eps)

    # ------------------------------------------------------------------ the network

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the target's lm_head or of its input embedding: `config.token_embedding` names the table.

        Args:
            input_ids (`torch.Tensor` of shape `[...]`):
                Token ids.

        Returns:
            `torch.Tensor` of shape `[..., d]`
        """
        rows = super().embed(input_ids)
        if self.config.normalize_embeddings:
            rows = F.normalize(rows, dim=-1)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def scaled_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's states as the first layer reads them: normed and scaled, if the config says so.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., d]`):
                The target's, before its final norm.

        Returns:
            `torch.Tensor` of shape `[..., d]`
        """
        x = hidden_states.to(self.dtype)
        if self.config.normalize_hidden_states:
            x = self._target_norm(x) * self.config.hidden_state_scale
        return x

    def encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """The states that head 0 starts from; computed once per token of the target.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, d]`):
                The target's states before its final norm.
            input_ids (`torch.Tensor` of shape `[B, T]`):
                The token that follows each state.
            attention_mask (`torch.Tensor`, *optional*):
                2-D (padding) or, with a cache, 4-D as `scaled_dot_product_attention` takes it.
            position_ids (`torch.Tensor` of shape `[1 or B, T]`, *optional*):
                Positions of the states; by default they continue from the cache's length.
            past_key_values (`Cache`, *optional*):
                A cache with a layer for each layer of the block.

        Returns:
            `torch.Tensor` of shape `[B, T, d]`
        """
        return self._encode(hidden_states, input_ids, attention_mask, position_ids, past_key_values)[0]

    def _encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The states, the values of the block's last attention [B, kv_heads, C, head_dim], and its mask."""
        x, values = self.scaled_states(hidden_states), None
        if self.config.has_entry_decoder:
            x = self.entry_decoder(x, self.embed(input_ids))
        if self.config.has_augmenting_block:
            rope, attention_mask = self.rope_and_mask(x, attention_mask, position_ids, past_key_values)
            for layer in self.layers:
                x, values = layer(x, rope, attention_mask, past_key_values)
        if hasattr(self, "norm"):
            x = self.norm(x)
        elif not self.config.normalize_hidden_states:
            x = self._target_norm(x)
        return x, values, attention_mask

    def recall(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What `step` reads about an earlier place of the text, after which the draft may continue as the text did.

        Args:
            values (`torch.Tensor` of shape `[B, kv_heads, C, head_dim]`):
                Values of the block's last attention.
            places (`torch.Tensor` of shape `[B, T]`):
                Column of the earlier place, or -1 for none.

        Returns:
            `torch.Tensor` of shape `[B, T, 2 w]`
        """
        return self.recalled(values_at(values, places))

    def _target_norm(self, x: torch.Tensor) -> torch.Tensor:
        """The target's final norm, in its own dtype and on its own device."""
        norm = self.borrowed.norm
        like = [*norm.parameters(), x][0]  # torch 2.6 does not compile `next` with a default
        return norm(x.to(like)).to(x)

    def step(
        self, level: int, state: torch.Tensor, input_ids: torch.Tensor, recalled: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one head; called once per level of a draft.

        Args:
            level (`int`):
                Number of the head, from 0.
            state (`torch.Tensor` of shape `[..., d]`):
                The output of `encode` at level 0, and at every level without the Regressive Connection; otherwise the
                next state that the level before returned.
            input_ids (`torch.Tensor` of shape `[...]`):
                The token before the guess: the target's own token at level 0, and at every level without the
                Regressive Connection; otherwise a drafted one.
            recalled (`torch.Tensor` of shape `[..., 2 w]`, *optional*):
                The output of `recall`, for heads that recall.

        Returns:
            `tuple` of two `torch.Tensor`: the input of lm_head and the next state, both of shape `[..., d]`
        """
        embedding = None
        reads_the_token = level > 0 or self.config.decoder_position != "before"
        if reads_the_token:
            if self.config.decoder != "none" or self.config.output_projector == "fc":
                embedding = self.embed(input_ids)
            if self.config.decoder != "none":
                decoded = self.decoder(state, embedding, *(() if recalled is None else (recalled,)))
                return self._project(level, decoded, embedding), decoded if self.config.regressive else state
        return self._project(level, state, embedding), state

    def _project(self, level: int, state: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        if self.config.output_projector == "residual":
            return self.residual_blocks[level](state)
        if self.config.output_projector == "none":
            return self.head_norm(state)
        if embedding is None:
            return self.head_norm(self.first_fc(state))
        config = self.config
        later = 0 if config.can_draft_beyond_heads else level - (config.num_heads - config.num_later_heads)
        return self.head_norm(self.fc[later](torch.cat((state, embedding), dim=-1)))

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> CloverOutput | tuple[torch.Tensor, ...]:
        """Run all heads over a text whose tokens are all known, as in training.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, d]`):
                The target's states before its final norm.
            input_ids (`torch.Tensor` of shape `[B, T]`):
                The token that follows each state.
            attention_mask (`torch.Tensor`, *optional*):
                As for `encode`.
            position_ids (`torch.Tensor`, *optional*):
                As for `encode`.
            return_dict (`bool`, *optional*, defaults to `True`):
                `False` returns a tuple in place of the `CloverOutput`.

        Returns:
            `CloverOutput`: `head_outputs` of shape `[K, B, T, d]`, valid at the first T - i positions for head i, and
            `state` of shape `[B, T, d]`
        """
        if hidden_states.shape[:2] != input_ids.shape:
            raise ValueError(
                f"`input_ids` {tuple(input_ids.shape)} must have one token per position of `hidden_states` "
                f"{tuple(hidden_states.shape)}: input_ids[:, t] is the token that follows hidden_states[:, t]."
            )
        first, values, mask = self._encode(hidden_states, input_ids, attention_mask, position_ids, None)
        state, length, outputs, places = first, input_ids.shape[1], [], None
        if self.config.recall and values is not None and length:
            places = places_along(input_ids, mask, input_ids, self.config.num_heads)  # of each level [B, T]
        for level in range(self.config.num_heads):
            valid = max(length - level, 0)
            tokens = input_ids[:, level:] if self.config.regressive else input_ids[:, :valid]  # [B, T - level]
            recalled = (
                () if places is None or values is None else (self.recall(values, places[level][:, :valid]),)
            )  # [B, T - level, .]
            out, state = self.step(level, state[:, :valid], tokens, *recalled)  # [B, T - level, d]
            outputs.append(F.pad(out, (0, 0, 0, length - valid)))
        output = CloverOutput(head_outputs=torch.stack(outputs), state=first)
        return output if return_dict else output.to_tuple()

    # ------------------------------------------------------------------ making, saving, generating

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if not isinstance(module, nn.Linear):
            return
        start = getattr(module, "start", None)
        if start == "zero":
            init.zeros_(module.weight)
        elif start == "noise":
            init.uniform_(module.weight, 0.0, INIT_NOISE)
        elif start == "even":
            init.normal_(module.weight, 0.0, module.in_features**-0.5)
        elif start == "beside":
            weight = torch.empty_like(module.weight).normal_(0.0, module.out_features**-0.5)
            nn.init.eye_(weight[:, : module.out_features])
            init.copy_(module.weight, weight)
        elif start in ("identity", "gaussian identity"):
            noise = torch.empty_like(module.weight)
            noise = noise.normal_(0.0, INIT_NOISE) if "gaussian" in start else noise.uniform_(0.0, INIT_NOISE)
            init.copy_(module.weight, noise + torch.eye(*noise.shape, device=noise.device, dtype=noise.dtype))

    def new_drafter(
        self, network: DraftHeads, prompt_mask: torch.Tensor | None = None, block: int | None = None
    ) -> Any:
        return package("decoding.draft.drafter").CloverDrafter(network, prompt_mask, block)

    @classmethod
    def from_target(cls, target: nn.Module, variant: str = "clover-x", **fields: Any) -> "CloverHeads":
        """Make new heads, on the target's device and in its dtype.

        Args:
            target (`PreTrainedModel`):
                A complete decoder-only model.
            variant (`str`, *optional*, defaults to `"clover-x"`):
                As in `CloverConfig`.
            fields:
                Any other field of `CloverConfig`.

        Returns:
            `CloverHeads`: heads that change no token and guess few of them, until they are trained

        Example:

        ```python
        >>> from hf_clover import CloverHeads
        >>> from transformers import AutoModelForCausalLM

        >>> model = AutoModelForCausalLM.from_pretrained("org/target")
        >>> CloverHeads.from_target(model, num_heads=3).config.num_heads
        3
        ```
        """
        return package("origins.from_target").heads_from_target(cls, target, variant, fields)

    @classmethod
    def from_reference_checkpoint(
        cls, folder: str | os.PathLike, target: PreTrainedModel, allow_pickle: bool = False
    ) -> "CloverHeads":
        """Load heads that were trained with the papers' public reference code; they compute what that code computes.

        Args:
            folder (`str` or `os.PathLike`):
                The folder of the checkpoint.
            target (`PreTrainedModel`):
                The model that the heads were trained for.
            allow_pickle (`bool`, *optional*, defaults to `False`):
                Whether to read torch files if there is no safetensors file. Only their weights are read.

        Returns:
            `CloverHeads`: bound to the target
        """
        return package("origins.reference").heads_from_reference_checkpoint(cls, folder, target, allow_pickle)


CloverHeads.register_for_auto_class("AutoModel")

__all__ = [
    "AttentionDecoder",
    "AugmentingLayer",
    "CloverAttention",
    "CloverHeads",
    "CloverMLP",
    "CloverOutput",
    "CloverRMSNorm",
    "MLPDecoder",
    "ResidualBlock",
]
