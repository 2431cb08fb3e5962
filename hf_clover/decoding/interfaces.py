"""What the parts of a step ask of each other, where more than one class can answer.

Contract: protocols, and no code. Each says what `loop.py` and `heads_run.py` use of one part, and no more. A class
need not name its protocol: it has these members, and mypy compares them where an object of it is handed over.

- `Run`, the target's side of a call: `target_run.TargetRun` verifies trees, `chain.ChainRun` chains.
- `Budget`, how many nodes a tree gets: `budget.FixedBudget`, `budget.AutomaticBudget`, and `ranks.SharedBudget`,
  which is one of these where several processes must agree.
- `Drafter`, the heads' side, which `heads.new_drafter` gives: `drafting.CloverDrafter` for Clover's heads,
  `path_drafting.PathDrafter` for EAGLE's, and in their place where the device has graphs those of `graph_drafting`.
  Whoever adds heads of another kind gives them a `new_drafter`.

Shapes: B running rows, T prompt columns, n tree nodes, m new positions at most, k copied tokens, f numbers of a state
as the heads read it, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.cache_utils import Cache

    from ..network.configuration_heads import HeadsConfig
    from ..network.modeling_heads import DraftHeads
    from .foresight import Foresight
    from .tree import Tree

Held = TypeVar("Held")


class HoldsText(Protocol):
    """What is known of the target's cache, whatever kind of cache it is."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each running row that the cache holds, or is to hold."""


class Run(Protocol):
    """The target in one call of `generate`: the prompt, then for each step one forward (`verify`) and what is kept of
    it (`commit`)."""

    target: "PreTrainedModel"
    generation_config: "GenerationConfig"
    model_kwargs: dict[str, Any]  # the prompt's inputs; from `prefill` on with its `position_ids` [..., B, T]
    theirs: Any  # the cache that came with the call: the user's, or a new one that plain generate would use
    known_columns: int  # of an earlier turn, which `theirs` held when the call began
    shape: str | None  # of the drafts that it can verify: "chain", or None for any tree
    # [B, n, f] of the last forward, as the heads read it (`capture_states`); from `commit` on walked nodes come first
    hidden: torch.Tensor
    walked: torch.Tensor | None  # [B, 3, n] what the last forward's own walk found (`walk_in_tensors`), if it walks
    prompt_mask: torch.Tensor | None  # [B, T] bool, None where every column is a token
    root_position: torch.Tensor  # [B, 1] of the tree that was committed last
    in_graphs: bool  # its forward over a tree is a graph, of one of few sizes

    @property
    def is_warm(self) -> bool:
        """Whether the last forward took the time that the next one of its size will take."""

    @property
    def cache(self) -> HoldsText:
        """The target's cache, as far as others look at it."""

    @property
    def has_the_users_cache(self) -> bool:
        """Whether `theirs` is the user's, who goes on with it in a next turn."""

    @property
    def keeps_cache(self) -> bool:
        """Whether somebody will see the cache when the text is over."""

    @property
    def replayed(self) -> int:
        """Settled tokens that the next forward takes again, because the cache does not hold them."""

    @property
    def must_settle(self) -> bool:
        """Whether the next step should have no drafts, so that nothing need be replayed after it."""

    @property
    def can_drop_rows(self) -> bool:
        """Whether `keep_rows` may be called."""

    def open(self) -> AbstractContextManager[object]:
        """Everything else happens inside this block, after which the target is as it was."""

    def hold(self, context: AbstractContextManager[Held]) -> Held:
        """Enters `context` for as long as this run is open."""

    def prefill(self, input_ids: torch.Tensor, limit: int) -> torch.Tensor:
        """The prompt, as plain generate does it -> logits [B, 1, V] of its last token. `limit`: the text's length."""

    def verify(self, tree: "Tree") -> torch.Tensor:
        """Logits [B, n, V] of every node, each as if its path were the text. Nothing is kept before `commit`."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the walked nodes of each running row; the root is the first of them."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these running rows only, in this order."""

    def bring_rows_to_one_length(self, sequences: torch.Tensor, synced_gpus: bool) -> int:
        """The text is over: the cache gets what it lacks of `sequences` [B, L] without the last token. Returns the
        number of its columns."""

    def hand_back(self, columns: int) -> Any:
        """The first `columns` as a cache that plain generate can continue: the user's own, or a new one; None where
        the target keeps none."""


class Budget(Protocol):
    """How many nodes a tree gets. What a budget says changes time, never tokens."""

    in_graphs: bool  # what it is asked about runs in graphs: there are few sizes, and costs of their own

    @property
    def most_nodes(self) -> int:
        """That any tree will have, without its root."""

    def ask(self, lengths: Sequence[int], replayed: int = 0, copies: torch.Tensor | None = None) -> tuple[int, int]:
        """Before a draft: how many nodes the heads shall draft, and how many copied tokens are to be verified in a
        step without them. `lengths`: of the texts of the unfinished rows; `replayed`: settled tokens that this step's
        forward takes again; `copies` [rows, k]: joint log-probabilities of what is copied."""

    def cut(self, tree: "Tree", rows: Sequence[int], lengths: Sequence[int]) -> "Tree":
        """After it: the part of `tree` that is worth verifying. `rows`: the unfinished ones among those of the tree;
        `lengths`: of their texts."""

    def learn(
        self, tree: "Tree", paths: Sequence[Sequence[int]], draft_seconds: float, forward_seconds: float
    ) -> None:
        """After the walk: which nodes each unfinished row walked, and what the step took."""


class Drafter(Protocol):
    """The heads in one call: they take in what is settled, and draft from there."""

    @property
    def heads(self) -> "DraftHeads":
        """That it runs: the user's, or on a CPU the copy that `drafting_copy` makes of them."""

    @property
    def config(self) -> "HeadsConfig":
        """Theirs."""

    prompt_mask: torch.Tensor | None  # [B, T] bool, False where the prompt is padding
    is_broken: bool  # the heads gave NaN: nothing is drafted any more

    @property
    def is_warm(self) -> bool:
        """Whether the last draft took the time that the next one of its size will take."""

    @property
    def rows(self) -> int:
        """That it drafts for; 0 before it has taken in a text."""

    def extend(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """Take in, per row, the first `counts[row]` of the new positions: hidden [B, m, f], the tokens after them
        [B, m] and the positions [B, m] of the hidden states."""

    def draft(self, nodes: int, shape: str | None = None, foresight: "Foresight | None" = None) -> "Tree":
        """A tree of `nodes` nodes below the last tokens; its root alone where `nodes` is 0. `shape`: None for the
        config's; `foresight`: what the next tokens will be picked with."""

    def with_path(self, tree: "Tree", tokens: torch.Tensor, log_probs: torch.Tensor, nodes: int) -> "Tree":
        """The best `nodes` of a tree and of one path, as `tree.with_path` joins them."""

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""

    def remember(self, cache: "Cache", columns: int) -> None:
        """The text is over: the next turn may go on from here, if it comes with this cache at this length."""
