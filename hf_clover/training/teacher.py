"""The frozen target, as training uses it.

Contract: a `Teacher` runs a target under `torch.no_grad()` and returns what heads learn from: hidden states before and
after the final norm, and logits. It never changes a weight of the target. With several processes, each has a whole
target, or all share one in shards, with FSDP version 2 or DeepSpeed's ZeRO stage 3. This module does not know
datasets, optimizers or trainers.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)
from transformers.utils import logging

from ..network.modeling_heads import DraftHeads
from ..network.target_parts import find_decoder, gather_rows, is_plain, token_table, unwrap, whole
from ..targets.hidden_states import BEFORE_NORM, capture_states, read_by
from ..targets.loading import gguf_file_of, load_target
from .losses import LossTerms, head_losses

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .config import CloverTrainingConfig

logger = logging.get_logger(__name__)


class Teacher:
    """A target and the heads that borrow from it.

    Args:
        model: the target: a transformers model, which may be quantised or wrapped by PEFT.
        heads: the heads to train. They are bound to the target, which raises if they were made for another one.
    """

    def __init__(self, model: nn.Module, heads: DraftHeads) -> None:
        self.model, self.heads = model, heads
        self.is_sharded = False
        heads.bind(model)
        accepted = inspect.signature(unwrap(model).forward).parameters
        self._last_logit_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def state_size(self) -> int:
        """Number of numbers per token in the result of `hidden_states`."""
        return (len(self.heads.feature_layers) + 1) * self.heads.config.target_width

    def place(self, accelerator: "Accelerator") -> None:
        """Move the target to the device, in shards if FSDP or ZeRO stage 3 is on."""
        from accelerate.utils import DistributedType  # imported here: learning in use needs no accelerate

        if accelerator.distributed_type == DistributedType.FSDP:
            self.shard()
        elif shards_by_deepspeed(accelerator):
            from trl.models import prepare_deepspeed  # imported here: a training loop of one's own needs no trl

            self.model = prepare_deepspeed(self.model, accelerator)
            self._lend_whole()
        elif not hasattr(self.model, "hf_device_map"):  # with a device map, as for quantised models, it is placed
            self.model.to(accelerator.device)
        self.refresh_draft_vocabulary()

    def shard(self) -> None:
        """Shard the target layer by layer with FSDP version 2, on the default process group. The parts that heads
        borrow stay whole."""
        from torch.distributed.fsdp import fully_shard

        _, layers, _ = find_decoder(unwrap(self.model))
        for layer in layers or ():
            fully_shard(layer)
        fully_shard(self.model)
        self._lend_whole()

    def _lend_whole(self) -> None:
        borrowed = self.heads.borrowed
        borrowed.lm_head, borrowed.norm = whole(borrowed.lm_head), whole(borrowed.norm)
        table = token_table(self.heads.config, unwrap(self.model), borrowed.lm_head)
        borrowed.embedding = borrowed.embedding if table is None else table
        self.is_sharded = True

    def refresh_draft_vocabulary(self) -> None:
        """Read lm_head's rows of the draft vocabulary again, after lm_head or the vocabulary has moved or changed."""
        if self.heads.config.draft_vocab_size is not None:
            self.heads.borrowed.draft_rows = gather_rows(self.heads.borrowed.lm_head, self.heads.draft_ids)

    def draftable(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """[...] -> [...]: whether the heads can draft each token; None if they can draft all."""
        has_all = self.heads.config.draft_vocab_size is None
        return None if has_all else torch.isin(input_ids, self.heads.draft_ids)

    @torch.no_grad()
    def hidden_states(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """A batch of the collator -> the hidden states before the final norm [B, T, d]. If the heads read other
        layers, the states of these come first: [B, T, (a + 1) d]."""
        captured: list[torch.Tensor] = []
        layers, model = (*self.heads.feature_layers, BEFORE_NORM), unwrap(self.model)
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "hidden_states")}
        self.model.eval()
        with capture_states(model, captured, layers):
            self.model(**inputs, use_cache=False, **self._last_logit_only)
        return captured[-1].to(inputs["input_ids"].device)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The part of `hidden_states`' result that the heads read."""
        return read_by(self.heads, hidden_states)

    @torch.no_grad()
    def final_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The input of lm_head [..., d], from the result of `hidden_states`."""
        norm, hidden_states = self.heads.borrowed.norm, hidden_states[..., -self.heads.config.target_width :]
        return norm(hidden_states.to(next(norm.parameters(), hidden_states).dtype))

    @torch.no_grad()
    def score(self, final_states: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., V]: the target's logits."""
        borrowed = self.heads.borrowed
        weight = getattr(borrowed.lm_head, "weight", None)
        dtype = weight.dtype if is_plain(weight) else final_states.dtype
        return borrowed.scale(borrowed.lm_head(final_states.to(dtype)))

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Within this block, borrowed parts take no gradient, even if other code trains them."""
        borrowed = self.heads.borrowed
        parameters = [borrowed.embedding, *borrowed.lm_head.parameters(), *borrowed.norm.parameters()]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)

    def charge(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        hidden_states: torch.Tensor,
        final_states: torch.Tensor,
        mask: torch.Tensor,
        computing: AbstractContextManager[Any],
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Run the heads over a batch: their output, and the sums [K] and ranks [K, B, T] of `head_losses`.

        Args:
            model: the heads, with any wrapper that training puts around them.
            inputs: a batch of the collator.
            hidden_states: [B, T + 1, ...], the result of `hidden_states`.
            final_states: [B, T + 1, d], the result of `final_states`.
            mask: [K, B, T], which predictions count.
            computing: the context in which scores are computed, such as autocast.
        """
        input_ids, padding, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        assert input_ids is not None
        with self.lending():
            outputs = model(
                hidden_states=self.features(hidden_states)[:, :-1],
                input_ids=input_ids[:, 1:],
                attention_mask=None if padding is None else padding[:, :-1],
                position_ids=None if positions is None else positions[:, :-1],
            )
        with computing:
            losses = head_losses(outputs.head_outputs, final_states, mask, self.loss_terms, self.draftable(input_ids))
        return outputs, *losses

    @property
    def loss_terms(self) -> LossTerms:
        """The loss of a position, as the heads' config says."""
        config = self.heads.config
        return LossTerms(
            score=self.heads.score,
            target_score=self.heads.target_score,
            vocab_size=config.draft_vocab_size or config.vocab_size,
            token_loss=config.loss_type,
            hidden_weight=config.hidden_loss_weight,
            token_weight=config.token_loss_weight,
        )

    def check_keeps_documents_apart(self, collator: Any, device: torch.device) -> None:
        """Raise if a packed document sees the one before it: run two packed documents, and the second one alone."""
        most = self.heads.config.vocab_size
        first, second = ([1 + i % (most - 1) for i in ids] for ids in (range(7), range(7, 15)))
        examples = [{"input_ids": first, "labels": first}, {"input_ids": second, "labels": second}]
        packed, alone = (
            self.hidden_states(to_device(collator(batch), device))[0, -len(second) :].float()
            for batch in (examples, examples[1:])
        )
        difference = ((packed - alone).norm() / alone.norm()).item()
        if difference > 0.05:  # rounding alone gives 1e-6 in float32 and about 1e-2 in bfloat16
            raise ValueError(
                f"`packing=True` does not work with the target `{type(unwrap(self.model)).__name__}` and its "
                f"attention: a packed document sees the one before it (its hidden states differ by {difference:.0%}). "
                "Set `packing=False`, or load the target with another `attn_implementation`."
            )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, target: nn.Module) -> None:
    """Raise if `tokenizer` is certainly not the target's."""
    model = unwrap(target)
    vocabulary, name = tokenizer.get_vocab(), getattr(model.config, "name_or_path", None)
    if gguf_file_of(model) is not None and name == tokenizer.name_or_path:
        return  # transformers may have added a token that has no row in the file, and that no text contains
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    highest = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[highest] >= rows:
        raise ValueError(
            f"`processing_class` is not the target's tokenizer: it gives {highest!r} the id {vocabulary[highest]}, "
            f"and the target has {rows} token embeddings. Pass the tokenizer that belongs to {name or 'the target'}."
        )
    if not name or name == tokenizer.name_or_path:
        return
    try:
        own = AutoTokenizer.from_pretrained(name).get_vocab()
    except (OSError, ValueError):  # a target without a tokenizer beside it: nothing to compare with
        return
    shared = own.keys() & vocabulary.keys()
    moved = next((token for token in sorted(shared) if own[token] != vocabulary[token]), None)
    if moved is not None or len(shared) < 0.9 * len(own):
        example = f"{moved!r} is {vocabulary[moved]} in it and {own[moved]} in the target's" if moved else ""
        raise ValueError(
            f"`processing_class` is not the target's tokenizer: {len(shared)} of the {len(own)} tokens of "
            f"{name} are in it{'; ' if example else ''}{example}. Leave `processing_class` out to use the target's."
        )


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def shards_by_deepspeed(accelerator: "Accelerator") -> bool:
    from accelerate.utils import DistributedType

    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return is_deepspeed and accelerator.state.deepspeed_plugin.zero_stage == 3


@contextmanager
def loading_whole(args: TrainingArguments) -> Iterator[None]:
    """Within this block transformers loads models whole under ZeRO stage 3 too. By itself it would load them in
    shards, from which no heads can be made. They are divided afterwards."""
    if not is_deepspeed_zero3_enabled():
        yield
        return
    plugin: Any = args.deepspeed_plugin
    config = getattr(args, "hf_deepspeed_config", None) or plugin.dschf
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def load_teacher(name: str, args: "CloverTrainingConfig") -> PreTrainedModel:
    given: Any = args.teacher_model_init_kwargs or {}  # text is parsed by now
    options = {"dtype": "auto", **given}
    with loading_whole(args):
        return load_target(name, **options)


__all__ = ["Teacher", "check_tokenizer", "load_teacher", "loading_whole", "to_device"]
