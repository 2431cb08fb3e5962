"""The trainer: trl's `SFTTrainer`, with heads as the model and their target as a frozen teacher.

Contract: data, devices, checkpoints and logs are handled by `SFTTrainer`; this module replaces the model, the loss and
the metrics. The teacher runs once per batch (or once for all, with `precompute_targets`) and is never changed. Losses
are in `losses`, and running the target is in `teacher`. This module does not know generation.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import CommitInfo
from torch import nn
from transformers import (
    DataCollator,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging
from trl import SFTTrainer

from ..hub.push import asking_the_hub, push_folder, write_card, write_results
from ..network.modeling_heads import DraftHeads
from ..network.target_parts import unwrap
from ..targets.loading import gguf_file_of, load_tokenizer
from ..targets.private_api import require
from .arguments import (
    as_sft,
    check_optimizer,
    check_parallelism,
    checked_teacher,
    follow_recipe,
    for_heads,
    make_heads,
    name_of,
    refuse_arguments,
)
from .callbacks import Bar, KeepSpecialTokens, OneLine, StopOnInterrupt
from .config import CloverTrainingConfig
from .data import (
    check_columns,
    check_lengths,
    count_tokens,
    drop_short_samples,
    most_frequent,
    set_draft_vocabulary,
    share_covered,
)
from .losses import (
    count_hits,
    fed_tokens_mask,
    prediction_mask,
    tokens_inside_nucleus,
    weighted_loss,
)
from .metrics import HeadMetrics
from .optimizers import muon_rate
from .precompute import TargetStatesCollator, precompute_targets
from .report import results_of
from .storage import WholeCheckpoints
from .teacher import Teacher, check_tokenizer, load_teacher

logger = logging.get_logger(__name__)

# Private methods of SFTTrainer that are overridden below. If trl renamed one, our version would silently not run.
require(
    SFTTrainer, ("_prepare_dataset", "_set_signature_columns_if_needed", "_load_from_checkpoint", "_save_checkpoint")
)


class CloverTrainer(WholeCheckpoints, SFTTrainer):
    """
    Trainer that distils Clover heads from a frozen target: trl's `SFTTrainer` with another model and another loss.

    Args:
        model (`CloverHeads`, [`~peft.PeftModel`] of one, or `str`, *optional*):
            The heads to train: an instance, or an id or path to load with `args.model_init_kwargs`. If `None`, new
            heads are made by [`CloverHeads.from_target`] with the arguments in `args.model_init_kwargs`. Heads are
            trained in float32; with `args.bf16` (on by default), products that allow it are computed in bfloat16.
        teacher_model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The target: an instance, which may be quantised or have an adapter, or an id or path to load with
            `args.teacher_model_init_kwargs`. Its weights are not changed.
        args ([`CloverTrainingConfig`], *optional*):
            Configuration for this trainer.
        data_collator (`DataCollator`, *optional*):
            As for [`~trl.SFTTrainer`].
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            As for [`~trl.SFTTrainer`], with all its formats.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or a dictionary of them, *optional*):
            As for [`~trl.SFTTrainer`], with all its formats.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The target's tokenizer. If `None`, it is loaded by the target's name.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            As for [`~trl.SFTTrainer`].
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            As for [`~trl.SFTTrainer`].
        optimizer_cls_and_kwargs (`tuple`, *optional*):
            As for [`~trl.SFTTrainer`].
        peft_config ([`~peft.PeftConfig`], *optional*):
            The configuration of an adapter, which is trained in place of the heads, for example to fit published heads
            to a fine-tuned target. `target_modules` defaults to all linear layers.
        formatting_func (`Callable`, *optional*):
            As for [`~trl.SFTTrainer`].
        refused:
            Other arguments of [`~trl.SFTTrainer`] have no meaning for heads, and are refused by name.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from hf_clover import CloverTrainer, CloverTrainingConfig

    >>> trainer = CloverTrainer(
    ...     teacher_model="Qwen/Qwen3-0.6B",
    ...     args=CloverTrainingConfig("my-heads", max_steps=2, report_to="none"),
    ...     train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    ... )
    >>> trainer.train().global_step
    2
    ```
    """

    args: CloverTrainingConfig
    model: nn.Module
    processing_class: PreTrainedTokenizerBase

    _tag_names = ["trl"]
    _name = "Clover"
    loss_is_scaled_for_ga = True  # type: ignore[assignment]  # `compute_loss` divides by the positions of the whole accumulated batch

    def __init__(
        self,
        model: "DraftHeads | nn.Module | str | None" = None,
        teacher_model: "PreTrainedModel | nn.Module | str | None" = None,
        args: CloverTrainingConfig | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        peft_config: Any | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        **refused: Any,
    ) -> None:
        refuse_arguments(refused)
        teacher_model = checked_teacher(teacher_model, model)
        args = args or CloverTrainingConfig(f"{name_of(teacher_model).split('/')[-1]}-Clover")
        if not isinstance(args, CloverTrainingConfig):
            raise TypeError(f"`args` must be a `CloverTrainingConfig`, not a `{type(args).__name__}`.")
        if isinstance(teacher_model, str):
            teacher_model = load_teacher(teacher_model, args)
        elif args.teacher_model_init_kwargs is not None:
            logger.warning("`teacher_model_init_kwargs` is ignored, since `teacher_model` is already instantiated.")
        set_seed(args.seed)
        model = make_heads(model, teacher_model, args)
        self.teacher = Teacher(teacher_model, cast(DraftHeads, unwrap(model)))
        if processing_class is None:
            gguf_file = gguf_file_of(unwrap(teacher_model))
            processing_class = load_tokenizer(
                name_of(teacher_model), gguf_file, trust_remote_code=args.trust_remote_code
            )
        check_tokenizer(processing_class, teacher_model)
        check_optimizer(optimizers[0], teacher_model)
        given = optimizers[0] if optimizers[0] is not None else optimizer_cls_and_kwargs
        optimizer_cls_and_kwargs = follow_recipe(args, self.heads, peft_config, given) or optimizer_cls_and_kwargs
        if peft_config is not None:
            peft_config = for_heads(peft_config, args)
        self._stop_on_interrupt = StopOnInterrupt()
        self.untokenized: dict[str, Dataset | IterableDataset] = {}  # by "eval", or by the names of several datasets

        with as_sft(args):
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=[*(callbacks or ()), KeepSpecialTokens(unwrap(teacher_model)), self._stop_on_interrupt],
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                peft_config=peft_config,
                formatting_func=formatting_func,
            )
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(Bar)
        self.add_callback(OneLine)
        vars(self.heads).pop("forward", None)  # removes SFTTrainer's patch for causal language models
        check_parallelism(self.accelerator)
        self._head_metrics = {mode: HeadMetrics(self.heads.config.num_heads) for mode in ("train", "eval")}
        if args.draft_vocab_size is not None:
            self._choose_draft_vocabulary(args.draft_vocab_size)
        self.teacher.place(self.accelerator)
        self._write_down_loss_weights()
        if self.padding_free:
            self.teacher.check_keeps_documents_apart(self.data_collator, self.accelerator.device)
        if args.precompute_targets:
            if self.teacher.is_sharded:
                raise ValueError(
                    "`precompute_targets=True` cannot run a target in shards: precompute in one process, without "
                    "FSDP or ZeRO, with `device_map='auto'` in `teacher_model_init_kwargs` where one device is too "
                    "small, and train from that `precompute_dir` afterwards."
                )
            self.train_dataset = precompute_targets(
                self.teacher,
                self.train_dataset,
                self.data_collator,
                folder=args.precompute_dir or os.path.join(args.output_dir, "target_states"),
                batch_size=args.per_device_train_batch_size,
                accelerator=self.accelerator,
            )
            self.data_collator = TargetStatesCollator(self.data_collator, self.teacher.state_size)

    @property
    def heads(self) -> DraftHeads:
        """The heads, without the wrappers of PEFT or accelerate."""
        return self.teacher.heads

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the last `train`."""
        return self._stop_on_interrupt.is_requested

    # ------------------------------------------------------------------ before training

    def _choose_draft_vocabulary(self, size: int) -> None:
        config = self.heads.config
        if not size <= config.vocab_size:
            raise ValueError(
                f"`draft_vocab_size={size}` is more than the target has: it must be at most {config.vocab_size}."
            )
        counts = count_tokens(self.train_dataset, config.vocab_size)
        ids = most_frequent(counts, size)
        set_draft_vocabulary(self.heads, ids)
        if self.accelerator.is_main_process:
            logger.warning(
                f"The draft vocabulary of {size} ids covers {share_covered(counts, ids):.2%} of the "
                f"{int(counts.sum()):,} tokens to predict. Other ids are never drafted; only the target emits them."
            )

    def _write_down_loss_weights(self) -> None:
        """Copy the loss weights of the arguments to the heads' config, so that it says how the heads were trained."""
        self.heads.config.loss_type = cast(str, self.args.loss_type)  # `follow_recipe` has set it
        for name in ("loss_decay", "hidden_loss_weight", "token_loss_weight"):
            if getattr(self.args, name) is not None:
                setattr(self.heads.config, name, float(getattr(self.args, name)))

    def _computing(self) -> torch.autocast:
        """The context for scores with lm_head, which are most of a step's products: autocast, if the heads use it."""
        return torch.autocast(self.heads.device.type, torch.bfloat16, enabled=self.args.bf16)

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        _, training_args, packing, formatting_func, name = args
        check_columns(dataset, name, training_args.dataset_text_field, formatting_func)
        if name != "train":
            self.untokenized.setdefault(name, dataset)
        dataset = super()._prepare_dataset(dataset, *args)
        if not packing:
            dataset = drop_short_samples(dataset)
        check_lengths(dataset, name, self.heads.config.num_heads)
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns
        if columns is not None and "hidden_states" not in columns:
            columns.append("hidden_states")

    # ------------------------------------------------------------------ training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. Ctrl-C ends it after the current step, with a checkpoint."""
        with self._stop_on_interrupt.listening():
            return super().train(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As `Trainer.create_scheduler`. It also sets Muon's rate, which depends on the number of steps."""
        if self.args.muon_learning_rate is None:
            self.args.muon_learning_rate = muon_rate(num_training_steps)
            own: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            own.set_muon_rate(self.args.muon_learning_rate)
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)
        self.teacher.refresh_draft_vocabulary()

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The batches of one update, and the number of predictions per head [K] that they hold over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        num_heads = self.heads.config.num_heads
        counts = torch.zeros(num_heads, dtype=torch.long, device=device)  # [K]
        for batch in batches:
            counts += prediction_mask(batch["labels"], batch.get("position_ids"), num_heads).sum((1, 2)).to(device)
        if self.args.average_tokens_across_devices:
            counts = self.accelerator.reduce(counts, reduction="sum")
        if not batches and self.state.global_step == 0:
            raise ValueError("`train_dataset` gave no sample that is long enough to learn from.")
        return batches, counts

    def compute_loss(  # type: ignore[override]  # `num_items_in_batch` has one number per head [K]
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        mode, config = "train" if self.model.training else "eval", self.heads.config
        input_ids, labels, position_ids = inputs["input_ids"], inputs["labels"], inputs.get("position_ids")
        padding = inputs.get("attention_mask")  # [B, T + 1]
        hidden_states = inputs.get("hidden_states")  # [B, T + 1, ...], as `Teacher.hidden_states` returns them
        if hidden_states is None:
            hidden_states = self.teacher.hidden_states(inputs)
        final_states = self.teacher.final_states(hidden_states)  # [B, T + 1, d]

        mask = prediction_mask(labels, position_ids, config.num_heads)  # [K, B, T]
        counts = mask.sum((1, 2))  # [K]
        if self.args.label_mask:
            inside = tokens_inside_nucleus(final_states, input_ids, self.teacher.score, config.vocab_size)  # [B, T]
            mask &= fed_tokens_mask(inside, config.num_heads)
        outputs, sums, ranks = self.teacher.charge(  # [K], [K, B, T]
            model, inputs, hidden_states, final_states, mask, self._computing()
        )
        loss = weighted_loss(sums, counts if num_items_in_batch is None else num_items_in_batch, config.loss_decay)
        if not torch.isfinite(loss):
            self._raise_not_finite(sums, hidden_states)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the gradient is averaged over processes

        num_tokens = torch.tensor(input_ids.numel(), device=sums.device) if padding is None else padding.sum()
        self._head_metrics[mode].update(sums, counts, count_hits(ranks, mask), num_tokens)
        return (loss, outputs) if return_outputs else loss

    def _raise_not_finite(self, sums: torch.Tensor, hidden_states: torch.Tensor) -> None:
        if not torch.isfinite(hidden_states).all():
            reason = "the target's own hidden states are not finite: load it in bfloat16 or float32"
        else:
            bad = [head for head, total in enumerate(sums.tolist()) if total != total or abs(total) == float("inf")]
            reason = f"the loss of heads {bad} is not finite: lower `learning_rate`, or use `bf16` instead of `fp16`"
        raise FloatingPointError(f"Training stopped at step {self.state.global_step}: {reason}.")

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """The loss only: heads return no logits."""
        return super().prediction_step(model, inputs, True, ignore_keys)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        metrics, num_tokens = self._head_metrics[mode].compute(self.accelerator)
        self._head_metrics[mode].reset()
        if mode == "train":
            if not self._total_train_tokens:  # begin with the logged tokens of the run that this one resumes
                before = (line["num_tokens"] for line in reversed(self.state.log_history) if "num_tokens" in line)
                self._total_train_tokens = int(next(before, 0))
            self._total_train_tokens += num_tokens
        if self.is_over and "train_runtime" in logs:
            return  # no step was made
        if metrics:
            metrics["num_tokens"] = float(self._total_train_tokens)
        self._metrics[mode].update({name: [value] for name, value in metrics.items()})
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, torch.Tensor | Any]) -> int:
        """Operations of the heads; those of the frozen target are not counted."""
        return 6 * inputs["input_ids"].numel() * sum(parameter.numel() for parameter in self.heads.parameters())

    def create_model_card(  # type: ignore[override]  # trl gives it these arguments
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write the results so far, and a model card with them, to `args.output_dir`."""
        if not self.is_world_process_zero():
            return
        about = self._about(dataset_name, tags)
        write_results(self.args.output_dir, **about.pop("results"))
        write_card(self.args.output_dir, repo_id=self.hub_model_id or model_name, **about)

    def _about(self, dataset_name: str | None = None, tags: str | list[str] | None = None) -> dict[str, Any]:
        """The contents of a model card: the heads, the results and the tags."""
        given = [tags] if isinstance(tags, str) else list(tags or ())
        results = results_of(self.args, self.state, self._total_train_tokens, dataset_name)
        return {"heads": self.heads, "results": results, "tags": sorted({*self._tag_names, *given})}

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As `Trainer.init_hf_repo`. If the Hub does not answer, the error says so in a sentence."""
        with asking_the_hub("The repository of `hub_model_id` could not be made."):
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(  # type: ignore[override]  # all processes but the first return None
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> CommitInfo | None:
        """As `Trainer.push_to_hub`: save the heads (or the adapter) and push them with their card, results and code to
        `args.hub_model_id`, in one commit. Card and results in `args.output_dir` change only after a successful push.
        `blocking` is always true.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        folder = os.path.abspath(self.args.output_dir)
        commit = push_folder(
            folder,
            self.hub_model_id or self.args.hub_model_id or model_name or os.path.basename(folder),
            private=self.args.hub_private_repo if private is None else private,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            commit_message=commit_message,
            **self._about(dataset_name, tags),
        )
        self.hub_model_id = commit.repo_url.repo_id  # type: ignore[assignment]  # transformers begins with None
        return commit


__all__ = ["CloverTrainer"]
