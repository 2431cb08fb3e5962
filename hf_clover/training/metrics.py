"""The figures about heads that a log line shows.

Contract: `HeadMetrics` adds up counts on the device, without waiting for it. Once per log line it sums them over all
processes and turns them into numbers. It does not know models or trainers.
"""

import torch
from accelerate import Accelerator

from .losses import TOP_K, HitCounts


class HeadMetrics:
    """The metrics of each head, and the tokens per forward that they imply.

    For head i: `head_i/loss`; `head_i/top1` to `top5`: how often the target's own choice was among the head's k best;
    `head_i/top1_given_earlier` to `top5_given_earlier`: the same at positions where it was also among the k best of
    all earlier heads. `acceptance_length/top1` is the number of tokens per forward of the target that these imply for
    a chain of drafts; `acceptance_length/top5` is that for a tree in which every node has five children.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.reset()

    def reset(self) -> None:
        self._sums: torch.Tensor | None = None  # [K, columns]

    def update(self, loss_sums: torch.Tensor, counts: torch.Tensor, hits: HitCounts, num_tokens: torch.Tensor) -> None:
        """Add a batch: losses [K] summed over `counts` [K] positions, its hits, and its number of tokens."""
        columns = (
            loss_sums.detach()[:, None],
            counts[:, None],
            hits.hits,
            hits.total[:, None],
            hits.hits_given_earlier,
            hits.total_given_earlier,
            num_tokens.expand(self.num_heads, 1),
        )
        batch = torch.cat([column.to(loss_sums.device, torch.float32) for column in columns], dim=1)
        self._sums = batch if self._sums is None else self._sums + batch

    def compute(self, accelerator: Accelerator | None = None) -> tuple[dict[str, float], int]:
        """The metrics and the number of tokens since the last `reset`; no metrics and 0 if there was no batch."""
        if self._sums is None:
            return {}, 0
        sums = self._sums if accelerator is None else accelerator.reduce(self._sums, reduction="sum")
        sums = sums.cpu()
        loss, counts, hits, total, hits_given, total_given, tokens = sums.split([1, 1, TOP_K, 1, TOP_K, TOP_K, 1], 1)
        metrics: dict[str, float] = {}
        accuracy = _ratio(hits, total)  # [K, TOP_K]
        given = _ratio(hits_given, total_given)  # [K, TOP_K]
        for head in range(self.num_heads):
            metrics[f"head_{head}/loss"] = _ratio(loss, counts)[head].item()
            for k in range(TOP_K):
                metrics[f"head_{head}/top{k + 1}"] = accuracy[head, k].item()
            for k in range(TOP_K):
                metrics[f"head_{head}/top{k + 1}_given_earlier"] = given[head, k].item()
        lengths = 1 + given.cumprod(0).sum(0)  # [TOP_K]
        metrics |= {f"acceptance_length/top{k + 1}": lengths[k].item() for k in range(TOP_K)}
        return metrics, int(tokens[0].item())


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return numerator / denominator.clamp(min=1)


__all__ = ["HeadMetrics"]
