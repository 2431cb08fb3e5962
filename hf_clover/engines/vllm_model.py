"""Clover-x heads as a draft model of vLLM.

Contract: the network is `CloverHeads` with vLLM's paged attention in its block. The first pass of a draft takes the
target's states at all new positions. The block writes their keys and values; tokens and values for recall are written
to buffers with the same slot numbers, so paging, shared prefixes and preemption are vLLM's own. Later passes run only
the cell. The next step overwrites positions that the target rejected before anything reads them.

Shapes: N rows of a batch, B requests, T last rows of a request (a draft may start from each), C columns of the longest
text, S slots, d hidden size, w width of the cell.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from ..network.blocks import CloverAttention, Searched, followed, last_place, searched_text
from ..network.modeling_clover import CloverHeads
from ..network.packing import linear
from ..network.target_parts import BorrowedParts, check_fingerprint, fingerprint, is_plain
from .vllm_plugin import DraftConfig, check_heads, check_hooks, check_run


def heads_config(vllm_config: VllmConfig) -> DraftConfig:
    config = vllm_config.speculative_config.draft_model_config.hf_config
    return getattr(config, "model", config)  # vLLM's method eagle3 wraps the config


def whole(rows: torch.Tensor) -> torch.Tensor:
    """All rows of the target's embedding or lm_head; with tensor parallelism each process holds some of them."""
    if get_tensor_model_parallel_world_size() == 1:
        return rows
    return tensor_model_parallel_all_gather(rows, dim=0)


class PagedAttention(CloverAttention):
    """The block's attention, computed by vLLM over its pages."""

    def __init__(self, config: DraftConfig, layer_idx: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(config, layer_idx)
        self.attn = Attention(
            config.num_attention_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.num_key_value_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], mask: Any, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [1, N, d] -> the output [1, N, d] and the values [1, kv_heads, N, head_dim]. `mask` and `cache` are not
        read: vLLM has its own."""
        per_head = (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, per_head)).transpose(1, 2)  # [1, heads, N, head_dim]
        k = self.k_norm(self.k_proj(x).unflatten(-1, per_head)).transpose(1, 2)  # [1, kv_heads, N, head_dim]
        v = self.v_proj(x)  # [1, N, kv_heads head_dim]
        if self.use_rope:
            q, k = apply_rotary_pos_emb(q, k, *rope)
        q, k = (part[0].transpose(0, 1).flatten(1) for part in (q, k))  # [N, heads head_dim]
        out = self.attn(q.contiguous(), k.contiguous(), v[0])
        return self.o_proj(out)[None], v.unflatten(-1, per_head).transpose(1, 2)


class Drafter(nn.Module):
    """The module that vLLM's proposer calls `model.model`. The proposer sets its `embed_tokens` to the target's."""

    embed_tokens: Any  # a module of one of vLLM's classes

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = heads_config(vllm_config)
        self.heads = CloverHeads(config).requires_grad_(False)
        for i, layer in enumerate(self.heads.layers):
            layer.self_attn = last = PagedAttention(config, i, vllm_config, f"{prefix}.layers.{i}.self_attn")
        self.cache_config = vllm_config.cache_config
        self.layer_name = last.attn.layer_name
        self.most_starts = vllm_config.speculative_config.num_speculative_tokens + 1  # T
        self.level = 0  # level of the token that this pass drafts
        self.is_later_pass = False
        self.slot_tokens: torch.Tensor | None = None  # [S] the token after each position
        self.slot_values: torch.Tensor  # [S, kv_heads head_dim] values of the last attention
        # State of the drafts that are being made:
        self.runs: torch.Tensor | None = None  # [B, T, C], and [B, 1, C] from the second pass on
        self.searched: Searched  # like the two below, set whenever `runs` is
        self.slots: torch.Tensor  # [B, C]
        self.ends: torch.Tensor  # [B] the row after each request's last

    def set_skip_topk(self, skip: bool) -> None:
        """The proposer calls this with False before the first pass of a draft, and with True before each later one."""
        self.is_later_pass = skip

    def compact_topk_indices(self, rows: torch.Tensor) -> None:
        """The proposer calls this with the rows [B] from which the drafts continue."""
        if self.runs is not None:
            which = (self.most_starts - (self.ends - rows.to(self.ends)))[:, None, None]  # [B, 1, 1]
            which = which.expand(-1, 1, self.runs.shape[2])
            self.runs = self.runs.gather(1, which)
            self.searched = Searched(self.searched.behind, self.searched.seen.gather(1, which))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states [N, d], their positions [N] and the tokens after them [N] -> the input of lm_head [N, d], and the
        states after the cell [N, d]."""
        ids = input_ids.long()
        recalled: tuple[torch.Tensor, ...] = ()
        self.level = self.level + 1 if self.is_later_pass else 0
        if self.is_later_pass:
            if self.runs is not None:
                recalled = (self._recalled_later(ids, self.runs),)
            return self.heads.step(self.level, hidden_states, ids, *recalled)
        metadata = get_forward_context().attn_metadata  # None while vLLM only measures memory
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        no_mask = hidden_states.new_empty(1, 1, 0, 0)  # the paged attention has its own
        state, values, _ = self.heads._encode(hidden_states[None], ids[None], no_mask, positions[None], None)
        self.runs = None
        if values is not None and self.heads.config.recall and metadata is not None:
            recalled = (self._recalled_first(ids, positions, values, metadata),)
        return self.heads.step(0, state[0], ids, *recalled)

    # ------------------------------------------------------------------ recall

    def _recalled_first(
        self, ids: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        """What the cell recalls in the first pass [N, 2 w]; zeros at rows from which no draft can start."""
        count, size = metadata.num_actual_tokens, self.cache_config.block_size
        slots, starts = metadata.slot_mapping[:count].long(), metadata.query_start_loc.long()
        if self.slot_tokens is None:
            self._check_slots(metadata, starts, positions[:count], slots)
            every = self.cache_config.num_gpu_blocks * size
            self.slot_tokens = torch.zeros(every, dtype=torch.int32, device=ids.device)
            self.slot_values = values.new_zeros(every, values.shape[1] * values.shape[3])
        self.slot_tokens[slots] = ids[:count].to(torch.int32)
        self.slot_values[slots] = values[0, :, :count].transpose(0, 1).flatten(1)
        columns = torch.arange(metadata.max_seq_len, device=ids.device)  # [C]
        self.slots = metadata.block_table[: len(starts) - 1, columns // size].long() * size + columns % size  # [B, C]
        self.ends = starts[1:]
        rows = self.ends[:, None] + torch.arange(-self.most_starts, 0, device=ids.device)  # [B, T]
        is_own = rows >= starts[:-1, None]
        rows = torch.where(is_own, rows, starts[:-1, None])
        last = positions[rows]  # [B, T]
        self.searched, runs = searched_text(self.slot_tokens[self.slots], torch.zeros_like(last), last)
        self.runs = followed(self.searched, runs, ids[rows])  # [B, T, C]
        recalled = self._recalled(self.runs)  # [B, T, 2 w]
        everywhere = recalled.new_zeros(len(ids), recalled.shape[-1])
        everywhere[rows[is_own]] = recalled[is_own]
        return everywhere

    def _recalled_later(self, ids: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        """What the cell recalls in a later pass [N, 2 w]; rows after those of the requests are padding."""
        count = len(runs)
        self.runs = followed(self.searched, runs, ids[:count, None])
        return F.pad(self._recalled(self.runs)[:, 0], (0, 0, 0, len(ids) - count))

    def _recalled(self, runs: torch.Tensor) -> torch.Tensor:
        """[B, T, 2 w] for the places that the longest runs lead to; for a value of zero where there is none."""
        places = last_place(runs)  # [B, T]
        values = self.slot_values[self.slots.gather(1, places.clamp(min=0))]  # [B, T, kv_heads head_dim]
        return self.heads.recalled(torch.where(places[..., None] < 0, 0, values))

    def _check_slots(self, metadata: Any, starts: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Check once that slots computed here from vLLM's table of blocks are the slots that vLLM writes to."""
        size = self.cache_config.block_size
        request = torch.searchsorted(starts, torch.arange(len(slots), device=slots.device), right=True) - 1
        if not torch.equal(metadata.block_table[request, positions // size].long() * size + positions % size, slots):
            raise NotImplementedError(
                f"vLLM's {type(metadata).__name__} keeps blocks of another size than block_size={size}, so recall "
                "would read elsewhere. Choose another `attention_backend` in `speculative_config`."
            )


class CloverDraft(nn.Module):
    """The class that vLLM loads for the architecture `CloverHeads`. The proposer gives it the target's `lm_head`."""

    lm_head: Any  # a module of one of vLLM's classes

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = heads_config(vllm_config)
        check_hooks(SpecDecodeBaseProposer.propose)
        check_heads(self.config)
        check_run(self.config, vllm_config)
        self.model = Drafter(vllm_config, f"{prefix}.clover" if prefix else "clover")
        self.logits_processor = LogitsProcessor(self.config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """The states; vLLM passes them both to `compute_logits` and to the next pass."""
        return self.both(input_ids, positions, hidden_states)[1]

    def both(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.model.heads._borrowed is None:
            self._bind()
        return self.model(*inputs)

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        return self.scored(self.model.heads._project(self.model.level, hidden_states, None))

    def scored(self, out: torch.Tensor) -> torch.Tensor:
        """Logits [B, V], minus infinity outside a draft vocabulary. The target's logit scale is left out, because it
        changes no argmax."""
        heads = self.model.heads
        if self.config.draft_vocab_size is None or (rows := heads.borrowed.draft_rows) is None:
            return self.logits_processor(self.lm_head, out)
        scores = linear(out, *rows)  # [B, draft V]
        logits = scores.new_full((len(out), self.config.vocab_size), float("-inf"))
        return logits.index_copy_(1, heads.draft_ids, scores)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        # vLLM's `Attention` has tensors of its own, which no checkpoint holds.
        own = {name: t for name, t in self.model.heads.state_dict().items() if ".self_attn.attn." not in name}
        loaded = set()
        for name, tensor in weights:
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"The heads' config.json asks for no `{name}` of the shape {tuple(tensor.shape)}.")
            own[name].copy_(tensor)
            loaded.add(name)
        if missing := sorted(own.keys() - loaded):
            raise ValueError(f"The heads' checkpoint lacks {len(missing)} of its tensors, such as {missing[:3]}.")
        return {f"model.heads.{name}" for name in loaded}

    def _bind(self) -> None:
        """Borrow the target's parts that the proposer has set, after checking them. This runs in the first forward,
        while vLLM starts."""
        heads, size = self.model.heads, self.config.vocab_size
        embedding, rows = self.model.embed_tokens.weight, self.lm_head.weight
        for name, weight in (("input embedding", embedding), ("lm_head", rows)):
            if not is_plain(weight) or weight.ndim != 2 or weight.shape[1] != self.config.hidden_size:
                raise ValueError(
                    f"The target's {name} is {weight.dtype} {tuple(weight.shape)} in vLLM, and these heads, made for "
                    f"{self.config.target_name_or_path or 'an unnamed target'}, need floating point rows of "
                    f"{self.config.hidden_size}. A quantised table is not supported yet."
                )
        is_tied = embedding is rows
        rows = whole(rows)[:size]
        if self.config.target_fingerprint is not None:
            check_fingerprint(self.config, fingerprint(rows))
        table = rows if is_tied or self.config.token_embedding == "lm_head" else whole(embedding)
        borrowed = BorrowedParts(self.lm_head, table, nn.Identity(), 1.0, None)  # states already normalised
        if self.config.draft_vocab_size is not None:
            bias = getattr(self.lm_head, "bias", None)
            borrowed.draft_rows = rows[heads.draft_ids], None if bias is None else whole(bias)[heads.draft_ids]
        object.__setattr__(heads, "_borrowed", borrowed)
