"""Heads trained in a plain loop, for machines that have torch and transformers and nothing more.

Contract: the trainer's losses, optimizer and recipe, and its data as `packing` gives them: whole texts in rows, none
of which sees another. A run ends at its last step or when its seconds are over, whichever comes first, and its rates
come down to zero by then. `Run` is all that a run goes on from after a break. `CloverTrainer` remains the way to
train: this one knows one device, one recipe and no logs.

Shapes: N rows, L tokens in a row, B rows in a step, K heads.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_clover import CloverHeads
from hf_clover.training.losses import LossTerms, count_hits, head_losses, prediction_mask, weighted_loss
from hf_clover.training.metrics import HeadMetrics
from hf_clover.training.optimizers import MUON_DECAY, MuonAndAdamW, muon_rate
from hf_clover.training.teacher import Teacher

RATE, WARM_UP, LARGEST_NORM = 1e-3, 0.02, 0.5  # the trainer's defaults
SHORTEST = 3  # tokens of a text that something can be learned from


# ---------------------------------------------------------------------- data


@dataclass
class Rows:
    """Texts in rows: what a row is not filled with does not count, and is a text of its own."""

    input_ids: torch.Tensor  # [N, L]
    labels: torch.Tensor  # [N, L]
    position_ids: torch.Tensor  # [N, L]

    @classmethod
    def packed(cls, texts: Iterable[Sequence[int]], length: int) -> "Rows":
        """The longest texts first, each into the fullest row that has room for it."""
        texts = sorted((list(text[:length]) for text in texts if len(text) >= SHORTEST), key=len, reverse=True)
        rows: list[list[list[int]]] = []
        room: list[tuple[int, int]] = []  # of each row, in order
        for text in texts:
            place = bisect_left(room, (len(text), 0))
            left, row = room.pop(place) if place < len(room) else (length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(text)
            insort(room, (left - len(text), row))
        found = cls(*(torch.full((len(rows), length), value) for value in (0, -100, 0)))
        for row, several in enumerate(rows):
            start = 0
            for text in several:
                end = start + len(text)
                found.input_ids[row, start:end] = found.labels[row, start:end] = torch.tensor(text)
                found.position_ids[row, start:end] = torch.arange(len(text))
                start = end
            found.position_ids[row, start:] = torch.arange(length - start)
        return found

    def batch(self, places: Any, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {name: tensor[places].to(device, non_blocking=True) for name, tensor in vars(self).items()}

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def tokens(self) -> int:
        return int((self.labels != -100).sum())


def new_heads(target: PreTrainedModel, rows: Rows, draft_vocab_size: int | None, **fields: Any) -> CloverHeads:
    """Untrained ones in float32, which score the ids that are most frequent in `rows`."""
    heads = CloverHeads.from_target(target, draft_vocab_size=draft_vocab_size, **fields).float()
    if draft_vocab_size is not None:
        counts = torch.bincount(rows.labels[rows.labels >= 0], minlength=heads.config.vocab_size)
        ids = counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
        heads.draft_ids.copy_(ids)
    return heads


# ---------------------------------------------------------------------- a run


class Run:
    """Heads, their optimizer, and how far they are; `steps` of `batch_size` rows, or as many as `seconds` allow."""

    def __init__(
        self,
        heads: CloverHeads,
        target: PreTrainedModel,
        rows: Rows,
        steps: int,
        batch_size: int,
        seconds: float = float("inf"),
        seed: int = 0,
    ) -> None:
        self.heads, self.rows, self.batch_size, self.steps, self.seconds = heads, rows, batch_size, steps, seconds
        self.teacher = Teacher(target, heads)
        self.device = target.device
        groups = [
            {"params": [p for p in heads.parameters() if p.requires_grad and (p.ndim == 2) is decays], **more}
            for decays, more in ((True, {"weight_decay": MUON_DECAY}), (False, {"weight_decay": 0.0}))
        ]
        self.optimizer = MuonAndAdamW(groups, lr=RATE, muon_lr=muon_rate(steps))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step = self.tokens = 0
        self.spent = 0.0  # seconds
        self.order = torch.Generator().manual_seed(seed)
        self._places: list[torch.Tensor] = []  # of steps to come, an epoch's

    @property
    def progress(self) -> float:
        return max(self.step / self.steps, self.spent / self.seconds)

    def train(self, until: float = float("inf")) -> dict[str, float]:
        """To its end, or to where it has taken `until` seconds; the means of the steps that it took."""
        self.heads.train()
        metrics, before = HeadMetrics(self.heads.config.num_heads), self.spent
        started = time.perf_counter()
        while self.progress < 1 and self.spent < until:
            self._set_rates()
            loss, *counted = self.loss(self.rows.batch(self._next_places(), self.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.heads.parameters(), LARGEST_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            metrics.update(*counted)
            self.step += 1
            if self.device.type == "cuda" and self.step % 8 == 0:
                torch.cuda.synchronize()  # or the clock would count what was launched
            self.spent = before + time.perf_counter() - started
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.spent = before + time.perf_counter() - started
        self.heads.eval()
        found, tokens = metrics.compute()
        self.tokens += tokens
        return found

    @torch.no_grad()
    def evaluate(self, rows: Rows) -> dict[str, float]:
        metrics = HeadMetrics(self.heads.eval().config.num_heads)
        for places in torch.arange(len(rows)).split(self.batch_size):
            metrics.update(*self.loss(rows.batch(places, self.device))[1:])
        return metrics.compute()[0]

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As the trainer has it: the loss, each head's sum and count [K], its hits, and the tokens."""
        heads, teacher, config = self.heads, self.teacher, self.heads.config
        ids, positions = batch["input_ids"], batch["position_ids"]
        hidden = teacher.hidden_states({"input_ids": ids, "position_ids": positions})  # [B, L, d]
        final = teacher.final_states(hidden)  # [B, L, d]
        mask = prediction_mask(batch["labels"], positions, config.num_heads)  # [K, B, L - 1]
        counts = mask.sum((1, 2))  # [K]
        with teacher.lending():
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                outputs = heads(hidden[:, :-1], ids[:, 1:], position_ids=positions[:, :-1]).head_outputs
            terms = LossTerms(
                score=heads.score,
                vocab_size=config.draft_vocab_size or config.vocab_size,
                token_loss=config.loss_type,
                hidden_weight=config.hidden_loss_weight if config.loss_type == "clover-2" else 0.0,
                token_weight=config.token_loss_weight,
            )
            draftable = teacher.draftable(ids)  # [B, L]
            sums, ranks = head_losses(outputs.float(), final, mask, terms, draftable)  # [K], [K, B, L - 1]
        loss = weighted_loss(sums, counts, config.loss_decay)
        return loss, sums, counts, count_hits(ranks, mask), (batch["labels"] != -100).sum()

    # ------------------------------------------------------------------ breaks

    def save(self, path: Path) -> None:
        state = {name: getattr(self, name) for name in ("step", "tokens", "spent", "_places")}
        state |= {"heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}
        part = path.with_suffix(".part")
        torch.save(state | {"order": self.order.get_state()}, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.heads.load_state_dict(state.pop("heads"))
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.order.set_state(state.pop("order"))
        vars(self).update(state)
        self.teacher.refresh_draft_vocabulary()

    # ------------------------------------------------------------------ a step

    def _next_places(self) -> torch.Tensor:
        if not self._places:
            order = torch.randperm(len(self.rows), generator=self.order)
            self._places = list(order.split(self.batch_size))
        return self._places.pop()

    def _set_rates(self) -> None:
        warm = min((self.step + 1) / max(WARM_UP * self.steps, 1), 1.0)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * warm * (1 - self.progress)
