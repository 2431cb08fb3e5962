"""Callbacks of training: a measurement by real generation, lines on the screen, and a clean stop on Ctrl-C.

Contract: `AcceptanceCallback` knows `generate(assistant_model=heads)` and its report, `StopOnInterrupt` knows signals,
`KeepSpecialTokens` knows two configs, `OneLine` and `Bar` know the names of logged figures. All act through
transformers' callback events, and none knows losses or data.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import reduce
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from ..measure.prompts import prompt_ids
from ..measure.step_record import StepRecord
from ..network.target_parts import special_tokens_of, unwrap
from .data import prompt_of, prompts_of

if TYPE_CHECKING:
    from .config import CloverTrainingConfig
    from .trainer import CloverTrainer

logger = logging.get_logger(__name__)

SAMPLES = 1000  # most samples that are searched for prompts
NODES = 24  # nodes of a tree, if the heads' own `generation_config` leaves the number open
SLOW = 20.0  # seconds; after a longer first step on a CPU, a line names settings that make steps faster
OPEN, CLOSE = "⟦", "⟧"  # around drafted tokens that the target accepted


class AcceptanceCallback(TrainerCallback):
    """
    A [`~transformers.TrainerCallback`] that measures generation with the heads. It generates from a few prompts, with
    the heads and without, and logs `eval_tokens_per_forward`, `eval_speedup` and `eval_efficiency` (the second over
    the first). It shows one of the samples, with the accepted tokens in ⟦brackets⟧. Every tree has the number of nodes
    in the heads' `generation_config`, or 24, so that the first figure depends on the heads and not on the machine.

    The three figures are also among the evaluation's metrics, so transformers can keep the best checkpoint by them:
    `metric_for_best_model="tokens_per_forward"` with `load_best_model_at_end=True`.

    Args:
        trainer ([`CloverTrainer`]):
            Trainer to which the callback will be attached.
        prompts (list of texts, of lists of messages, or of lists of token ids, *optional*):
            Prompts to continue. By default they are taken from the trainer's evaluation dataset, as a user would send
            them: `prompt`, or the messages before the first answer, through the chat template. If samples are text or
            token ids, a prompt is the tokens before the first label. If all tokens have labels, it is the first
            quarter, with a warning. Prompts of more than `args.max_length` tokens are left out.
        num_prompts (`int`, *optional*, defaults to `8`):
            The number of prompts to generate from.
        max_new_tokens (`int`, *optional*, defaults to `64`):
            The number of tokens to generate from each prompt.
        freq (`int`, *optional*):
            The number of steps between measurements. If not provided, the callback measures at each evaluation.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from hf_clover import AcceptanceCallback, CloverTrainer, CloverTrainingConfig

    >>> dataset = load_dataset("trl-lib/Capybara")
    >>> trainer = CloverTrainer(
    ...     teacher_model="Qwen/Qwen3-0.6B",
    ...     args=CloverTrainingConfig("my-heads", report_to="none"),
    ...     train_dataset=dataset["train"],
    ...     eval_dataset=dataset["test"],
    ... )
    >>> trainer.add_callback(AcceptanceCallback(trainer, max_new_tokens=8))
    >>> trainer.evaluate()["eval_tokens_per_forward"] >= 1
    True
    ```
    """

    def __init__(
        self,
        trainer: "CloverTrainer",
        prompts: Sequence[str] | Sequence[list[dict[str, str]]] | Sequence[list[int]] | None = None,
        num_prompts: int = 8,
        max_new_tokens: int = 64,
        freq: int | None = None,
    ) -> None:
        if trainer.teacher.is_sharded:
            raise ValueError(
                "AcceptanceCallback cannot generate with a target in shards (FSDP, ZeRO stage 3): leave the callback "
                "out and measure the saved heads afterwards."
            )
        self.trainer, self.max_new_tokens, self.freq = trainer, max_new_tokens, freq
        if prompts is None:
            sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
            name, dataset = next(iter(sets.items()))
            if dataset is None:
                raise ValueError("AcceptanceCallback has nothing to continue: pass `prompts`, or an `eval_dataset`.")
            sent = self._as_sent(trainer.untokenized.get(name, ()))
            self.prompts = list(islice(sent, num_prompts)) or prompts_of(dataset, num_prompts)
        else:
            self.prompts = [self._token_ids(prompt) for prompt in prompts[:num_prompts]]
        self._measured_at, self._measured = -1, dict[str, float]()

    def _as_sent(self, samples: Iterable[dict[str, Any]]) -> Iterator[list[int]]:
        trainer = self.trainer
        for sample in islice(samples, SAMPLES):
            prompt, tools = prompt_of(sample), sample.get("tools")
            if prompt is not None:
                options = {
                    "chat_template": trainer.chat_template,
                    "tools": json.loads(tools) if isinstance(tools, str) else tools,
                    **(sample.get("chat_template_kwargs") or {}),
                }
                ids = prompt_ids(trainer.processing_class, prompt, **options)
                if trainer.args.max_length is None or len(ids) <= trainer.args.max_length:
                    yield ids

    def _token_ids(self, prompt: Any) -> list[int]:
        is_text = isinstance(prompt, str) or isinstance(prompt[0], dict)
        return prompt_ids(self.trainer.processing_class, prompt) if is_text else list(prompt)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.freq is None:
            measured = self._measure_once(state.global_step)
            if metrics is not None:
                metrics.update(measured)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.freq is not None and state.global_step % self.freq == 0:
            self._measure_once(state.global_step)

    def _measure_once(self, step: int) -> dict[str, float]:
        """Measure at most once per step: an evaluation of several datasets calls this once for each dataset."""
        if step != self._measured_at:
            measured, sample = self.measure()
            self._measured_at, self._measured = step, {f"eval_{name}": value for name, value in measured.items()}
            trainer, control = self.trainer, self.trainer.control
            was_training, should_log = trainer.model.training, control.should_log
            trainer.model.eval()  # so that the log line is one of evaluation
            trainer.log(dict(self._measured))
            trainer.model.train(was_training)
            control.should_log = should_log  # the training's own line is still to come
            if trainer.accelerator.is_main_process:
                tokens = f"{measured['tokens_per_forward']:.2f} tokens per forward by generate"
                tqdm.write(f"Step {step}, {tokens}. A sample:\n{sample}")
        return self._measured

    @torch.no_grad()
    def measure(self) -> tuple[dict[str, float], str]:
        """Generate from all prompts, in every process.

        Returns:
            `tuple[dict[str, float], str]`: the three figures, and one sample with its accepted tokens marked
        """
        trainer, heads = self.trainer, self.trainer.heads
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            self._generate(self.prompts[0], None, max_new_tokens=8)  # the device's one-time work is not timed
            self._generate(self.prompts[0], heads, max_new_tokens=8)
            plain, drafted = [], []
            for prompt in self.prompts:
                plain.append(self._generate(prompt, None, self.max_new_tokens))
                drafted.append(self._generate(prompt, heads, self.max_new_tokens))
        finally:
            trainer.model.train(was_training)
        tokens = sum(len(record.tokens) for record, _ in drafted)
        tokens_per_forward = tokens / max(sum(forwards for _, forwards in drafted), 1)
        # The two runs of a prompt may differ by a token, so tokens per second are compared.
        plain_speed = sum(len(record.tokens) for record, _ in plain) / sum(record.seconds for record, _ in plain)
        speedup = tokens / sum(record.seconds for record, _ in drafted) / max(plain_speed, 1e-9)
        metrics = {
            "tokens_per_forward": tokens_per_forward,
            "speedup": speedup,
            "efficiency": speedup / max(tokens_per_forward, 1e-9),
        }
        return metrics, self._marked(self.prompts[0], drafted[0][0].steps)

    def _generate(self, prompt: list[int], heads: Any, max_new_tokens: int) -> tuple[StepRecord, int]:
        """The text, and the number of the target's forwards if heads drafted it."""
        target = unwrap(self.trainer.teacher.model).eval()
        input_ids = torch.tensor([prompt], device=self.trainer.accelerator.device)
        # The automatic number of nodes depends on the machine's speed; this figure must depend only on the heads.
        nodes = None if heads is None else heads.generation_config.num_assistant_tokens or NODES
        record = StepRecord()
        out = record.generate(
            target,
            {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)},
            heads,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            **({} if nodes is None else {"num_assistant_tokens": nodes}),
            pad_token_id=self.trainer.processing_class.pad_token_id,
        )
        return record, 0 if heads is None else out.speculation.target_forwards

    def _marked(self, prompt: list[int], steps: list[list[int]]) -> str:
        """The sample's text with accepted tokens in brackets: in each step, all tokens but the last were drafted, and
        the last is the target's own."""
        decode: Any = self.trainer.processing_class.decode  # returns a list of texts only for a batch
        ids = list(prompt)
        text = decode(ids)
        for step in steps:
            for part, (before, after) in ((step[:-1], (OPEN, CLOSE)), (step[-1:], ("", ""))):
                if part:
                    known = decode(ids)
                    ids += part
                    text += before + decode(ids)[len(known) :] + after
        return text


class KeepSpecialTokens(TrainerCallback):
    """Restores the special tokens in the heads' config to the target's. The trainer replaces them by the tokenizer's
    when it starts; then a pipeline would take target and heads for models with different tokenizers.

    Args:
        target (`PreTrainedModel`):
            The model that has the special tokens.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        unwrap(model).config.update(special_tokens_of(self.target))


class Bar(ProgressCallback):
    """transformers' progress bar, without the dictionary of all figures that it writes above the bar."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class OneLine(TrainerCallback):
    """Shows the main figures of each log in one line; all figures are in the log. After a slow first step on a CPU, it
    names settings that make steps faster."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began, self.first_step = time.perf_counter(), state.global_step
        self.tokens = next((line["num_tokens"] for line in state.log_history[::-1] if "num_tokens" in line), 0.0)
        self.since: float | None = None  # when the first step after the last log began

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.since is None:
            self.since = time.perf_counter()

    def on_step_end(
        self,
        args: "CloverTrainingConfig",  # type: ignore[override]  # no other trainer has this callback
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        seconds = time.perf_counter() - self.began
        is_first = state.global_step == self.first_step + 1 and state.is_world_process_zero
        if not is_first or seconds < SLOW or args.device.type != "cpu":
            return
        smaller = {
            "--per_device_train_batch_size 2": args.per_device_train_batch_size > 2,
            "--max_length 256": args.max_length is None or args.max_length > 256,
            "--draft_vocab_size 4096": args.draft_vocab_size is None,
        }
        if any(smaller.values()):
            said = " ".join(option for option, helps in smaller.items() if helps)
            tqdm.write(f"The first step took {_in_words(seconds)}. On a CPU smaller ones are quicker: {said}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        prefix = "eval_" if "eval_loss" in logs else ""
        if not state.is_world_process_zero or f"{prefix}loss" not in logs:
            return
        said = [f"loss {logs[f'{prefix}loss']:.3f}"]
        if (length := logs.get(f"{prefix}acceptance_length/top1")) is not None:
            said.append(f"{length:.2f} tokens per forward")
        if not prefix and self.since is not None:
            now, done = time.perf_counter(), state.global_step - self.first_step
            said.append(f"{(logs.get('num_tokens', 0) - self.tokens) / (now - self.since):,.0f} tokens/s")
            said.append(f"{_in_words((now - self.began) / done * (state.max_steps - state.global_step))} to go")
            self.tokens, self.since = logs.get("num_tokens", 0), None
        what = ", evaluated" if prefix else ""
        tqdm.write(f"Step {state.global_step} of {state.max_steps}{what}: {', '.join(said)}")


def _in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class StopOnInterrupt(TrainerCallback):
    """Stops training on Ctrl-C: after the current step it writes a checkpoint and returns from `train`. A line says so
    at once. A second Ctrl-C stops in the middle of a step."""

    def __init__(self) -> None:
        self.is_requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.is_requested = False
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            yield
            return
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, *_: Any) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        # Not by `print`: the signal may have interrupted another `print`.
        os.write(2, b"\nCtrl-C: training ends after this step, with a checkpoint. Once more ends it now.\n")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_requested = self.is_requested
        if args.world_size > 1:  # the signal reaches the processes at different steps
            is_requested = bool(reduce(torch.tensor(int(is_requested), device=args.device), reduction="sum"))
        if is_requested:
            logger.warning(f"Interrupted: training ends after step {state.global_step}, with a checkpoint.")
            control.should_save = control.should_training_stop = True


__all__ = ["AcceptanceCallback", "Bar", "KeepSpecialTokens", "OneLine", "StopOnInterrupt"]
