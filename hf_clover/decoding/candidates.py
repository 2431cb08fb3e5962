"""Draft heads for decoding loops that are not ours: transformers' own assisted decoding, or a user's.

Contract: `CloverCandidateGenerator` is a `transformers.generation.CandidateGenerator` that proposes a chain of tokens
for texts of one length. Hooks capture the target's states, so the loop only has to run the target over the tokens that
it was given. The loop verifies the proposals; this class does not.

Shapes: B batch, L tokens of the text, n positions of the last forward, f numbers of a state as the heads read it.
"""

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from ..network.modeling_heads import DraftHeads
from ..network.target_parts import unwrap
from ..targets.hidden_states import capture_states
from .draft.cpu_copy import drafting_copy


class CloverCandidateGenerator(CandidateGenerator):
    """
    Proposes the tokens that draft heads expect, for a decoding loop that verifies a chain.

    Args:
        heads (`DraftHeads`):
            [`CloverHeads`] or heads of another kind, made for `target`.
        target (`PreTrainedModel`):
            The model that the loop runs.
        num_assistant_tokens (`int`, *optional*):
            Tokens in a proposal. By default as many as the heads draft.

    Example:

    ```python
    >>> import torch
    >>> from hf_clover import CloverCandidateGenerator, load_heads
    >>> from transformers import AutoModelForCausalLM

    >>> target = AutoModelForCausalLM.from_pretrained("org/target")
    >>> candidates = CloverCandidateGenerator(load_heads("org/clover-heads", target), target, num_assistant_tokens=4)

    >>> text = torch.tensor([[5, 6, 7, 8]])
    >>> logits = target(text).logits  # of the prompt
    >>> text = torch.cat((text, logits[:, -1:].argmax(-1)), dim=1)
    >>> proposed, _ = candidates.get_candidates(text)
    >>> proposed.shape  # five tokens, and four to be verified
    torch.Size([1, 9])
    ```
    """

    requires_model_outputs = True

    def __init__(self, heads: DraftHeads, target: PreTrainedModel, num_assistant_tokens: int | None = None) -> None:
        heads.bind(target)
        self.heads, self.num_assistant_tokens = heads, num_assistant_tokens or heads.config.draft_depth
        self.model_kwargs_overrides: dict[str, Any] = {}  # asks nothing of the target: hooks capture the states
        self._drafter = heads.new_drafter(drafting_copy(heads, unwrap(target)))
        self._captured: list[torch.Tensor] = []
        self._settled: int | None = None  # positions of the text that the heads have read
        hooks = ExitStack()
        hooks.enter_context(capture_states(unwrap(target), self._captured, heads.feature_layers))
        self.close = weakref.finalize(self, hooks.close)  # removes the hooks, at the latest with this object

    @torch.no_grad()
    def get_candidates(  # type: ignore[override]  # without logits every loop compares tokens
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Propose tokens that may follow the text.

        Args:
            input_ids (`torch.Tensor` of shape `[B, L]`):
                The text. The target has read all its tokens except the last one or more.
            kwargs:
                What transformers' loop passes about the last step. Not used: the length of `input_ids` says the same.

        Returns:
            the text with `k` more tokens, a `torch.Tensor` of shape `[B, L + k]`, and `None` in place of logits.
            Before the target's first forward `k` is 0
        """
        settled = input_ids.shape[1] - 1
        if self._captured:
            hidden = self._captured[0] if len(self._captured) == 1 else torch.cat(self._captured, dim=1)  # [B, n, f]
            self._captured.clear()
            if self._settled is None:  # the prompt
                self._settled = settled - hidden.shape[1]
            new = settled - self._settled  # of the n positions; the others held tokens that were not accepted
            positions = torch.arange(self._settled, settled, device=input_ids.device).expand(len(input_ids), -1)
            self._drafter.extend(hidden[:, :new], input_ids[:, -new:], positions, [new] * len(input_ids))
            self._settled = settled
        if self._settled != settled:
            return input_ids, None
        chain = self._drafter.draft(self.num_assistant_tokens, "chain").tokens[:, 1:]  # [B, k]
        return torch.cat((input_ids, chain.to(input_ids)), dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Does nothing. transformers calls it after each step."""
