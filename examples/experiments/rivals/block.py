"""Drafters of whole blocks: what DFlash and DSpark share, written from descriptions of them and not from their code.

The states of several layers of the target are concatenated, projected and normalised. Every draft layer takes them as
keys and values of the text so far, made once for each token of the text. A block is the last token of the text and one
slot with the same learned vector for each of the next gamma tokens; one forward runs over it, in which the slots see
the text and each other. What slot k gives guesses the k-th token.

Trained on blocks from random places of each sequence. A slot costs soft cross-entropy, total
variation to the target's distribution, or some of each; the k-th counts exp(-(k - 1) / gamma).

Shapes: B batch, T positions, d hidden size, G slots (gamma), S = G + 1 with the last token, A anchors, W beams, C
columns of the cache, H heads.
"""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_clover import CloverConfig, CloverTrainer
from hf_clover.decoding.draft.path_drafter import PathDrafter
from hf_clover.network.modeling_clover import CloverAttention, CloverMLP, CloverOutput, CloverRMSNorm
from hf_clover.origins.from_target import paper_layers
from hf_clover.training.losses import prediction_mask, soft_cross_entropy

from .base import RivalHeads

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
SLOTS = 7  # gamma: the chains that these are compared by
EVERY = 4  # positions to an anchor


# ---------------------------------------------------------------------- drafting


class _Block:
    """A tree that is being grown over a block, which was computed once."""

    def __init__(self, drafter: "BlockDrafter") -> None:
        self.heads, cache = drafter.heads, drafter.cache
        width = self.heads.config.num_heads + 1
        positions = drafter.last[:, None] + 1 + torch.arange(width, device=drafter.last.device)  # [B, S]
        with cache.staged(width):
            self.slots = self.heads.slots(drafter.roots, positions, self._mask(drafter, width), cache)  # [B, G, d]
        self.state: torch.Tensor | None = None  # [B, W, r] what was drafted so far, where that counts

    def expand(self, level: int, chosen: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """As `tree.Expand`: logits [B, W, V] of what follows `tokens` [B, W]."""
        if chosen is not None and self.state is not None:
            self.state = self.state.gather(1, chosen[..., None].expand(-1, -1, self.state.shape[2]))
        out, self.state = self.heads.with_drafted(self.slots[:, level, None], self.state, tokens)  # [B, 1 or W, d]
        return self.heads.score(out).expand(-1, tokens.shape[1], -1)

    @staticmethod
    def _mask(drafter: "BlockDrafter", width: int) -> torch.Tensor | None:
        """[B, 1, S, C]: all of the text and all of the block, and no padding."""
        slots, prompt = drafter.cache.slots, drafter.prompt_mask
        if slots.is_even and prompt is None:
            return None
        device = drafter.last.device
        visible = torch.arange(max(slots.lengths) + width, device=device) < slots.starts_on(device) + width  # [B, C]
        if prompt is not None:
            visible[:, : prompt.shape[1]] &= prompt.to(device)
        return visible[:, None, None].expand(-1, -1, width, -1)


class BlockDrafter(PathDrafter):
    def levels(self) -> _Block:
        return _Block(self)


# ---------------------------------------------------------------------- training


class BlockTrainer(CloverTrainer):
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        hidden_states, size = inputs.get("hidden_states"), self.heads.config.num_heads
        if hidden_states is None:
            hidden_states = self.teacher.hidden_states(inputs)
        labels, draftable = inputs["labels"], self.teacher.draftable(inputs["input_ids"])
        if draftable is not None:
            labels = labels.masked_fill(~draftable, -100)
        mask = prediction_mask(labels, None, size)  # [G, B, T]
        anchors = self._anchors(mask[0])  # [B, A]
        counted = mask.gather(2, anchors.expand(size, -1, -1))  # [G, B, A]
        with self.teacher.lending():
            features = self.teacher.features(hidden_states)[:, :-1]
            outputs = model(hidden_states=features, input_ids=inputs["input_ids"][:, 1:], anchors=anchors)
        level, row, anchor = counted.nonzero(as_tuple=True)  # [N] each
        place = anchors[row, anchor] + 1 + level  # [N], of the target, which says there what comes next
        states = self.teacher.final_states(hidden_states[row, place])  # [N, d]
        with self._computing():
            with torch.no_grad():
                p = self.heads.score(states).softmax(-1, dtype=torch.float32)  # [N, D]
            log_q = self.heads.score(outputs.head_outputs[level, row, anchor]).float().log_softmax(-1)  # [N, D]
        share, weights = self.heads.variation, torch.exp(-level / size)  # [N]
        losses = (1 - share) * soft_cross_entropy(log_q, p)
        if share:
            losses = losses + share * (p - log_q.exp()).abs().sum(-1) / 2
        loss = (weights * losses).sum() / weights.sum().clamp(min=math.exp(-1))
        if not torch.isfinite(loss):
            self._raise_not_finite(loss[None], hidden_states)
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def _anchors(possible: torch.Tensor) -> torch.Tensor:
        """possible [B, T] -> [B, A]: a random choice of the positions that have something to guess, those first."""
        order = torch.rand(possible.shape, device=possible.device) + possible
        return order.topk(max(possible.shape[1] // EVERY, 1), dim=1).indices


# ---------------------------------------------------------------------- the network


class BlockAttention(CloverAttention):
    """Attention of a block: to the text, by its features, and to itself in both directions."""

    def keys_and_values(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, d], features or slots -> [B, kv_heads, T, head_dim] each."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self._turned(k, rope), v

    def attend(
        self, x: torch.Tensor, rope: Rope, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)  # [B, H, S, head_dim]
        out = F.scaled_dot_product_attention(self._turned(q, rope), k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _turned(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        return apply_rotary_pos_emb(x, x, *rope)[0] if self.use_rope else x


class BlockLayer(nn.Module):
    def __init__(self, config: CloverConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = CloverRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = BlockAttention(config, layer_idx)
        self.mlp_norm = CloverRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = CloverMLP(config)


class BlockHeads(RivalHeads):
    """The number of layers is the config's `num_augmenting_layers`, the number of slots its `num_heads`."""

    drafter, trainer = BlockDrafter, BlockTrainer
    variation: ClassVar[float]  # share of total variation in the loss; the rest is cross-entropy

    @classmethod
    def layers_of(cls, target: PreTrainedModel) -> list[int]:
        return paper_layers(target.config.get_text_config(decoder=True).num_hidden_layers)

    def build(self, config: CloverConfig) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = nn.Linear(len(config.layer_ids) * size, size, bias=False)
        self.feature_norm, self.norm = CloverRMSNorm(size, eps), CloverRMSNorm(size, eps)
        self.slot = nn.Embedding(1, size)
        self.blocks = nn.ModuleList(BlockLayer(config, i) for i in range(config.num_augmenting_layers))
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, 3 d], the layers' states side by side -> [B, T, d]"""
        return self.feature_norm(self.fuse(hidden_states.to(self.dtype)))

    def with_drafted(
        self, slot: torch.Tensor, state: torch.Tensor | None, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a slot gave (broadcasts to [..., d]), what was drafted before it and the token just before it [...] ->
        what goes into lm_head, and the next state."""
        raise NotImplementedError

    def encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """The text's keys and values, into the cache."""
        features = self.features(hidden_states)
        rope = self.rotary_emb(features, position_ids)
        for index, layer in enumerate(self.blocks):
            past_key_values.update(*layer.attention.keys_and_values(features, rope), index)
        return features

    def slots(
        self, roots: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Cache
    ) -> torch.Tensor:
        """The block behind `roots` [B], at `positions` [B, S] -> [B, G, d]."""
        return self._through(roots[:, None], positions, mask, lambda k, v, layer: cache.update(k, v, layer))[:, 0]

    def _through(self, roots: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, joined: Any) -> Any:
        """Blocks behind `roots` [B, A], at `positions` [B, A S] -> [B, A, G, d]. `joined(k, v, layer)` gives the keys
        and values of the text and of the blocks."""
        batch, anchors = roots.shape
        empty = self.slot.weight.expand(batch, anchors, self.config.num_heads, -1)  # [B, A, G, d]
        x = torch.cat((self.embed(roots)[:, :, None], empty), dim=2).flatten(1, 2)  # [B, A S, d]
        rope = self.rotary_emb(x, positions)
        for index, layer in enumerate(self.blocks):
            normed = layer.attention_norm(x)
            k, v = joined(*layer.attention.keys_and_values(normed, rope), index)
            x = x + layer.attention.attend(normed, rope, k, v, mask)
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.norm(x).unflatten(1, (anchors, -1))[:, :, 1:]

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        return_dict: bool = True,
        anchors: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CloverOutput | tuple[torch.Tensor, ...]:
        """Teacher-forced, as our heads, at the positions `anchors` [B, A] (all of them): head_outputs [G, B, A, d]."""
        if position_ids is not None:
            raise ValueError("`packing=True`: this rival is trained on samples apart, padded on the right.")
        (batch, length), size, device = input_ids.shape, self.config.num_heads, input_ids.device
        if anchors is None:
            anchors = torch.arange(length, device=device).expand(batch, -1)
        features, text = self.features(hidden_states), torch.arange(length, device=device)
        rope = self.rotary_emb(features, text[None])
        ahead = torch.arange(size + 1, device=device)
        positions = (anchors[..., None] + 1 + ahead).flatten(1)  # [B, A S]
        before = text <= anchors[..., None]  # [B, A, T]
        itself = torch.eye(anchors.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)  # [B, A, A]
        mask = torch.cat((before, itself.repeat_interleave(size + 1, dim=2)), dim=2)  # [B, A, T + A S]
        mask = mask.repeat_interleave(size + 1, dim=1)[:, None]  # [B, 1, A S, T + A S]

        def joined(k: torch.Tensor, v: torch.Tensor, index: int) -> tuple[torch.Tensor, ...]:
            of_text = self.blocks[index].attention.keys_and_values(features, rope)
            return tuple(torch.cat(both, dim=2) for both in zip(of_text, (k, v), strict=True))

        slots = self._through(input_ids.gather(1, anchors), positions, mask, joined)  # [B, A, G, d]
        state, outputs = None, []
        for level in range(size):
            places = anchors + level  # of the token before the guess
            there = (places < length)[..., None]  # [B, A, 1]
            tokens = input_ids.gather(1, places.clamp(max=length - 1))  # [B, A]
            out, state = self.with_drafted(slots[:, :, level], state, tokens)
            outputs.append(torch.where(there, out, 0))
        output = CloverOutput(head_outputs=torch.stack(outputs), state=None)
        return output if return_dict else output.to_tuple()
