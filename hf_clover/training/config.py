"""The training arguments.

Contract: `CloverTrainingConfig` is trl's `SFTConfig` with defaults that suit heads and the few fields that only heads
have. Options of SFT that heads cannot use are refused here, by name and with the way out, before anything is loaded.
This module does not know models or data.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..network.packing import multiplies_bfloat16_fast
from . import require_extra
from .losses import TOKEN_LOSSES

try:
    from trl import SFTConfig
except ModuleNotFoundError:
    require_extra()
    raise


@dataclass
class CloverTrainingConfig(SFTConfig):
    r"""
    Configuration of the [`CloverTrainer`]: trl's `SFTConfig` and the fields that heads add. The fields listed here are
    new, or have another default; for the rest see [`~trl.SFTConfig`] and [`~transformers.TrainingArguments`].

    Args:
        model_init_kwargs (`dict[str, Any]`, *optional*):
            If the trainer makes the heads: the arguments of [`CloverHeads.from_target`], that is `variant` and any
            field of [`CloverConfig`]. If it loads them from a path: the arguments of `from_pretrained`.
        teacher_model_name_or_path (`str`, *optional*):
            The target to make heads for, used by the training script. In Python pass `teacher_model` to the trainer.
        teacher_model_init_kwargs (`dict[str, Any]`, *optional*):
            Keyword arguments for [`~transformers.AutoModelForCausalLM.from_pretrained`] when the target is given by
            its name. The target is loaded in its own dtype unless `dtype` says otherwise.
        draft_vocab_size (`int`, *optional*):
            Number of ids that the heads score: the most frequent ones of the training set. A small number makes
            drafting cheaper if the vocabulary is large. The ids are stored with the heads.
        loss_type (`str`, *optional*):
            Loss of each head; defaults to the one in the heads' config. `"clover-2"`: SmoothL1 to the target's state
            plus soft cross-entropy, as in the paper. `"clover"`: soft cross-entropy. `"kl"`: soft cross-entropy minus
            the target's entropy, so that 0 is perfect. `"acceptance"`: the negative log of the probability that a
            token sampled from the head is accepted.
        loss_decay (`float`, *optional*):
            Head i has the weight `loss_decay ** i`. Defaults to the value in the heads' config (0.7).
        hidden_loss_weight (`float`, *optional*):
            Weight of the SmoothL1 term. Defaults to the value in the heads' config; to 0 with a `loss_type` other than
            `"clover-2"`.
        token_loss_weight (`float`, *optional*):
            Weight of the loss term for tokens. Defaults to the value in the heads' config.
        label_mask (`bool`, *optional*, defaults to `False`):
            The paper's label mask: a head's prediction counts only if every token it was fed was inside the target's
            top-64 and top-p 0.8. Means are still over all labelled positions, so that a batch gives the same gradient
            in one piece and in several.
        muon_learning_rate (`float`, *optional*):
            Muon trains the matrices at this rate, whatever their sizes; AdamW trains everything else at
            `learning_rate`. With 0, AdamW trains everything. Defaults to 0.02 for heads of the variant `"clover-x"`,
            and to more in runs of fewer than 400 steps (0.04 in 100). Defaults to 0 for the papers' variants, for
            adapters, under FSDP and DeepSpeed, and if `optim` is given. Muon needs torch 2.9.
        weight_decay (`float`, *optional*):
            Weight decay of the matrices. Defaults to 0.1 with Muon, and to 0 without.
        precompute_targets (`bool`, *optional*, defaults to `False`):
            Whether to run the target once over the training set, keep its hidden states on disk in bfloat16, and train
            from these. This saves time in several epochs, or in several runs over the same data.
        precompute_dir (`str`, *optional*):
            Folder of these hidden states. Defaults to `target_states` inside `output_dir`. An interrupted pass is
            continued, and a finished one is used again.
        learning_rate (`float`, *optional*, defaults to 1e-3):
            Learning rate of AdamW.
        adam_beta2 (`float`, *optional*, defaults to 0.95):
            Beta2 of AdamW.
        max_grad_norm (`float`, *optional*, defaults to 0.5):
            Largest norm of the gradient; a larger gradient is scaled down to it.
        warmup_steps (`float`, *optional*, defaults to 0.02):
            Steps of linear warm-up; a number below 1 is a share of all steps.
        max_length (`int`, *optional*, defaults to 2048):
            Largest number of tokens in a sequence; longer ones are cut.
        gradient_checkpointing (`bool`, *optional*):
            Refused: heads are a few layers at most.
        label_smoothing_factor (`float`, *optional*, defaults to 0.0):
            Refused: the labels are the target's distribution already.
        neftune_noise_alpha (`float`, *optional*):
            Refused: heads have no input embedding of their own.
        use_liger_kernel (`bool`, *optional*, defaults to `False`):
            Refused: the loss works in chunks already.
        router_aux_loss_coef (`float`, *optional*):
            Refused: the target is frozen, so its router learns nothing.

    Without an accelerator, `use_cpu` is set, and `bf16` is on only if the processor has instructions for bfloat16.

    Example:

    ```python
    >>> from hf_clover import CloverTrainingConfig

    >>> args = CloverTrainingConfig("my-heads", model_init_kwargs={"variant": "clover-2"}, draft_vocab_size=8192)
    >>> args.learning_rate, args.max_length
    (0.001, 2048)
    ```
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    if TYPE_CHECKING:  # `__post_init__` fills these in
        output_dir: str = ""
        bf16: bool = True

    # Parameters whose default values are overridden from SFTConfig
    learning_rate: float = field(default=1e-3, metadata={"help": "The initial learning rate for AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 for the AdamW optimizer."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Maximum norm of the gradient."})
    warmup_steps: float = field(
        default=0.02, metadata={"help": "Steps of linear warm-up; a number below 1 is a share of all steps."}
    )
    max_length: int | None = field(default=2048, metadata={"help": "Longer sequences are truncated to this length."})
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Not available for heads."}
    )
    label_smoothing_factor: float = field(default=0.0, metadata={"help": "Not available for heads."})
    neftune_noise_alpha: float | None = field(default=None, metadata={"help": "Not available for heads."})
    use_liger_kernel: bool = field(default=False, metadata={"help": "Not available for heads."})
    router_aux_loss_coef: float | None = field(default=None, metadata={"help": "Not available for heads."})
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "`variant` and fields of `CloverConfig` for new heads, or keyword arguments of `from_pretrained` "
            "if the heads are loaded from a path."
        },
    )

    # Parameters that control the target
    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "The target to make heads for (a Hub id or a folder)."}
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Keyword arguments for `AutoModelForCausalLM.from_pretrained` when loading the target."},
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Let the heads score only this many of the training set's most frequent ids."}
    )

    # Parameters that control the loss
    loss_type: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "The loss. Default: the heads' config.", "choices": list(TOKEN_LOSSES)}
    )
    loss_decay: float | None = field(
        default=None, metadata={"help": "Head i has the weight `loss_decay ** i`. Default: the heads' config (0.7)."}
    )
    hidden_loss_weight: float | None = field(
        default=None, metadata={"help": "Weight of the SmoothL1 term. Default: the heads' config."}
    )
    token_loss_weight: float | None = field(
        default=None, metadata={"help": "Weight of the token term. Default: the heads' config."}
    )
    label_mask: bool = field(
        default=False,
        metadata={"help": "Count a prediction only while every token fed to the head was likely for the target."},
    )

    # Parameters that control the steps
    muon_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Train matrices with Muon at this rate; 0: with AdamW. Default: the heads' variant decides."
        },
    )

    weight_decay: float | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Weight decay of the matrices. Default: 0.1 with Muon, and 0 without."}
    )

    # Parameters that control the target's pass
    precompute_targets: bool = field(
        default=False, metadata={"help": "Keep the target's hidden states on disk and train from there."}
    )
    precompute_dir: str | None = field(
        default=None, metadata={"help": "Folder of these states. Default: `target_states` in the output directory."}
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True  # transformers trains in bfloat16 on a CPU only if this is set
            if self.bf16 is None and not self.fp16:
                self.bf16 = multiplies_bfloat16_fast(torch.device("cpu"))
        super().__post_init__()
        known = self.loss_type is None or self.loss_type in TOKEN_LOSSES
        self._require("loss_type", known, f"must be one of {list(TOKEN_LOSSES)}")
        self._require(
            "loss_decay", self.loss_decay is None or 0 <= self.loss_decay <= 1, "must be a number from 0 to 1"
        )
        for name in ("hidden_loss_weight", "token_loss_weight", "muon_learning_rate"):
            self._require(name, (getattr(self, name) or 0) >= 0, "must not be negative")
        self._require(
            "draft_vocab_size", self.draft_vocab_size is None or self.draft_vocab_size > 0, "must be positive"
        )
        self._refuse_what_heads_cannot_use()

    def _require(self, name: str, condition: bool, reason: str) -> None:
        if not condition:
            raise ValueError(f"CloverTrainingConfig: `{name}={getattr(self, name)!r}` {reason}.")

    def _refuse_what_heads_cannot_use(self) -> None:
        refused = {
            "gradient_checkpointing": "saves nothing, since heads are a few layers at most: leave it off",
            "label_smoothing_factor": "does not apply: the labels are the target's distribution already",
            "neftune_noise_alpha": "does not apply: heads have no input embedding of their own",
            "use_liger_kernel": "does not apply: the loss works in chunks already",
            "router_aux_loss_coef": "does not apply: the target is frozen, so its router learns nothing",
        }
        for name, reason in refused.items():
            self._require(name, not getattr(self, name), reason)
        self._require(
            "packing_strategy",
            not self.packing or self.packing_strategy != "wrapped",
            "lets documents see each other: use 'bfd' or 'bfd_split'",
        )
        template = self.chat_template_path
        self._require(
            "chat_template_path",
            template is None or template.endswith((".jinja", ".j2")),
            "must be a .jinja file: another model's tokens cannot be added to a frozen target",
        )


__all__ = ["CloverTrainingConfig"]
