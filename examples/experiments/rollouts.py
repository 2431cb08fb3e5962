"""What is speculation worth in online training, where the policy moves at every step?

GRPO on prompts, with a reward for answers in many lines, by trl's own trainer on transformers' `generate`.
Four runs of one seed: plain rollouts, and rollouts drafted by new heads that learn from them, by heads that were
trained for the policy as it began, and by the same heads where they go on learning. All must end with the same
weights, bit for bit. Tokens per forward, seconds of each rollout (learning included) and seconds of each step, over
training steps.

    python examples/experiments/rollouts.py --target TARGET --heads HEADS --prompts PROMPTS.jsonl
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from common import PLAIN, STAND_IN, finish, line, load_target, panel, parse
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_clover import OnlineLearner, SpeculativeRollouts, load_heads
from hf_clover.measure.benchmark import write
from hf_clover.measure.prompts import load_prompts

DEFAULTS = dict(
    heads=str(STAND_IN / "heads"),
    prompts="stand-in",
    num_prompts=160,
    max_new_tokens=64,
    batch_size=8,
    temperature=1.0,
    learning_rate=1e-5,
    share=0.1,
    steps=40,
)
TOY = dict(num_prompts=4, max_new_tokens=8, batch_size=2, steps=2)
LINES = 8  # lines that earn the whole reward
RUNS = ("plain", "new heads that learn", "trained heads that stay", "trained heads that learn")


def line_reward(completions: Sequence[str], **_: Any) -> list[float]:
    """The number of lines that are not empty, as a share of `LINES`."""
    counts = (sum(bool(line.strip()) for line in text.splitlines()) for text in completions)
    return [min(count, LINES) / LINES for count in counts]


class TimedGRPO(GRPOTrainer):
    """trl's, which notes how long each rollout took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_seconds: list[float] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        generated = super()._generate_single_turn(*args, **kwargs)
        self.rollout_seconds.append(time.perf_counter() - started)
        return generated


class StepSeconds(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def run(name: str, args: Any, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each training step."""
    policy, tokenizer = load_target(args)
    trainer = trainer_for(policy, tokenizer, args, prompts)
    clock = StepSeconds()
    trainer.add_callback(clock)
    heads: Any = None
    if name != "plain":
        heads = None if name.startswith("new") else load_heads(args.heads, policy)
        heads = OnlineLearner(heads, policy, share=args.share) if name.endswith("learn") else heads
    with nullcontext() if heads is None else SpeculativeRollouts(trainer, heads) as rollouts:
        trainer.train()
    digest = hashlib.sha256()
    for weight in policy.parameters():
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    records = [None] * len(clock.seconds) if rollouts is None else rollouts.records
    figures = zip(records, trainer.rollout_seconds, clock.seconds, rewards, strict=True)
    return [
        {
            "run": name,
            "step": step + 1,
            "tokens_per_forward": 1.0 if record is None else record.tokens_per_forward,
            "rollout_seconds": rollout,
            "step_seconds": seconds,
            "reward": reward,
            "weights_at_the_end": digest.hexdigest()[:16],
        }
        for step, (record, rollout, seconds, reward) in enumerate(figures)
    ]


def trainer_for(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: Any, prompts: Sequence[str]
) -> TimedGRPO:
    config = GRPOConfig(
        str(args.work / "rollouts"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        num_generations=max(args.batch_size // 2, 2),
        max_completion_length=args.max_new_tokens,
        learning_rate=args.learning_rate,
        temperature=args.temperature,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=policy.device.type == "cpu",
        bf16=False,
        seed=args.seed,
    )
    data = Dataset.from_dict({"prompt": list(prompts)})
    trainer = TimedGRPO(policy, line_reward, config, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run as a whole, and its last third."""
    found = []
    plain = [row["rollout_seconds"] for row in rows if row["run"] == RUNS[0]]
    weights = {row["weights_at_the_end"] for row in rows}
    for name in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == name]
        last = len(own) * 2 // 3
        third = sum(row["rollout_seconds"] for row in own[last:])
        found.append(
            {
                "run": name,
                "tokens_per_forward, first third": _mean(own[: len(own) // 3], "tokens_per_forward"),
                "tokens_per_forward, last third": _mean(own[last:], "tokens_per_forward"),
                "rollouts, times plain": sum(plain) / sum(row["rollout_seconds"] for row in own),
                "rollouts, times plain, last third": sum(plain[last:]) / third,
                "step_seconds": _mean(own, "step_seconds"),
                "reward, last third": _mean(own[last:], "reward"),
                "same_weights": len(weights) == 1,
            }
        )
    return found


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / max(len(rows), 1)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    prompts = [tokenizer.decode(ids) for ids in load_prompts(args.prompts, tokenizer, args.num_prompts)]
    del target
    rows: list[dict[str, Any]] = []
    for name in RUNS:
        rows += run(name, args, prompts)
        write({"kind": "experiment", "name": "rollouts", "rows": rows}, args.output / "rollouts.json")  # a run is long
    policy, _ = load_target(args)
    panels = [
        panel("lines", title, "training step", ylabel, [line(name, points(rows, name, what)) for name in RUNS], **more)
        for title, ylabel, what, more in (
            ("Drafts", "tokens per forward", "tokens_per_forward", {"reference": PLAIN}),
            ("Rollouts", "seconds", "rollout_seconds", {}),
            ("Reward", "mean", "reward", {}),
        )
    ]
    table = summary(rows)
    return finish(args, policy, __doc__, rows, "Rollouts of GRPO", panels, table, __file__, summary=table)


def points(rows: Sequence[dict[str, Any]], name: str, what: str) -> list[tuple[int, float]]:
    return [(row["step"], row[what]) for row in rows if row["run"] == name]


if __name__ == "__main__":
    main()
