"""Draft heads for trainers that generate: GRPO, RLOO, online DPO and others.

Contract: while `SpeculativeRollouts` is open, the trainer's calls of `generate` on its policy use heads. They return
what they would return without heads, so the run has the same results in less time. Nothing else in the trainer
changes, and the policy's own `generate` is restored at the end of the block.
"""

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from transformers.utils import logging

from ..decoding.record import Speculation, speculations
from ..network.modeling_heads import DraftHeads
from .online import OnlineLearner

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.get_logger(__name__)


class SpeculativeRollouts:
    """
    Lets a trl trainer draft its rollouts: `GRPOTrainer`, and any other that calls `generate` on the model it trains.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer whose model generates; it must not use vLLM.
        heads ([`OnlineLearner`] or draft heads):
            The heads that draft. The heads of a learner follow the policy as it changes. Heads without a learner stay
            as they are, and their drafts get worse as the policy changes.

    Example:

    ```python
    >>> from hf_clover import OnlineLearner, SpeculativeRollouts

    >>> learner = OnlineLearner(None, trainer.model, folder="my-heads")  # doctest: +SKIP
    >>> with SpeculativeRollouts(trainer, learner) as rollouts:  # doctest: +SKIP
    ...     trainer.train()
    >>> rollouts.records[-1].tokens_per_forward  # doctest: +SKIP
    2.1
    ```
    """

    def __init__(self, trainer: "Trainer", heads: OnlineLearner | DraftHeads) -> None:
        if not isinstance(heads, OnlineLearner | DraftHeads):
            raise TypeError(
                f"`heads` must be an `OnlineLearner` or draft heads, not a `{type(heads).__name__}`: load heads with "
                "`hf_clover.load_heads(folder, trainer.model)`, or let them learn with "
                "`OnlineLearner(None, trainer.model)`."
            )
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(trainer.args, name, False):
                raise ValueError(
                    f"`{name}=True` generates without the policy's `generate`, so heads have nothing to do: set it to "
                    "False, or leave `SpeculativeRollouts` out."
                )
        self.trainer = trainer
        self.learner = heads if isinstance(heads, OnlineLearner) else None
        self.heads: DraftHeads = heads.heads if isinstance(heads, OnlineLearner) else heads
        self.records: list[Speculation] = []  # one for each call, in order
        self._open = ExitStack()

    def __enter__(self) -> Self:
        policy: nn.Module = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if self.learner is not None:
            self._open.enter_context(self.learner)
        policy.generate = functools.partial(self._generate, policy.generate)  # type: ignore[assignment]
        self._open.callback(policy.__delattr__, "generate")
        self._open.callback(self._say)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)

    def _generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with speculations() as records:
            generated = original(*args, assistant_model=self.heads, **kwargs)
        self.records += records
        return generated

    def _say(self) -> None:
        tokens, forwards = (sum(getattr(r, name) for r in self.records) for name in ("new_tokens", "row_forwards"))
        if forwards:
            logger.info(f"{len(self.records)} rollouts: {tokens / forwards:.2f} tokens per forward.")


__all__ = ["SpeculativeRollouts"]
