"""Heads that learn while they are used.

Contract: while an `OnlineLearner` is open, it records each call of `generate` with its heads: the target's states and
the tokens after them, without forwards of its own. Between calls the heads learn from these records, with the
trainer's losses and optimizer. Learning takes at most a given share of the time. Learning never changes what
`generate` returns: a step that fails is dropped, or learning is switched off with one warning. Text and states stay in
memory; only weights, and the numbers that a later run needs to continue, are written to a folder.
"""

import copy
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.utils import logging

from ..decoding.draft.copies import TextMemory
from ..decoding.entry import place_heads
from ..decoding.target.graph_rules import adapters_on
from ..hub.push import LEARNER, write_card, write_results
from ..measure.provenance import provenance
from ..measure.whole_files import writing_whole
from ..network.modeling_clover import CloverHeads
from ..network.modeling_heads import DraftHeads
from ..network.packing import is_packed, multiplies_bfloat16_fast, plain_weight
from ..network.target_parts import unwrap
from ..origins.published import load_heads
from ..targets.loading import hiding_bars
from .first_fit import FirstFit
from .lessons import CallListener, Document, Lessons
from .losses import prediction_mask, weighted_loss
from .optimizers import HAS_MUON, MUON_DECAY, MUON_RATE, WITH_MUON, MuonAndAdamW
from .pace import Pace
from .teacher import Teacher

if TYPE_CHECKING:
    from ..decoding.record import Speculation
    from ..decoding.target.base import Run

logger = logging.get_logger(__name__)

SHARE = 0.1  # share of the time for learning
TOKENS = 300  # tokens of a step
LEAST = 75  # least new tokens of a step while nobody waits for the machine
MOST_NEW = 8 * TOKENS  # most new tokens that wait for a step; older ones go to the old documents
ADAM_RATE, LONGEST_GRADIENT = 1e-3, 0.5
RATE_OF_TRAINED = 0.15  # factor of the rates for trained heads: at the rates of new heads they forget at first
DRAFT_VOCABULARY = 8192  # ids that new heads score, if the target has at least twice as many
STEPS_BETWEEN_SAVES = 50
REMEMBERED = 100_000  # tokens of the last texts that drafts are copied from
STREAMS: dict[str, Any] = {"cuda": torch.cuda}  # by the kind of device: a module with streams
WINDOW = 512  # generated tokens per entry in the record of tokens per forward
RECORD = "learning.json"


class OnlineLearner:
    """
    Lets draft heads learn from the prompts and answers of `generate`, without a dataset or a training run.

    Heads learn only within this block. They can memorise the texts that they learn from; whoever shares the heads
    shares these too. Texts and states stay in memory and are never written to disk.

    Args:
        heads ([`CloverHeads`] or other draft heads, *optional*):
            The heads that learn; their weights change in place. If `None`, they are loaded from `folder`, or new heads
            are made.
        target ([`~transformers.PreTrainedModel`]):
            The model that `generate` is called on.
        folder (`str` or `os.PathLike`, *optional*):
            Folder in which the heads are saved every 50 steps and at the end, with all that a later run needs to
            continue. If it already holds heads, learning continues from them.
        share (`float`, *optional*, defaults to 0.1):
            Largest share of the time that learning takes, at the end of calls. With 0, heads learn only within
            `idle()` and at the end of the block.
        memory_bytes (`int`, *optional*, defaults to 256 MiB):
            Most bytes for states of earlier texts. Heads learn from these again, so that they do not forget them. A
            token takes two bytes for each number of the target's hidden size.

    Example:

    ```python
    >>> from hf_clover import OnlineLearner
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer

    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> inputs = AutoTokenizer.from_pretrained("org/target")("def f(x):", return_tensors="pt")
    >>> with OnlineLearner(None, model, folder="my-heads") as learner:
    ...     tokens = model.generate(**inputs, assistant_model=learner.heads, max_new_tokens=16)
    >>> learner.tokens > 0
    True
    ```
    """

    def __init__(
        self,
        heads: DraftHeads | None,
        target: nn.Module,
        folder: str | Path | None = None,
        share: float = SHARE,
        memory_bytes: int = 1 << 28,
    ) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"`share={share}` must be from 0 to 1: the part of the time that goes into learning.")
        if memory_bytes < 0:
            raise ValueError(f"`memory_bytes={memory_bytes}` must not be negative.")
        self.target = unwrap(target)
        self.folder = None if folder is None else Path(folder)
        self.share = share
        has_heads = self.folder is not None and (self.folder / "config.json").exists()
        self.heads = heads if heads is not None else self._heads_of_folder() if has_heads else new_heads(self.target)
        place_heads(self.heads, self.target)
        self.heads.bind(self.target)
        self.lessons = Lessons(memory_bytes, MOST_NEW)
        self.tokens = self.steps = 0  # tokens learned from, and steps made
        self.seconds = 0.0  # seconds for which it was open before
        self.record: list[dict[str, float]] = []  # tokens per forward, one entry per window
        self._is_off = False
        self._lock, self._stepping = threading.Lock(), threading.Lock()
        self._turns: WeakKeyDictionary[Cache, tuple[int, list[Document]]] = WeakKeyDictionary()
        self._opened: float | None = None
        self._spent = self._step_seconds = 0.0  # seconds of learning since it was opened, and of the last step
        self._window = [0, 0]  # tokens and forwards that are in no entry of the record yet
        self._target_state: tuple = ()
        self._averaged = 0  # steps in the average
        config = self.heads.config
        self._is_known = torch.zeros(config.vocab_size, dtype=torch.bool)  # ids of the first draft vocabulary
        self._counts = torch.zeros(config.vocab_size, dtype=torch.long)  # how often each id was emitted
        self.pace = Pace(rate_then=RATE_OF_TRAINED if are_trained(self.heads) else 1.0)
        self.first_fit = FirstFit.of(self.heads)
        self._make_student()
        if has_heads:
            self._go_on(is_given=heads is not None)

    # ------------------------------------------------------------------ what learns

    def _make_student(self) -> None:
        """Make the student, whose weights steps change, and the average of its weights, which drafts are made with."""
        self.student = copy.deepcopy(self.heads).float().train().requires_grad_(True)
        self.teacher = Teacher(self.target, self.student)
        self._lend_plainly()
        self.average = {name: weight.detach().clone() for name, weight in self.student.named_parameters()}
        matrices = [weight for weight in self.student.parameters() if weight.ndim == 2]
        others = [weight for weight in self.student.parameters() if weight.ndim != 2]
        with_muon = HAS_MUON and WITH_MUON[self.heads.config.variant]
        groups = [
            {"params": matrices, "weight_decay": MUON_DECAY if with_muon else 0.0},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer: torch.optim.Optimizer = (
            MuonAndAdamW(groups, lr=ADAM_RATE, muon_lr=MUON_RATE)
            if with_muon
            else torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.95))
        )
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def _lend_plainly(self) -> None:
        """Lend the student plain weights: packed ones cannot be differentiated through."""
        borrowed, ids = self.student.borrowed, getattr(self.student, "draft_ids", None)
        if not is_packed(borrowed.lm_head):
            self.teacher.refresh_draft_vocabulary()
            return
        weight: torch.Tensor = plain_weight(borrowed.lm_head).detach()
        bias: torch.Tensor | None = borrowed.lm_head.bias
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias.detach()[ids]
        borrowed.draft_rows = weight, bias

    # ------------------------------------------------------------------ the block

    def __enter__(self) -> Self:
        other = self.heads.learner
        if other is not None:
            raise ValueError("`heads` are learning already: leave the block of their other `OnlineLearner` first.")
        distributed = torch.distributed
        processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if processes > 1:
            raise RuntimeError(
                f"`OnlineLearner` works in one process, and there are {processes}: each would learn something else. "
                "Let one process learn, and load its folder in the others."
            )
        self._opened, self._spent = clock(), 0.0
        self.heads.learner = self
        self._brings_memory = self.heads.text_memory is None and self.heads.config.draft_copies > 0
        if self._brings_memory:
            self.heads.text_memory = TextMemory(REMEMBERED)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.heads.learner = None
        if self._brings_memory:
            self.heads.text_memory = None
        if kind is None:
            while self.step(least=1):
                pass
        self.seconds, self._opened = self._seconds_open, None
        self._close_window(is_over=True)
        self.exchange_ids()
        self.save()

    @property
    def _seconds_open(self) -> float:
        """Seconds for which it has been open, now and before."""
        return self.seconds + (0.0 if self._opened is None else clock() - self._opened)

    def listen(self, run: "Run") -> CallListener:
        """A listener for one call of `generate`; decoding calls this once per call."""
        if unwrap(run.target) is not self.target:
            raise ValueError(
                "`assistant_model` learns from another target: its `OnlineLearner` was made for a "
                f"`{type(self.target).__name__}`, and this call is on a `{type(run.target).__name__}`. Give each "
                "target heads and a learner of its own."
            )
        state = state_of(self.target)
        with self._lock:
            if state != self._target_state:
                self.lessons.forget()
                self._turns.clear()
                self._target_state = state
        return CallListener(run, self._turns, self._heard)

    def _heard(self, documents: list[Document], stats: "Speculation") -> None:
        with self._lock:
            self._window[0] += stats.new_tokens
            self._window[1] += stats.row_forwards
            if self._is_off:
                return
            for document in documents:
                tokens = document.next_tokens[document.known :].cpu()
                self._counts += torch.bincount(tokens, minlength=len(self._counts))[: len(self._counts)]
            self.lessons.add(documents)
        self._close_window()
        while self._may_step() and self.step():
            pass

    def _may_step(self) -> bool:
        if self._opened is None or self.share == 0:
            return False
        return self._spent + self._step_seconds <= self.share * (clock() - self._opened)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A block in which nobody waits for the machine: heads learn from the recorded texts, in a thread."""
        is_over = threading.Event()

        def learn() -> None:
            while not is_over.is_set() and self.idle_step():
                pass

        thread = threading.Thread(target=learn, name="hf_clover learner", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    # ------------------------------------------------------------------ a step

    def idle_step(self) -> bool:
        """As `step`, while nobody waits for the machine: little new text is enough, and old text fills the step."""
        return self.step(LEAST)

    def step(self, least: int | None = None) -> bool:
        """Make a step if at least `least` new tokens wait (300 by default). True if there was a step."""
        if self._is_off or not self._stepping.acquire(blocking=False):
            return False
        try:
            with self._lock:
                if self.lessons.waiting < (TOKENS if least is None else least):
                    return False
                new, old = self.lessons.take(TOKENS)
            started = clock()
            with torch.autocast(self.heads.device.type, enabled=False), self._own_stream():
                if not self.pace.is_resting:
                    self._learn(new, old)
                elif self.pace.looks():
                    self._look(new)
            self._step_seconds = clock() - started
            self._spent += self._step_seconds
            return True
        except RuntimeError as error:  # `torch.OutOfMemoryError` is one
            self._is_off = True
            with self._lock:
                self.lessons.forget()
            self.optimizer.zero_grad(set_to_none=True)
            is_memory = isinstance(error, torch.OutOfMemoryError)
            way_out = "lower `memory_bytes`, or generate for fewer rows at once" if is_memory else "please report this"
            reason = "the device has no memory left for a step" if is_memory else f"a step failed ({error})"
            logger.warning(f"Learning is off: {reason}. `generate` goes on with the heads as they are; {way_out}.")
            return False
        finally:
            self._stepping.release()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """A block whose kernels other threads' kernels do not wait for. They are done when it ends."""
        module, device = STREAMS.get(self.heads.device.type), self.heads.device
        if module is None:
            yield
            return
        stream = module.Stream(device)
        stream.wait_stream(module.current_stream(device))  # the recorded states come from there
        with module.stream(stream):
            yield
        stream.synchronize()

    def _learn(self, new: list[Document], old: list[Document]) -> None:
        if self.first_fit is not None and not self._fit(self.first_fit, new):
            self.tokens += sum(document.new for document in new)
            return
        self.optimizer.zero_grad(set_to_none=True)  # Ctrl-C may have left gradients of an unfinished step
        with torch.inference_mode(False), torch.enable_grad():
            loss = self._loss([*new, *old])
            loss.backward()
            length = nn.utils.clip_grad_norm_(self.student.parameters(), LONGEST_GRADIENT)
            if not torch.isfinite(length + loss.detach()):
                self._drop_step()
                return
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.pace.rate
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._publish()
        self.steps += 1
        self.tokens += sum(document.new for document in new)
        self._note(loss.item())
        if self.steps % STEPS_BETWEEN_SAVES == 0:
            self.exchange_ids()
            try:
                self.save()
            except OSError as error:
                logger.warning(
                    f"The heads that learn were not saved: {error} They will be saved as soon as that is possible."
                )

    @torch.no_grad()
    def _fit(self, first_fit: FirstFit, documents: list[Document]) -> bool:
        """Fit the first layer of new heads by least squares. Return whether steps may begin; they leave that layer
        alone until the last fit."""
        first_fit.add(documents)
        is_new = first_fit.fit()
        fitted = dict(self.heads.named_parameters())
        for name, weight in self.student.named_parameters():
            if name.startswith("entry_decoder."):
                weight.requires_grad_(first_fit.is_over)
                if is_new:
                    weight.copy_(fitted[name])
                    self.average[name].copy_(fitted[name])
        if first_fit.is_over:
            self.first_fit = None
        return first_fit.has_fitted

    def _look(self, documents: list[Document]) -> None:
        """Note the loss of the text, without learning from it."""
        with torch.inference_mode(False), torch.no_grad():
            self._note(self._loss(documents).item())

    def _loss(self, documents: list[Document]) -> torch.Tensor:
        batch = batch_of(documents, self.heads.device)
        states = batch.pop("hidden_states").clone()  # tensors of `inference_mode` cannot be learned from
        final_states = self.teacher.final_states(states)
        config = self.student.config
        mask = prediction_mask(batch["labels"], batch["position_ids"], config.num_heads)  # [K, 1, S]
        in_bfloat16 = multiplies_bfloat16_fast(self.heads.device)
        # Without its cache, which may hold weights that a caller's autocast has cast to float16.
        with torch.autocast(self.heads.device.type, torch.bfloat16, enabled=in_bfloat16, cache_enabled=False):
            _, sums, _ = self.teacher.charge(self.student, batch, states, final_states, mask, nullcontext())
        return weighted_loss(sums, mask.sum((1, 2)), config.loss_decay)

    def _note(self, cost: float) -> None:
        if self.pace.note(cost):  # the kind of text has changed: an average over earlier steps would lag behind
            self._averaged = 0

    def _drop_step(self) -> None:
        """Set the weights back to the last average, because the gradient is not finite."""
        logger.warning_once("A learning step gave NaN and was dropped; the heads are as they were before it.")
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, weight in self.student.named_parameters():
                weight.copy_(self.average[name])

    @torch.no_grad()
    def _publish(self) -> None:
        """Update the weights that drafts are made with: an average over about the last third of the steps. It is
        written in place, so that CUDA graphs stay valid."""
        self._averaged += 1
        newest = 3 / (self._averaged + 2)
        parameters = zip(self.heads.parameters(), self.average.values(), self.student.parameters(), strict=True)
        for served, average, weight in parameters:
            average.lerp_(weight, newest)
            served.copy_(average)

    # ------------------------------------------------------------------ the draft vocabulary

    @torch.no_grad()
    def exchange_ids(self) -> int:
        """Put the ids that were emitted most often into the draft vocabulary. Returns how many of its ids are new.

        Each id of the first vocabulary counts as emitted once more, so that one rare token does not replace it.
        """
        heads = self.heads
        if heads.config.draft_vocab_size is None or getattr(heads, "lm_head", None) is not None:
            return 0  # the rows of the heads' own lm_head belong to its ids
        if not self._is_known.any():
            self._is_known[heads.draft_ids.cpu()] = True
        counts = self._counts + self._is_known
        ids = counts.sort(descending=True, stable=True).indices[: heads.config.draft_vocab_size].sort().values
        changed = int((~torch.isin(ids, heads.draft_ids.cpu())).sum())
        if changed:
            for each in (heads, self.student):
                each.draft_ids.copy_(ids)
            self._lend_plainly()
            heads.bind(self.target)
        return changed

    # ------------------------------------------------------------------ what one sees

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens per forward in the last window; None before the first window has ended."""
        return self.record[-1]["tokens_per_forward"] if self.record else None

    def __str__(self) -> str:
        """`2.1 tokens per forward (1.5 when we began), 40,183 tokens learned from`."""
        learned = f"{self.tokens:,} tokens learned from"
        if not self.record:
            return learned
        first, last = (self.record[place]["tokens_per_forward"] for place in (0, -1))
        return f"{last:.1f} tokens per forward ({first:.1f} when we began), {learned}"

    def _close_window(self, is_over: bool = False) -> None:
        with self._lock:
            tokens, forwards = self._window
            if tokens < (1 if is_over else WINDOW):
                return
            self._window = [0, 0]
            entry = {
                "tokens": self.tokens,
                "seconds": self._seconds_open,
                "tokens_per_forward": tokens / max(forwards, 1),
            }
            self.record.append(entry)

    # ------------------------------------------------------------------ the folder

    def _heads_of_folder(self) -> DraftHeads:
        assert self.folder is not None
        with hiding_bars():
            return load_heads(self.folder, self.target)

    @torch.no_grad()
    def _go_on(self, is_given: bool) -> None:
        """Continue from the state in the folder."""
        assert self.folder is not None
        if is_given:
            stored = self._heads_of_folder().state_dict()
            own = self.heads.state_dict()
            if {name: value.shape for name, value in own.items()} != {k: v.shape for k, v in stored.items()}:
                raise ValueError(
                    f"`folder` {str(self.folder)!r} holds heads of other sizes than `heads`: pass `heads=None` to go "
                    "on with those, or another folder."
                )
            self.heads.load_state_dict(stored)
        path = self.folder / LEARNER
        if not path.exists():  # these heads were trained in another way
            self._make_student()
            return
        try:
            with safe_open(path, framework="pt") as file:
                kept: dict[str, Any] = json.loads(file.metadata()["learner"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dictionary
        except SafetensorError as error:
            raise ValueError(
                f"{str(path)!r} is damaged or cut short ({error}): delete it to go on without it."
            ) from error
        self.student.load_state_dict({**self.heads.state_dict(), **_part(tensors, "student.")})
        for name, average in self.average.items():
            average.copy_(tensors[f"average.{name}"])
        _load_optimizer(self.optimizer, _part(tensors, "optimizer."))
        self._counts.copy_(tensors["counts"])
        self._is_known.copy_(tensors["known"])
        self._lend_plainly()
        self.pace = Pace(**kept["pace"])
        self.steps, self.tokens, self.seconds = kept["steps"], kept["tokens"], kept["seconds"]
        self._averaged = kept["averaged"]
        record = self.folder / RECORD
        self.record = json.loads(record.read_text())["record"] if record.exists() else []

    def save(self) -> None:
        """Write heads, learning state and record to the folder. Each file is replaced as a whole, so a kill leaves
        either the new version or the old one."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / ".saving"
        shutil.rmtree(beside, ignore_errors=True)  # a killed process may have left it
        with hiding_bars():
            self.heads.save_pretrained(beside)
        files = [file for file in beside.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.suffix != ".safetensors"):
            place = self.folder / file.relative_to(beside)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)
        shutil.rmtree(beside)
        numbers: dict[str, Any] = {"steps": self.steps, "tokens": self.tokens, "averaged": self._averaged}
        numbers |= {"seconds": self._seconds_open, "pace": asdict(self.pace)}
        with writing_whole(self.folder / LEARNER) as unfinished:
            save_file(self._tensors(), unfinished, metadata={"learner": json.dumps(numbers)})
        with writing_whole(self.folder / RECORD) as unfinished:
            unfinished.write_text(json.dumps({"kind": "online learning", "record": self.record}, indent=1) + "\n")
        settings = {"learned": "while it was used", "share": self.share, "tokens_per_step": TOKENS}
        about = {name: value for name, value in provenance().items() if name != "command"}  # it may hold a prompt
        training = {"steps": self.steps, "tokens": self.tokens, "settings": settings, **about}
        write_results(self.folder, training=training)
        write_card(self.folder)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"student.{name}": weight for name, weight in self.student.named_parameters()}
        tensors |= {f"average.{name}": average for name, average in self.average.items()}
        tensors |= {f"optimizer.{name}": value for name, value in _optimizer_state(self.optimizer)}
        tensors |= {"counts": self._counts, "known": self._is_known}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


# ---------------------------------------------------------------------- parts


def new_heads(target: PreTrainedModel) -> DraftHeads:
    """New heads. If the target's vocabulary is large, they score only its lowest ids, which are the frequent ones:
    tokenizers number merges (BPE) or pieces (Unigram) in order of frequency."""
    size = target.config.get_text_config(decoder=True).vocab_size
    with torch.random.fork_rng():
        return CloverHeads.from_target(
            target, draft_vocab_size=DRAFT_VOCABULARY if size >= 2 * DRAFT_VOCABULARY else None
        )


def are_trained(heads: DraftHeads) -> bool:
    """Whether heads were loaded, or have learned in this process: then no matrix is zero that was so at first."""
    started = ((name, part) for name, part in heads.named_modules() if not name.startswith("layers."))
    zeros = [part.weight for _, part in started if getattr(part, "start", None) == "zero"]
    return bool(heads.name_or_path) or (bool(zeros) and all(bool(weight.any()) for weight in zeros))


def state_of(target: PreTrainedModel) -> tuple:
    """Weight versions and active adapters: if this value is unchanged, the target computes the same as before."""
    weights = ((id(weight), 0 if weight.is_inference() else weight._version) for weight in target.parameters())
    return tuple(weights), adapters_on(target)


def batch_of(documents: list[Document], device: torch.device) -> dict[str, torch.Tensor]:
    """Documents one after the other in one row, as the trainer packs them: `input_ids`, `labels`, `position_ids`
    [1, S] and `hidden_states` [1, S, f]."""
    ids, labels, positions = [], [], []
    for document in documents:
        tokens = document.next_tokens.to(device)
        own = torch.cat((tokens[:1] * 0, tokens[:-1]))  # [N]; the first one is never read
        ids.append(own)
        labels.append(torch.where(torch.arange(len(own), device=device) > document.known, own, -100))
        positions.append(torch.arange(len(own), device=device))
    states = torch.cat([document.states.to(device) for document in documents])  # [S, f]
    return {
        "input_ids": torch.cat(ids)[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(positions)[None],
        "hidden_states": states[None],
    }


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    state = optimizer.state_dict()
    for place, part in enumerate(state.get("parts", [state])):
        for index, values in part["state"].items():
            for name, value in values.items():
                yield f"{place}.{index}.{name}", torch.as_tensor(value)


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    state = optimizer.state_dict()
    for place, part in enumerate(state.get("parts", [state])):
        part["state"] = {}
        for name, value in _part(tensors, f"{place}.").items():
            index, key = name.split(".", 1)
            part["state"].setdefault(int(index), {})[key] = value
    optimizer.load_state_dict(state)


__all__ = ["OnlineLearner"]
