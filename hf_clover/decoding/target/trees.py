"""The target's side of a step: prefill, one forward over a whole tree, and keeping what was walked.

Contract: `TargetRun` owns the target's `TreeCache`, masks and positions for one call of `generate`. It returns logits
and the states that the heads read. The results for a node are those that the target gives for the node's path alone.
After its `with` block, the target is unchanged.

Shapes: B batch, T prompt columns, n tree nodes, f numbers of a state as the heads read it, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from ...network.target_parts import device_of
from ...targets.private_api import cache_name, inputs_after, inputs_of_step
from ..cache.by_row import TreeCache
from ..cache.static import NODE_COUNTS, StaticSlots, StaticTreeCache, first_capacity, give_back_cache, take_cache
from ..call import Text
from ..graphs import Graphs, filled
from ..processes import any_goes_on
from ..tree import Tree, chain_of, root_only
from ..walk import walk_in_tensors
from .attention import attention_for_trees, shared_heads
from .base import Run
from .graph_rules import what_forwards_read
from .long_texts import hang_parts, has_gaps, is_for_parts
from .masks import MaskRules, additive, ancestors_of, plain_mask, visible_columns

CATCH_UP_BLOCK = 128  # tokens in one forward that bring rows that ended early to one length

# Arguments that a tree's forward sets itself: tokens, positions, the mask that shows each node its path, and the
# cache, also by its names in older versions. A tree also needs the logits of all nodes. Every other argument that
# plain generate would pass at its next step goes into every forward, as the target's own methods make it. These leave
# out what belongs to the prompt alone (images, sound, its embeddings and labels).
MADE_ANEW = (
    *("input_ids", "inputs_embeds", "position_ids", "attention_mask", "cache", "past_key_values", "cache_params"),
    *("cache_position", "use_cache", "logits_to_keep", "labels", "return_dict"),
)
# Other arguments that have one value per token. At a step, the value is the same for any new token.
OF_EACH_TOKEN = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class TargetRun(Run):
    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
        in_graphs: bool = False,
        text: Text | None = None,
    ) -> None:
        """`in_graphs`: forwards over trees are captured, and the walk with them if `text` is plain greedy."""
        super().__init__(target, generation_config, model_kwargs, feature_layers)
        self.in_graphs, self.text = in_graphs, text if text is not None and text.is_plain_greedy else None
        self.text_config = target.config.get_text_config(decoder=True)
        self.num_layers = self.text_config.num_hidden_layers
        self.rules = MaskRules.of(self.text_config, shared_heads(target))
        self.cache: TreeCache | StaticTreeCache = TreeCache(self.num_layers)
        self.forward_kwargs: dict[str, Any] = {}  # arguments of every forward, beside `MADE_ANEW`
        self.token_kwargs: dict[str, torch.Tensor] = {}  # [B, 1] for any new token
        self._shift: torch.Tensor  # [..., B, 1] a token's position minus its column
        self._last: torch.Tensor  # [] the answer's last position; no node has a later one
        self._implementation: str | None = None

    @property
    def next_position(self) -> torch.Tensor:
        """[..., B, 1]: the position of the next tree's root."""
        slots = self.cache.slots
        if isinstance(slots, StaticSlots):
            return self._shift + slots.state[: len(slots.lengths), :1]
        return self._shift + (slots.lengths[0] if slots.is_even else slots.starts_on(self._shift.device))

    # ------------------------------------------------------------------ forwards

    def prefill(self, input_ids: torch.Tensor, limit: int | None = None) -> torch.Tensor:
        batch = input_ids.shape[0]
        if self.in_graphs:
            self._become_static(input_ids, limit)
        self._load(self.theirs)
        kwargs = {**self.model_kwargs, cache_name(): self.cache}
        known = self.cache.get_seq_length()
        outputs = self._read_prompt(input_ids, kwargs)
        if self.cache.get_seq_length() == known:  # Phi-3 makes its own cache for a prompt beyond some length
            self.theirs = outputs[cache_name()]
            self._load(self.theirs)
        self.cache.finish_filling(batch)
        self._ask_for_inputs(input_ids, outputs, kwargs)
        positions = kwargs["position_ids"]
        following = positions[..., -1:].expand(*positions.shape[:-2], batch, 1) + 1  # [..., B, 1]
        self._shift = following - self.cache.lengths[0]
        # The answer's last token is never fed back, so positions end one before it.
        more = torch.iinfo(torch.int32).max if limit is None else max(limit - input_ids.shape[1] - 2, 0)
        self._last = following.max() + more
        return outputs.logits[:, -1:]

    def _ask_for_inputs(self, input_ids: torch.Tensor, outputs: Any, inputs: dict[str, Any]) -> None:
        """Keep the arguments that the target's own methods would pass at the next step."""
        token = outputs.logits[:, -1].argmax(-1, keepdim=True).to(input_ids)  # [B, 1]
        inputs = inputs_after(self.target, outputs, dict(inputs))
        made = inputs_of_step(self.target, torch.cat((input_ids, token), dim=1), inputs, 1, 1)
        made = {name: value for name, value in made.items() if name not in MADE_ANEW and value is not None}
        self.token_kwargs = {name: made.pop(name) for name in OF_EACH_TOKEN if name in made}
        self.forward_kwargs = made

    def verify(self, tree: Tree) -> torch.Tensor:
        if self._implementation is None:
            self._implementation = self._open.enter_context(attention_for_trees(self.target))
        tree = tree.to(device_of(self.target))
        if isinstance(self.cache, StaticTreeCache):
            return self._verify_in_place(tree, self.cache)
        positions = torch.minimum(self.next_position + tree.depths, self._last)  # [..., B, n]
        with self.cache.staged(tree.size):
            logits, self.hidden = self._forward(tree.tokens, positions, self._masks(tree), self.token_kwargs)
        return logits

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, masks: Any, of_token: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, n, V] and states [B, n, f] of `tokens` [B, n]. `of_token`: values of `token_kwargs`."""
        self._captured.clear()
        types = {name: value.expand(*value.shape[:-1], tokens.shape[1]) for name, value in of_token.items()}
        outputs = self.target(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            return_dict=True,
            **{cache_name(): self.cache, **self.forward_kwargs, **types},
        )
        return outputs.logits, self._take_hidden()

    def _verify_in_place(self, tree: Tree, cache: StaticTreeCache) -> torch.Tensor:
        """The tree is filled up with nodes and rows to the size of a graph; their results are dropped."""
        batch, size = tree.tokens.shape
        width = min((count for count in NODE_COUNTS if count >= size), default=size)
        rows, columns = cache.look_at(width)
        inputs = [filled(filled(tree.packed(), width, 2), rows, 1), self._last]
        inputs += [filled(part, rows, -2) for part in (self._shift, *self.token_kwargs.values())]  # [..., B, 1]
        if self.text is not None:
            inputs.append(filled(self.text.limits(), rows))
        forward = partial(self._forward_in_place, cache)
        self.is_warm = True
        with cache.staged(width):
            if width > NODE_COUNTS[-1] or self._has_other_tensors:
                found: tuple[torch.Tensor, ...] = forward(*inputs)
            else:
                named, parts = repr((*self.token_kwargs, *self.forward_kwargs.items())), is_for_parts(cache.slots)
                ends = None if self.text is None else len(self.text.ends)
                key = (rows, columns, width, parts, str(self._mask_dtype()), self.feature_layers, named, ends)
                found = cache.graphs.run(key, forward, inputs)
                self.is_warm = cache.graphs.has_replayed
        logits, self.hidden, *walked = (part[:batch] for part in found)
        self.walked = walked[0] if walked else None
        return logits[:, :size]

    def _forward_in_place(
        self, cache: StaticTreeCache, tree: torch.Tensor, last: torch.Tensor, shift: torch.Tensor, *more: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Logits [B, n, V] and states [B, n, f] of `tree` [4, B, n] (`Tree.packed`), without the host, and the walk if
        there is a text. `last`: the greatest position. `shift` [..., B, 1]: position minus column. `more`: the values
        of `token_kwargs` and, for a walk, `Text.limits`."""
        slots, rules, (tokens, parents, depths, _) = cache.slots, self.rules, tree
        size, starts = tokens.shape[1], slots.starts
        slots.index = starts + torch.arange(size, device=tokens.device)  # [B, n]
        ancestors = ancestors_of(parents, size.bit_length())
        visible = visible_columns(ancestors, starts, slots.seen_columns, slots.visible_text)  # [B, n, C]
        masks = rules.masks(visible, starts, depths, slots.visible_text, self._mask_dtype())
        if is_for_parts(slots):
            hang_parts(masks, rules, ancestors, slots, self._mask_dtype())
        named = dict(zip(self.token_kwargs, more, strict=False))
        logits, hidden = self._forward(tokens, torch.minimum(starts + shift + depths, last), masks, named)
        if self.text is None:
            return logits, hidden
        walked = walk_in_tensors(tree, ancestors, logits, more[-1])
        return logits, _at(hidden, walked[:, 0].clamp(min=0)), walked

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        root = self.next_position
        self.root_position = root.reshape(-1, *root.shape[-2:])[0]
        if self.walked is None and any(list(path) != list(range(len(path))) for path in paths):
            longest = max(map(len, paths))
            nodes = [[*path, *[0] * (longest - len(path))] for path in paths]
            self.hidden = _at(self.hidden, torch.tensor(nodes, device=self.hidden.device))
        self.cache.commit(paths)

    @property
    def can_drop_rows(self) -> bool:
        return not self.keeps_cache and not self._has_other_tensors

    @property
    def _has_other_tensors(self) -> bool:
        """Whether the target passes on tensors whose rows have no known meaning."""
        return any(isinstance(value, torch.Tensor) for value in self.forward_kwargs.values())

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.cache.keep_rows(rows)
        index = torch.tensor(rows, device=self._shift.device)
        self._shift = self._shift.index_select(-2, index)
        self.token_kwargs = {k: v.index_select(-2, index.to(v.device)) for k, v in self.token_kwargs.items()}
        self.hidden = self.hidden[index.to(self.hidden.device)]
        if self.prompt_mask is not None:
            self.prompt_mask = self.prompt_mask[index.to(self.prompt_mask.device)]

    # ------------------------------------------------------------------ masks

    def _masks(self, tree: Tree) -> Any:
        """One mask [B, 1, n, C], or one per layer type where the target's layers differ. None where a plain step needs
        none."""
        slots, rules, dtype, device = self.cache.slots, self.rules, self._mask_dtype(), tree.tokens.device
        columns = slots.columns()
        is_full = rules.are_full_for(columns)
        if is_full and slots.is_even and self.prompt_mask is None:
            if tree.size == 1 and self._implementation == "sdpa":
                return rules.arrange(dict.fromkeys(rules.kinds))
            return rules.arrange(dict.fromkeys(rules.kinds, plain_mask(tree.ancestors(), slots.lengths[0], dtype)))
        starts = slots.starts_on(device)  # [B, 1]
        prompt = None if self.prompt_mask is None else self.prompt_mask.to(device)
        visible = visible_columns(tree.ancestors(), starts, columns, prompt)  # [B, n, C]
        if is_full:
            return rules.arrange(dict.fromkeys(rules.kinds, additive(visible, dtype)))
        return rules.masks(visible, starts, tree.depths, prompt, dtype)

    def _mask_dtype(self) -> torch.dtype:
        """The dtype of masks: sdpa takes the keys' dtype, eager attention the target's."""
        return (self.cache.dtype if self._implementation == "sdpa" else None) or self.target.dtype

    # ------------------------------------------------------------------ other caches

    def _become_static(self, input_ids: torch.Tensor, limit: int | None) -> None:
        embeds = self.model_kwargs.get("inputs_embeds")
        of_embeds = 0 if embeds is None else embeds.shape[1]
        prompt = input_ids.shape[1] + of_embeds
        longest = max(limit or 0, input_ids.shape[1]) + of_embeds
        if isinstance(self.theirs, StaticCache):  # its length covers all that it will ever hold
            layers: list[Any] = self.theirs.layers
            prompt = longest = max([longest, *(layer.max_cache_len for layer in layers if not layer.is_sliding)])
        graphs = Graphs(device_of(self.target), "Forwards over trees", what_forwards_read(self.target))
        cache = take_cache(self.target, self.num_layers, len(input_ids), first_capacity(prompt, longest), graphs)
        self.at_end(give_back_cache, self.target, cache)
        self.cache = cache
        cache.slots.has_gaps = self.prompt_mask is not None and has_gaps(self.prompt_mask)
        if self.prompt_mask is not None:
            cache.slots.text[:, : self.prompt_mask.shape[1]] = self.prompt_mask

    def _load(self, other: Any) -> None:
        length = 0 if other is None else int(other.get_seq_length())
        if length:
            states = [
                (layer.keys[:, :, :length], layer.values[:, :, :length])
                if getattr(layer, "keys", None) is not None
                else None
                for layer in other.layers
            ]
            self.cache.load([*states, *[None] * (self.num_layers - len(states))], length)

    def hand_back(self, columns: int) -> Any:
        """Add the columns that the returned cache does not hold yet; it treats them as in plain generate."""
        cache = self.theirs if self.theirs is not None else DynamicCache(config=self.text_config)
        if not isinstance(cache, DynamicCache):
            cache.reset()
        known = int(cache.get_seq_length())
        for layer_idx in range(self.num_layers):
            states = self.cache.export(layer_idx, columns)
            if states is not None:
                keys, values = (each[:, :, known:] for each in states)
                cache.update(keys, values, layer_idx)
        return cache

    def bring_rows_to_one_length(self, sequences: torch.Tensor, synced_gpus: bool) -> int:
        columns, device, width = max(self.cache.lengths), sequences.device, sequences.shape[1]
        while any_goes_on(min(self.cache.lengths) == columns, synced_gpus, device):
            if min(self.cache.lengths) == columns:  # another process's rows are uneven, and it waits for this forward
                self.verify(root_only(sequences[:, -1]))
                continue
            missing = [columns - length for length in self.cache.lengths]
            block = min(max(missing), CATCH_UP_BLOCK)
            starts = torch.tensor([width - 1 - gap for gap in missing], device=device)[:, None]  # [B, 1]
            order = torch.arange(block, device=device)  # [block]
            tokens = sequences.gather(1, (starts + order).clamp(max=width - 1))  # [B, block]
            self.verify(chain_of(tokens))
            self.commit([range(min(gap, block)) for gap in missing])
        return columns


def _at(states: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """States [B, n, f] at nodes [B, m] -> [B, m, f]"""
    return states.gather(1, nodes[..., None].expand(-1, -1, states.shape[2]))


def takes_positions(target: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(target.forward).parameters
