"""The target's side of a call of `generate`: what `target_run.TargetRun`, which verifies trees, and `chain.ChainRun`,
which verifies chains, have in common, and what the loop and the heads ask of either.

Contract: the prompt (`prefill`), then for each step one forward (`verify`) and what is kept of it (`commit`), all
inside the block of `open`, after which the target is as it was.

Shapes: B running rows, T prompt columns, n tree nodes, f numbers of a state as the heads read it, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...targets.hidden_states import capture_states
from ...targets.private_api import as_for_decoding, cache_name, is_the_users
from ..tree import Tree

Held = TypeVar("Held")


class Run:
    shape: str | None = None  # of the drafts that it can verify: "chain", or None for any tree
    in_graphs = False  # its forward over a tree is a graph, of one of few sizes
    cache: Any  # the target's, of which others look at `lengths`: tokens of each row that it holds, or is to hold
    # [B, n, f] of the last forward, as the heads read it; from `commit` on, the walked nodes come first
    hidden: torch.Tensor
    walked: torch.Tensor | None = None  # [B, 3, n] what the last forward's own walk found (`walk_in_tensors`)
    prompt_mask: torch.Tensor | None = None  # [B, T] bool, None where every column is a token
    root_position: torch.Tensor  # [B, 1] of the tree that was committed last

    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
    ) -> None:
        """`feature_layers`: whose states the heads read, as `capture_states` takes them."""
        self.target, self.generation_config = target, generation_config
        self.feature_layers = tuple(feature_layers)
        self.model_kwargs = dict(model_kwargs)  # the prompt's; from `prefill` on with its `position_ids` [..., B, T]
        self.theirs: Any = self.model_kwargs.pop(cache_name(), None)  # the user's, or a new one that plain would use
        self.known_columns = _columns(self.theirs)  # of an earlier turn
        self._captured: list[torch.Tensor] = []
        self._open = ExitStack()

    @contextmanager
    def open(self) -> Iterator[Self]:
        with self._open:
            self._open.enter_context(capture_states(self.target, self._captured, self.feature_layers))
            self._open.enter_context(as_for_decoding(self.target))
            yield self

    def hold(self, context: AbstractContextManager[Held]) -> Held:
        """Enters `context` for as long as this run is open."""
        return self._open.enter_context(context)

    def _take_hidden(self) -> torch.Tensor:
        return self._captured[0] if len(self._captured) == 1 else torch.cat(self._captured, dim=1)

    @property
    def is_warm(self) -> bool:
        """Whether the last forward took the time that the next one of its size will take."""
        return True

    @property
    def has_the_users_cache(self) -> bool:
        """Whether `theirs` is the user's, who goes on with it in a next turn."""
        return is_the_users(self.theirs)

    @property
    def keeps_cache(self) -> bool:
        """Whether somebody will see the cache when the text is over."""
        return self.generation_config.return_dict_in_generate or self.has_the_users_cache

    @property
    def replayed(self) -> int:
        """Settled tokens that the next forward takes again, because the cache does not hold them."""
        return 0

    @property
    def must_settle(self) -> bool:
        """Whether the next step should have no drafts, so that nothing need be replayed after it."""
        return False

    @property
    def can_drop_rows(self) -> bool:
        """Whether `keep_rows` may be called."""
        return False

    # ------------------------------------------------------------------ what each does in its way

    def prefill(self, input_ids: torch.Tensor, limit: int) -> torch.Tensor:
        """The prompt, as plain generate does it -> logits [B, 1, V] of its last token. `limit`: the text's length."""
        raise NotImplementedError

    def verify(self, tree: Tree) -> torch.Tensor:
        """Logits [B, n, V] of every node, each as if its path were the text. Nothing is kept before `commit`."""
        raise NotImplementedError

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the walked nodes of each running row; the root is the first of them."""
        raise NotImplementedError

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these running rows only, in this order."""
        raise NotImplementedError("rows of a chain go in lockstep: all of them stay to the end.")

    def bring_rows_to_one_length(self, sequences: torch.Tensor, synced_gpus: bool) -> int:
        """The text is over: the cache gets what it lacks of `sequences` [B, L] without the last token, where rows that
        ended early are padded as plain generate pads them. Returns the number of its columns."""
        raise NotImplementedError

    def hand_back(self, columns: int) -> Any:
        """The first `columns` as a cache that plain generate can continue: the user's own, or a new one; None where
        the target keeps none."""
        raise NotImplementedError


def _columns(cache: Any) -> int:
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # there is none, or it keeps states only, which have no length
        return 0


__all__ = ["Run"]
