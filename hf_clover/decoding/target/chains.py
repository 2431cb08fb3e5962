"""The target's side of a step where it cannot verify a tree: one chain of drafts, over the target's own cache.

Contract: `ChainRun` is a `Run` of chains, with rows in lockstep. Every forward is one that plain generate could make,
over several tokens in place of one, with the masks and positions of plain generate. There are two ways to take back
rejected tokens:

- The cache is cropped, where it can be.
- A recurrent state cannot be cropped, so a forward runs on a copy of the cache (`copied`). If a draft was rejected,
  the copy is dropped. The next forward then runs the tokens accepted since (`replayed` of them), followed by the new
  chain. So a rejected draft costs some positions, but never a forward. If all drafts were accepted, the next forward
  uses the copy, and nothing is replayed. A target without any cache replays its whole text, as in plain generate.

A caller's cache is not touched before `hand_back`.

Shapes: B batch, T prompt columns, n nodes of the chain with the root, d hidden size, V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from ...targets.private_api import cache_name, inputs_after, inputs_of_step, makes_inputs_itself
from ..cache.by_row import Slots
from ..graphs import filled
from ..processes import any_goes_on
from ..tree import Tree, root_only
from .base import Run
from .one_by_one import one_by_one

MOST_REPLAYED = 24  # accepted tokens that may wait to be run again; then a step without drafts settles them


class ChainRun(Run):
    shape = "chain"

    def __init__(
        self,
        target: PreTrainedModel,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        replays: bool,
        steps: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> None:
        """`replays`: rejected tokens are taken back by a copy of the cache, not by cropping it. `steps`: recurrent
        layers take tokens one by one."""
        super().__init__(target, config, model_kwargs, feature_layers)
        self.replays, self.steps = replays, steps
        self.cache = Slots()  # rows' lengths that the target's cache holds, or is to hold
        self._ids: torch.Tensor  # [B, L] the settled text
        self._inputs: dict[str, Any]  # what plain generate would pass on for that text
        self._left = 0  # tokens that may still be emitted
        self._staged: tuple[torch.Tensor, Any, int] | None = None  # a chain that is not committed: tokens, outputs, n
        self._is_stepping = False

    # ------------------------------------------------------------------ forwards

    def prefill(self, input_ids: torch.Tensor, limit: int) -> torch.Tensor:
        cache, given = self.theirs, dict(self.model_kwargs)
        if isinstance(cache, DynamicCache):
            given[cache_name()] = copied(cache)
        outputs = self._read_prompt(input_ids, given)
        (batch, length), mask = self.hidden.shape[:2], given.get("attention_mask")
        columns = length if mask is None else mask.shape[1]
        positions = given.get("position_ids")
        if positions is None:  # such a target counts columns, and the drafter does the same
            positions = torch.arange(columns, device=input_ids.device).expand(batch, -1)  # [B, T]
        self.model_kwargs["position_ids"] = positions
        last = positions.reshape(-1, *positions.shape[-2:])[0][:, -1:]  # [B, 1]
        self.root_position, self._last_kept = last, 1
        self.cache.lengths = [columns] * batch
        self._ids, self._left = input_ids, limit - input_ids.shape[1] - 1
        self._inputs = inputs_after(self.target, outputs, given)
        names = set(outputs.keys())  # looking names up would make transformers warn of old ones
        self._name = next((name for name in (cache_name(), "cache_params", "state") if name in names), "")
        self._has_cache = self._name != "" and self._inputs.get(self._name) is not None
        if not self._has_cache:
            self.replays = True
        elif not self.replays:
            self._inputs[self._name].activate_past_recording()
        return outputs.logits[:, -1:]

    def verify(self, tree: Tree) -> torch.Tensor:
        """Logits [B, n, V] of the chain's nodes, each the child of the one before."""
        self._take_back()
        if self.steps and not self._is_stepping:
            self._open.enter_context(one_by_one(self.target))
            self._is_stepping = True
        size = tree.size
        width = min(size, max(self._left, 1))  # no position beyond the answer's last, since no walk reaches it
        tokens = tree.tokens[:, :width].to(self._ids.device)
        inputs = dict(self._inputs)
        if self.replays and self._has_cache:
            inputs[self._name] = copied(inputs[self._name])
        inputs = _as_of(self.target, inputs, width - 1)
        ids = torch.cat((self._ids, tokens), dim=1)
        fed = self.replayed + width if self._has_cache else None
        self._captured.clear()
        outputs = self.target(**inputs_of_step(self.target, ids, inputs, fed, width), return_dict=True)
        self._staged = tokens, outputs, width
        self.hidden = filled(self._take_hidden()[:, -width:], size, 1)
        return filled(outputs.logits[:, -width:], size, 1)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the first nodes of the chain, the same number in each row."""
        kept = len(paths[0])
        if self._staged is None:
            raise RuntimeError("there is nothing to keep: call `verify` before `commit`.")
        tokens, outputs, width = self._staged
        if not self.replays:
            self._inputs[self._name].crop(kept - width)
        elif kept == width and self._has_cache:
            self._inputs[self._name], self.replayed = outputs[self._name], 0
        elif self._has_cache:
            self.replayed += kept
        self.must_settle = self.replayed >= MOST_REPLAYED
        self._staged = None
        self.root_position, self._last_kept = self.root_position + self._last_kept, kept
        self._inputs = _as_of(self.target, self._inputs, kept)
        self._ids = torch.cat((self._ids, tokens[:, :kept]), dim=1)
        self._left -= kept
        self.cache.lengths = [length + kept for length in self.cache.lengths]

    def _take_back(self) -> None:
        """Drop a chain that was not committed."""
        if self._staged is not None and not self.replays:
            self._inputs[self._name].crop(-self._staged[2])
        self._staged = None

    # ------------------------------------------------------------------ the cache that plain generate can continue

    def bring_rows_to_one_length(self, sequences: torch.Tensor, synced_gpus: bool) -> int:
        """Rows have one length already: run the tokens that the cache does not hold yet. Returns its columns."""
        self._take_back()
        while any_goes_on(self.replayed == 0, synced_gpus, sequences.device):
            if self.replayed == 0:  # another process has something to replay, and waits for this forward
                self.verify(root_only(sequences[:, -1]))
                continue
            inputs = inputs_of_step(self.target, self._ids, _cut(self._inputs, 1), self.replayed, 1)
            self._inputs[self._name] = self.target(**inputs, return_dict=True)[self._name]
            self.replayed = 0
        return max(self.cache.lengths)

    def hand_back(self, columns: int) -> Any:
        """The cache of the settled text, in the user's own object if there is one."""
        self._take_back()
        if not self._has_cache:
            return None
        cache, theirs = self._inputs[self._name], self.theirs
        for layer in () if self.replays else cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False
        if not isinstance(theirs, DynamicCache):
            return cache
        if isinstance(cache, DynamicCache):  # and not a state of another kind, which leaves theirs unchanged
            theirs.__dict__.update(cache.__dict__)
        return theirs


def _as_of(target: PreTrainedModel, inputs: dict[str, Any], new: int) -> dict[str, Any]:
    """`inputs` as plain generate has them `new` tokens later."""
    inputs = dict(inputs)
    one_by_one = inputs.get("token_type_ids") is not None or makes_inputs_itself(target)
    for count in [1] * new if one_by_one else [new] if new else []:
        inputs = inputs_after(target, {}, inputs, count)
    return inputs


def _cut(inputs: dict[str, Any], columns: int) -> dict[str, Any]:
    """`inputs` as they were a few tokens before."""
    names = [name for name in ("attention_mask", "position_ids", "token_type_ids") if inputs.get(name) is not None]
    return {**inputs, **{name: inputs[name][..., :-columns] for name in names}}


def copied(value: Any) -> Any:
    """A copy of a cache that may be written to without changing `value`. Keys and values are shared, since growing
    layers make new tensors. States are copied, since they are written in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(part) for part in value)
    if isinstance(value, Cache):
        new = copy.copy(value)
        new.__dict__ |= {name: copied(part) for name, part in vars(value).items() if name != "layers"}
        new.layers = [_copied_layer(layer) for layer in value.layers]
        return new
    return copy.deepcopy(value) if type(value).__module__.startswith("transformers.") else value


def _copied_layer(layer: Any) -> Any:
    new = copy.copy(layer)
    for name, part in vars(layer).items():
        if name not in ("keys", "values"):
            setattr(new, name, copied(part))
    return new
