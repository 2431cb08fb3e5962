"""What all rivals share: how they are made, what they borrow of the target, and their way into `generate`.

Contract: `RivalHeads` is `CloverHeads` with another network. `admitted()` lets `generate` draft with each rival's own
`generator` and read the target with its own `run`; heads of the library pass through it unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

from torch import nn
from transformers import PreTrainedModel

from hf_clover import CloverConfig, CloverHeads, CloverTrainer
from hf_clover.decoding import entry, heads_run, loop
from hf_clover.decoding.drafting import CloverDrafter
from hf_clover.decoding.target_run import TargetRun
from hf_clover.training.teacher import Teacher


class RivalHeads(CloverHeads):
    name: ClassVar[str]
    fields: ClassVar[dict[str, Any]]  # of `CloverConfig`: what the library reads of it, sizes, and the paper's loss
    generator: ClassVar[type[CloverDrafter]] = CloverDrafter
    run: ClassVar[type[TargetRun]] = TargetRun
    teacher: ClassVar[type[Teacher]] = Teacher
    trainer: ClassVar[type[CloverTrainer]] = CloverTrainer
    _auto_class = None  # a rival is no remote code

    def build(self, config: CloverConfig) -> None:
        """Make the layers."""
        raise NotImplementedError

    @classmethod
    def from_target(cls, target: PreTrainedModel, **fields: Any) -> "RivalHeads":
        """Tokens are rows of the target's input embedding, as all these papers take them. Parts that heads of the
        library have too, under the same names, start as theirs do."""
        fields = {"variant": "clover-2", "token_embedding": "input", **cls.fields, **fields}
        ours = CloverHeads.from_target(target, **fields)
        config = ours.config
        config.initializer_range = (3 * config.hidden_size) ** -0.5  # torch's own for a linear layer
        heads = cls(config)
        heads.load_state_dict(ours.state_dict(), strict=False)
        return heads.to(device=ours.device, dtype=ours.dtype).bind(target)


@contextmanager
def admitted() -> Iterator[None]:
    """Within, `generate` takes rivals too."""
    speculate = entry.speculate

    def with_their_own(target: PreTrainedModel, heads: CloverHeads, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(heads, RivalHeads):
            return speculate(target, heads, *args, **kwargs)
        generation_config = args[1].config
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"`cache_implementation={generation_config.cache_implementation!r}`: rivals draft with growing caches "
                "only. Leave it at None."
            )
        with (
            mock.patch.object(heads_run, "pays", return_value=False),  # graphs of drafts are the library's heads' own
            mock.patch.object(heads_run, "CloverDrafter", heads.generator),
            mock.patch.object(loop, "TargetRun", heads.run),
        ):
            return speculate(target, heads, *args, **kwargs)

    with mock.patch.object(entry, "speculate", with_their_own):
        yield


def linear(inputs: int, outputs: int, bias: bool, start: str) -> nn.Linear:
    """A linear layer that starts as `CloverHeads._init_weights` reads it: "zero" or "gaussian identity"."""
    made = nn.Linear(inputs, outputs, bias=bias)
    made.start = start
    return made
