"""The target's side of a call of `generate`: the common base of `trees.TargetRun`, which verifies trees, and
`chains.ChainRun`, which verifies chains.

Contract: `prefill` reads the prompt. Then each step runs one forward (`verify`) and keeps a part of it (`commit`). All
calls are inside the block of `open`; after the block, the target is as it was.

Shapes: B running rows, T prompt columns, n tree nodes, f numbers of a state as the heads read it, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...targets.hidden_states import capture_states
from ...targets.private_api import as_for_decoding, cache_name, is_the_users, read_prompt
from ..tree import Tree


class Run:
    shape: str | None = None  # the shape of drafts that it can verify: "chain", or None for any tree
    cache: Any  # the target's cache; others read its `lengths`: tokens per row that it holds, or is to hold
    # [B, n, f] states of the last forward, as the heads read them; from `commit` on, the walked nodes come first
    hidden: torch.Tensor
    walked: torch.Tensor | None = None  # [B, 3, n] result of the last forward's own walk (`walk_in_tensors`)
    prompt_mask: torch.Tensor | None = None  # [B, T] bool, None where every column is a token
    root_position: torch.Tensor  # [B, 1] position of the root of the tree that was committed last
    replayed = 0  # settled tokens that the next forward runs again, because the cache does not hold them
    must_settle = False  # whether the next step should have no drafts, so that nothing has to be replayed after it
    is_warm = True  # whether the last forward took the time that the next one of its size will take

    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
    ) -> None:
        """`feature_layers`: the layers whose states the heads read, as `capture_states` takes them."""
        self.target, self.generation_config = target, generation_config
        self.feature_layers = tuple(feature_layers)
        self.model_kwargs = dict(model_kwargs)  # of the prompt; from `prefill` on with `position_ids` [..., B, T]
        self.theirs: Any = self.model_kwargs.pop(cache_name(), None)  # the user's, or one as plain generate makes
        self.known_columns = _columns(self.theirs)  # columns of an earlier turn
        mask = self.model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            self.prompt_mask = mask.bool()
        self._captured: list[torch.Tensor] = []
        self._open = ExitStack()

    @contextmanager
    def open(self) -> Iterator[Self]:
        with self._open:
            self._open.enter_context(capture_states(self.target, self._captured, self.feature_layers))
            self._open.enter_context(as_for_decoding(self.target))
            yield self

    def at_end(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` when this run closes."""
        self._open.callback(function, *arguments)

    def _read_prompt(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """The target's outputs for the prompt. `kwargs` are changed in place, as plain generate changes them."""
        self._captured.clear()
        outputs = read_prompt(self.target, input_ids, self.generation_config, kwargs)
        self.hidden = self._take_hidden()
        return outputs

    def _take_hidden(self) -> torch.Tensor:
        return self._captured[0] if len(self._captured) == 1 else torch.cat(self._captured, dim=1)

    @property
    def has_the_users_cache(self) -> bool:
        """Whether `theirs` is the user's own cache, which a next turn may continue."""
        return is_the_users(self.theirs)

    @property
    def keeps_cache(self) -> bool:
        """Whether the caller gets the cache when the text is over."""
        return self.generation_config.return_dict_in_generate or self.has_the_users_cache

    @property
    def can_drop_rows(self) -> bool:
        """Whether `keep_rows` may be called."""
        return False

    # ------------------------------------------------------------------ what each kind does in its own way

    def prefill(self, input_ids: torch.Tensor, limit: int) -> torch.Tensor:
        """Read the prompt as plain generate does -> logits [B, 1, V] of its last token. `limit`: the text's greatest
        length."""
        raise NotImplementedError

    def verify(self, tree: Tree) -> torch.Tensor:
        """Logits [B, n, V] of every node, computed as if the node's path were the text. Nothing is kept before
        `commit`."""
        raise NotImplementedError

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the walked nodes of each running row; the root is the first of them."""
        raise NotImplementedError

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep these running rows only, in this order."""
        raise NotImplementedError("rows of a chain go in lockstep: all of them stay to the end.")

    def bring_rows_to_one_length(self, sequences: torch.Tensor, synced_gpus: bool) -> int:
        """The text is over: add to the cache what it lacks of `sequences` [B, L] without the last token. Rows that
        ended early are padded as plain generate pads them. Returns the number of the cache's columns."""
        raise NotImplementedError

    def hand_back(self, columns: int) -> Any:
        """The first `columns` as a cache that plain generate can continue: the user's own, or a new one; None where
        the target keeps none."""
        raise NotImplementedError


def _columns(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # there is no cache, or it keeps only states, which have no length
        return 0
