"""The target's side of a step: prefill, one forward over a whole tree, and keeping what was walked.

Contract: `TargetRun` owns the target's `TreeCache`, masks and positions for one call of `generate`, and hands out
logits and the hidden states before the final norm. What the target returns for a node is what it returns for that
node's path alone. It changes nothing in the target that outlives its `with` block.

Shapes: B batch, T prompt columns, n tree nodes, d hidden size, V vocabulary.
"""

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..target_parts import find_decoder
from .cache import TreeCache
from .tree import Tree

TREE_ATTENTION = ("sdpa", "eager")  # implementations that take a mask of any shape

# Inputs of the prompt alone, or made anew for every forward: the rest of `model_kwargs` goes into every forward.
_PROMPT_INPUTS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache_position"),
    *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "logits_to_keep", "labels", "use_cache"),
    *("pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw", "video_grid_thw", "input_features"),
    *("pixel_attention_mask", "input_features_mask", "image_embeds", "mm_encoder_outputs", "second_per_grid_ts"),
)


class TargetRun:
    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        capacity: int | None = None,
    ) -> None:
        self.target, self.generation_config, self.model_kwargs = target, generation_config, model_kwargs
        self.text_config = target.config.get_text_config(decoder=True)
        self.num_layers = self.text_config.num_hidden_layers
        self.cache = TreeCache(self.num_layers, capacity)
        self.forward_kwargs = {k: v for k, v in model_kwargs.items() if k not in _PROMPT_INPUTS and v is not None}
        self.hidden: torch.Tensor | None = None  # [B, n, d] of the last forward, before the final norm
        self.prompt_mask: torch.Tensor | None = None  # [B, T] bool, None where every column is a token
        self.next_position: torch.Tensor  # [..., B, 1] of the root of the next tree
        self.last_position: int | None = None  # no node goes beyond, as no token of the answer does
        self._captured: list[torch.Tensor] = []

    @contextmanager
    def open(self) -> Iterator["TargetRun"]:
        with ExitStack() as stack:
            stack.enter_context(capture_before_final_norm(self.target, self._captured))
            optimise = getattr(self.target, "_optimize_model_for_decode", None)
            if optimise is not None:
                stack.enter_context(optimise())
            yield self

    # ------------------------------------------------------------------ forwards

    def prefill(self, input_ids: torch.Tensor, limit: int | None = None) -> torch.Tensor:
        """The prompt, as plain generate does it -> logits [B, 1, V] of its last token. `limit`: the text's length."""
        batch = input_ids.shape[0]
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            self.prompt_mask = mask.bool()
        kwargs = {**self.model_kwargs, "past_key_values": self.cache}
        self._captured.clear()
        outputs = self.target._prefill(input_ids, self.generation_config, kwargs)
        self.cache.finish_filling(batch)
        self.hidden = self._take_hidden()
        positions = kwargs["position_ids"]
        self.next_position = positions[..., -1:].expand(*positions.shape[:-2], batch, 1) + 1
        if limit is not None:
            # The answer's last token is never fed back, so positions end one before it.
            self.last_position = int(self.next_position.max()) + max(limit - input_ids.shape[1] - 2, 0)
        return outputs.logits[:, -1:]

    def verify(self, tree: Tree) -> torch.Tensor:
        """Logits [B, n, V] of every node, each as if its path were the text."""
        tree = tree.to(self.target.device)
        with self.cache.staged(tree.size), attention_for_trees(self.target) as implementation:
            positions = self.next_position + tree.depths  # [..., B, n]
            if self.last_position is not None:
                positions = positions.clamp(max=self.last_position)
            self._captured.clear()
            outputs = self.target(
                input_ids=tree.tokens,
                position_ids=positions,
                attention_mask=self._masks(tree, positions, implementation),
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **self.forward_kwargs,
            )
        self.hidden = self._take_hidden()
        return outputs.logits

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the walked nodes of each row (the prefill's own token is already kept: its path is empty)."""
        self.cache.commit(paths)
        counts = torch.tensor([len(path) for path in paths], device=self.next_position.device)
        self.next_position = self.next_position + counts[:, None]

    def _take_hidden(self) -> torch.Tensor:
        return self._captured[0] if len(self._captured) == 1 else torch.cat(self._captured, dim=1)

    # ------------------------------------------------------------------ masks

    def _masks(self, tree: Tree, positions: torch.Tensor, implementation: str) -> Any:
        """One mask [B, 1, n, columns], or one per layer type where the target's layers differ."""
        visible = self._visible(tree)  # [B, n, columns]
        kinds = getattr(self.text_config, "layer_types", None)
        if kinds is not None:
            return {kind: self._finish(self._narrowed(visible, tree, kind), implementation) for kind in set(kinds)}
        kind = "full_attention"
        if getattr(self.text_config, "sliding_window", None) is not None:
            kind = "sliding_attention"
        elif getattr(self.text_config, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        return self._finish(self._narrowed(visible, tree, kind), implementation)

    def _visible(self, tree: Tree) -> torch.Tensor:
        """[B, n, columns]: the committed text without its padding, and each node's ancestors with itself."""
        lengths, size, device = self.cache.lengths, tree.size, tree.tokens.device
        columns, ancestors = max(lengths) + size, tree.ancestors()
        if min(lengths) == max(lengths):
            visible = torch.ones(len(lengths), size, columns, dtype=torch.bool, device=device)
            visible[:, :, lengths[0] :] = ancestors
        else:
            starts = torch.tensor(lengths, device=device)[:, None]  # [B, 1]
            committed = torch.arange(columns, device=device) < starts  # [B, columns]
            visible = committed[:, None].expand(-1, size, -1).clone()
            slots = starts + torch.arange(size, device=device)  # [B, n]
            visible.scatter_(2, slots[:, None].expand(-1, size, -1), ancestors)
        if self.prompt_mask is not None:
            visible[:, :, : self.prompt_mask.shape[1]] &= self.prompt_mask.to(device)[:, None]
        return visible

    def _narrowed(self, visible: torch.Tensor, tree: Tree, kind: str) -> torch.Tensor:
        """A window counts columns and a chunk tokens, as in transformers; a node stands where its token would."""
        if kind == "full_attention":
            return visible
        device, columns = visible.device, visible.shape[2]
        starts = torch.tensor(self.cache.lengths, device=device)[:, None]  # [B, 1]
        nodes = starts + tree.depths  # [B, n] the column each node's token would have
        slot = torch.arange(columns, device=device).expand(visible.shape[0], -1) - starts  # [B, columns]
        staged = nodes.gather(1, slot.clamp(0, tree.size - 1))  # [B, columns]
        column = torch.where(slot < 0, slot + starts, staged)  # [B, columns] likewise, committed ones as they are
        if kind == "sliding_attention":
            return visible & (nodes[:, :, None] - column[:, None] < self.text_config.sliding_window)
        if kind == "chunked_attention":
            padding = 0 if self.prompt_mask is None else (~self.prompt_mask).sum(1, keepdim=True).to(device)  # [B, 1]
            size = self.text_config.attention_chunk_size
            node_chunk, column_chunk = (nodes - padding) // size, (column - padding) // size
            return visible & (node_chunk[:, :, None] == column_chunk[:, None])
        raise NotImplementedError(f"no tree mask for layers of type {kind!r}")

    def _finish(self, visible: torch.Tensor, implementation: str) -> torch.Tensor:
        mask = visible[:, None]  # [B, 1, n, columns]
        if implementation == "sdpa":
            return mask
        dtype = self.target.dtype  # eager attention adds the mask to the scores
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)

    # ------------------------------------------------------------------ other caches

    def adopt(self, other: Any | None) -> int:
        """Continue from a user's cache; returns the columns it holds."""
        length = 0 if other is None else int(other.get_seq_length())
        if length:
            states = [
                (layer.keys[:, :, :length], layer.values[:, :, :length])
                if getattr(layer, "keys", None) is not None
                else None
                for layer in other.layers
            ]
            self.cache.load([*states, *[None] * (self.num_layers - len(states))], length)
        return length

    def hand_back(self, other: Any | None, length: int) -> Any:
        """The first `length` columns as a cache that plain generate can continue: the user's own, or a new one."""
        cache = other if other is not None else DynamicCache(config=self.text_config)
        if isinstance(cache, DynamicCache):
            # New layers, in the user's object: what `reset` leaves in a dynamic layer differs between versions.
            cache.layers[:] = DynamicCache(config=self.text_config).layers[: self.num_layers]
        else:
            cache.reset()
        for layer_idx in range(self.num_layers):
            states = self.cache.export(layer_idx, length)
            if states is not None:
                cache.update(states[0].clone(), states[1].clone(), layer_idx)
        return cache


@contextmanager
def capture_before_final_norm(target: PreTrainedModel, captured: list[torch.Tensor]) -> Iterator[None]:
    """Appends what goes into the decoder's final norm (or, where there is none, what the decoder returns).

    Other threads may run the same target meanwhile: only this thread's forwards count.
    """
    decoder, _, norm = find_decoder(target)
    thread = threading.get_ident()

    def before_norm(_: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == thread:
            captured.append(args[0] if args else next(iter(kwargs.values())))

    def after_decoder(_: nn.Module, __: tuple, output: Any) -> None:
        if threading.get_ident() == thread:
            captured.append(output[0])

    if norm is not None:
        handle = norm.register_forward_pre_hook(before_norm, with_kwargs=True)
    else:
        handle = decoder.register_forward_hook(after_decoder)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def attention_for_trees(target: PreTrainedModel) -> Iterator[str]:
    """The attention implementation that verifies a tree: the target's own, or sdpa for the length of the block."""
    current = target.config._attn_implementation
    if current in TREE_ATTENTION:
        yield current
        return
    configs = _configs_of(target)
    before = [(config, config._attn_implementation) for config in configs]
    try:
        target.set_attn_implementation("sdpa")
        yield "sdpa"
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def _configs_of(target: nn.Module) -> list[Any]:
    """Every config in the target that names an attention implementation."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if id(config) not in found:
            found[id(config)] = config
            for name in config.sub_configs:
                if getattr(config, name, None) is not None:
                    visit(getattr(config, name))

    for module in target.modules():
        if isinstance(module, PreTrainedModel):
            visit(module.config)
    return list(found.values())


def takes_positions(target: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(target.forward).parameters
