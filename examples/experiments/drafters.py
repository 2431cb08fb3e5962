"""What `learning.py` compares: how each drafter is made and trained, and what it is worth once it has been.

Contract: `DRAFTERS[name]` makes heads for a target. `train` gives them so many tokens of the target's own text: the
same samples in the same order for all drafters of one seed, by `CloverTrainer`. `chain_by_depth` and
`tokens_per_forward` say what the drafts are worth, in figures that no clock is needed for.
"""

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import training_config
from continuations import Data
from datasets import Dataset
from rivals import RIVALS, RivalHeads
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_clover import CloverHeads, CloverTrainer, Eagle3Heads
from hf_clover.decoding.draft.drafter import CloverDrafter
from hf_clover.decoding.record import Speculation, speculations
from hf_clover.measure.benchmark import batch_of
from hf_clover.measure.prompts import load_questions
from hf_clover.network.modeling_heads import DraftHeads
from hf_clover.training.optimizers import MUON_RATE, muon_rate
from hf_clover.training.precompute import TargetStatesCollator, precompute_targets
from hf_clover.training.teacher import Teacher

OURS = "clover-x"
DEPTH = 8  # of the longest chain that is looked at
ROW = 256  # tokens of held-out text, at most, in which chains are looked at
EVERY = 4  # how many places of it are one that is looked at
AS_IN_ITS_PAPER = {"as in its paper": {"learning_rate": 1e-3}}  # both papers' rate


@dataclass(frozen=True)
class Drafter:
    """Each has the loss of its paper, in the heads' config."""

    name: str
    kind: type[DraftHeads]
    make: Callable[[PreTrainedModel], DraftHeads]
    recipe: dict[str, dict[str, Any]] | None = None  # the only one to train it by, by its name

    def optimizers(self, rates: Sequence[float], muon_rates: Sequence[float]) -> dict[str, dict[str, Any]]:
        """Arguments of the trainer to choose from, by name. Ours is trained as a newcomer would, by the defaults,
        `clover-2` and `clover` as their papers do; all else by whichever of AdamW and our Muon serves it best, so
        that only the network differs."""
        if self.recipe is not None:
            return self.recipe
        found = {f"AdamW {rate:g}": {"learning_rate": rate} for rate in rates}
        return found | {f"Muon {rate:g}": {"muon_learning_rate": rate} for rate in muon_rates}

    def load(self, folder: Path, target: PreTrainedModel) -> DraftHeads:
        return self.kind.from_pretrained(folder, dtype=target.dtype).to(target.device).eval().bind(target)


def _variant(name: str, variant: str, recipe: dict[str, dict[str, Any]] | None = None) -> Drafter:
    return Drafter(name, CloverHeads, partial(CloverHeads.from_target, variant=variant), recipe)


def _rival(kind: type[RivalHeads]) -> Drafter:
    return Drafter(kind.name, kind, kind.from_target)


DRAFTERS: dict[str, Drafter] = {
    drafter.name: drafter
    for drafter in (
        _variant(OURS, OURS, {"defaults": {}}),
        _variant("clover-2", "clover-2", AS_IN_ITS_PAPER),
        _variant("clover-2, tuned", "clover-2"),
        _variant("clover", "clover", AS_IN_ITS_PAPER),
        _variant("clover, tuned", "clover"),
        _variant("medusa", "medusa"),
        Drafter("eagle-3", Eagle3Heads, partial(Eagle3Heads.from_target, draft_copies=0)),  # as all but ours
        *map(_rival, RIVALS.values()),
    )
}


# ---------------------------------------------------------------------- training


@dataclass
class Trained:
    heads: DraftHeads
    steps: int
    seconds: float  # of one CPU thread, or of the clock where there is a GPU; without the target's pass
    memory_mib: float  # as `training_memory` counts it


class Classroom:
    """A target and what it wrote. Off a GPU its hidden states are on disk: made once, read by every run."""

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        length: int,
        batch_size: int,
        work: Path,
        most_tokens: int,
        draft_vocab_size: int | None = None,
        save_steps: int = 500,
        bf16: bool = False,
    ) -> None:
        """`most_tokens`: of the longest run. `save_steps`: after so many a run can go on where it was stopped.
        `bf16`: whether the target's pass and training compute in bfloat16."""
        self.target, self.tokenizer, self.data, self.work = target, tokenizer, data, work
        self.length, self.batch_size = length, batch_size
        self.draft_vocab_size, self.save_steps, self.bf16 = draft_vocab_size, save_steps, bf16
        self.rows = min(self.steps_for(most_tokens) * batch_size, len(data.train))
        self.keeps_states = target.device.type != "cuda"  # where its pass costs less than to read its states
        self.reader = Teacher(target, Eagle3Heads.from_target(target))  # of all the layers that any drafter reads
        self._states: Dataset | None = None

    def steps_for(self, tokens: int) -> int:
        return math.ceil(tokens / (self.batch_size * self.data.mean_length))

    def train(self, drafter: Drafter, tokens: int, seed: int, optimizer: dict[str, Any]) -> Trained:
        steps = self.steps_for(tokens)
        if rate := optimizer.get("muon_learning_rate"):  # more in a short run, as ours has it by default
            optimizer = {**optimizer, "muon_learning_rate": rate * muon_rate(steps) / MUON_RATE}
        set_seed(seed)
        heads = drafter.make(self.target)
        on_gpu = self.target.device.type == "cuda"
        unfinished = self.work / "trainer" / "-".join(map(str, (drafter.name, tokens, seed, *optimizer.values())))
        config = training_config(
            unfinished,
            self.target,
            max_steps=steps,
            per_device_train_batch_size=self.batch_size,
            train_sampling_strategy="group_by_length",
            max_length=self.length,
            bf16=on_gpu or self.bf16,
            seed=seed,
            save_strategy="steps" if steps > self.save_steps else "no",
            save_steps=self.save_steps,
            save_total_limit=1,
            draft_vocab_size=self.draft_vocab_size,
            **optimizer,
        )
        trainer = (drafter.kind.trainer if issubclass(drafter.kind, RivalHeads) else CloverTrainer)(
            model=heads,
            teacher_model=self.target,
            args=config,
            train_dataset=self.data.train,
            processing_class=self.tokenizer,
        )
        samples = self._states_for(trainer) if self.keeps_states else trainer.train_dataset
        if self.keeps_states:
            sizes = self.reader.state_size, trainer.teacher.state_size
            trainer.data_collator = _Collator(trainer.data_collator, *sizes)
        trainer.train_dataset = samples.select(range(min(len(samples), steps * self.batch_size)))
        trainer.remove_callback(ProgressCallback)
        clock = time.perf_counter if on_gpu else time.process_time
        started = clock()
        with _tensor_cores():
            trainer.train(resume_from_checkpoint=get_last_checkpoint(unfinished) if unfinished.exists() else None)
        seconds = clock() - started
        if trainer.was_interrupted:
            raise KeyboardInterrupt
        shutil.rmtree(unfinished, ignore_errors=True)
        memory = training_memory(trainer)
        return Trained(trainer.heads.eval(), steps, seconds, memory)

    def _states_for(self, trainer: CloverTrainer) -> Dataset:
        """The samples with the states of all layers that any drafter reads: one pass of the target for all runs."""
        if self._states is None:
            dataset = trainer.train_dataset.select(range(min(self.rows, len(trainer.train_dataset))))
            size, tokens = 2 * self.reader.state_size, sum(map(len, dataset["input_ids"]))
            print(f"The target's states: {size:,} bytes a token, {size * tokens / 1e9:.2f} GB for {tokens:,} tokens.")
            folder = self.data.folder / f"states-{len(dataset)}"
            with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.bf16):
                self._states = precompute_targets(
                    self.reader, dataset, trainer.data_collator, folder, batch_size=8, accelerator=trainer.accelerator
                )
        return self._states

    def seconds_per_token(self) -> float:
        """Of the target's pass, which every run would need that does not find the states on disk."""
        samples = self.data.train.select(range(min(64, len(self.data.train))))
        length = sorted(map(len, samples["input_ids"]))[-8:][0]  # that eight of them have
        rows = full_rows(samples, length)[:8].to(self.target.device)  # [rows, length]
        clock = time.perf_counter if self.target.device.type == "cuda" else time.process_time
        teacher = Teacher(self.target, CloverHeads.from_target(self.target, variant="medusa"))
        teacher.hidden_states({"input_ids": rows})
        started = clock()
        teacher.hidden_states({"input_ids": rows})
        return (clock() - started) / rows.numel()


class _Collator(TargetStatesCollator):
    """Of the states on disk the last `wanted` numbers: all of them, or for who reads no layer the final state."""

    def __init__(self, collator: Any, size: int, wanted: int) -> None:
        super().__init__(collator, size)
        self.wanted = wanted

    def _read(self, data: bytes) -> torch.Tensor:
        return super()._read(data)[:, -self.wanted :]


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Products of float32 in TF32 where the GPU has it; a CPU goes on as it does."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def training_memory(trainer: CloverTrainer) -> float:
    """MiB, counted and so the same on every machine: weights, gradients, the optimizer's state after a step, and what
    the forward of a batch keeps for its backward."""
    model, held = trainer.model.train(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = next(iter(trainer.get_train_dataloader()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = trainer.compute_loss(model, batch)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    borrowed = trainer.heads.borrowed
    for tensor in (*weights, borrowed.embedding, *borrowed.lm_head.parameters(), *borrowed.norm.parameters()):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    del loss
    own = 2 * sum(parameter.nbytes for parameter in weights) + _bytes_in(trainer.optimizer.state_dict())
    return (own + sum(held.values())) / 2**20


def _bytes_in(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_bytes_in, parts))


# ---------------------------------------------------------------------- what drafts are worth


def full_rows(samples: Dataset, length: int) -> torch.Tensor:
    """[N, length]: of the samples that no end of text has cut shorter than that."""
    return torch.tensor([ids[:length] for ids in samples["input_ids"] if len(ids) >= length])


@torch.no_grad()
def chain_by_depth(
    heads: DraftHeads, target: PreTrainedModel, rows: torch.Tensor, start: int, depth: int, every: int = 1
) -> list[float]:
    """How often the first, the first two, ... drafts of a greedy chain are the text's next tokens. The sum is the mean
    length of the chain that is right.

    rows [N, L] are texts of the target, of which the first `start` tokens are a prompt; after it, `every`th place
    counts at which the text goes on for `depth` tokens more.
    """
    rows, found = rows.to(target.device), []
    for place, drafter in along(heads, target, rows, places(rows.shape[1], start, depth, every)):
        tree = drafter.draft(depth, shape="chain")
        drafts = tree.tokens[:, 1:]  # [N, <= depth]
        hits = (drafts == rows[:, place + 1 : place + 1 + drafts.shape[1]]) & tree.valid[:, 1:]
        found.append(F.pad(hits.int().cumprod(1).bool(), (0, depth - drafts.shape[1])))  # [N, depth]
    return torch.stack(found, dim=1).float().mean((0, 1)).tolist()


@torch.no_grad()
def along(
    heads: DraftHeads, target: PreTrainedModel, rows: torch.Tensor, stops: Iterable[int]
) -> Iterator[tuple[int, CloverDrafter]]:
    """A drafter that follows the texts `rows` [N, L], at each place of `stops`: of the last token that it knows."""
    teacher, drafter = Teacher(target, heads), heads.new_drafter(heads)
    hidden = teacher.features(teacher.hidden_states({"input_ids": rows}))  # [N, L, f] as the heads read it
    positions, known = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1), 0  # [N, L]
    for place in stops:
        new = slice(known, place)
        following = rows[:, known + 1 : place + 1]
        drafter.extend(hidden[:, new], following, positions[:, new], [place - known] * len(rows))
        yield place, drafter
        known = place


def places(length: int, start: int, depth: int, every: int = 1) -> range:
    """Of the last token that is settled, where a text of `length` tokens is looked at."""
    return range(start, length - depth, every)


@torch.no_grad()
def greedy(
    target: PreTrainedModel, prompts: Sequence[list[int]], max_new_tokens: int, **options: Any
) -> tuple[list[list[int]], float]:
    """The texts, all in one batch, and tokens per forward of a row (1 without heads)."""
    settings = dict(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0)
    with speculations() as records:
        texts = target.generate(**batch_of(prompts, 0, target.device), **settings, **options)
    return texts.tolist(), records[0].tokens_per_forward if records else 1.0


def read_questions(
    path: str | None, tokenizer: PreTrainedTokenizerBase, per_category: int
) -> list[tuple[str, list[int]]]:
    """The first turn of the first `per_category` questions of each category; none without a file."""
    questions = load_questions(path, tokenizer, per_category=per_category) if path else []
    return [(question.category, question.encode(tokenizer)) for question in questions]


@dataclass
class Asked:
    """What drafts are worth on questions, one after the other."""

    tokens_per_forward: float
    by_category: dict[str, float]
    accepted: list[float]  # how often the first draft of a chain is right, the second where the first was, ...
    texts: list[list[int]]


def ask(
    target: PreTrainedModel,
    questions: Sequence[tuple[str, list[int]]],
    max_new_tokens: int,
    temperature: float = 0.0,
    at_once: bool = False,
    **options: Any,
) -> Asked:
    """Answers to `questions`, a category and token ids each, greedy or sampled, with the batch's number as the seed: a
    batch is one question, or with `at_once` all of a category. `options` are `generate`'s."""
    found: dict[str, list[Speculation]] = {}
    texts: list[list[int]] = []
    settings = dict(max_new_tokens=max_new_tokens, do_sample=temperature > 0, pad_token_id=0)
    if temperature:
        settings |= dict(temperature=temperature, top_k=0, top_p=1.0)
    batches: dict[tuple[str, int], list[list[int]]] = {}
    for number, (category, prompt) in enumerate(questions):
        batches.setdefault((category, 0 if at_once else number), []).append(prompt)
    for number, ((category, _), prompts) in enumerate(batches.items()):
        set_seed(number)
        with speculations() as records:
            texts += target.generate(**batch_of(prompts, 0, target.device), **settings, **options).tolist()
        found.setdefault(category, []).extend(records)

    def per_forward(records: list[Speculation]) -> float:
        return sum(one.new_tokens for one in records) / max(sum(one.row_forwards for one in records), 1)

    every = [one for records in found.values() for one in records]
    depths = [sum(one.row_forwards for one in every) - len(texts)]  # trees: the prompt has none
    for counts in itertools.zip_longest(*(one.accepted_by_depth for one in every), fillvalue=0):
        depths.append(sum(counts))
    accepted = [later / max(earlier, 1) for earlier, later in itertools.pairwise(depths)]
    return Asked(per_forward(every), {name: per_forward(of) for name, of in found.items()}, accepted, texts)


def describe(path: Path) -> dict[str, Any]:
    """What a target's folder says of its training, where it says anything."""
    file = path / "training.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
