"""Muon for the matrices of heads, AdamW for everything else, as one optimizer.

Contract: trainers, schedules and checkpoints use `MuonAndAdamW` like any `torch.optim.Optimizer`. A step of Muon
changes a matrix's output for any input by about the learning rate, whatever the matrix's size. So one rate works for
small and for large targets. This module does not know heads or trainers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..network.packing import multiplies_bfloat16_fast

HAS_MUON = hasattr(torch.optim, "Muon")  # torch 2.9 and later
# Measured on two targets with 40, 400 and 4,000 steps (examples/experiments). A step moves a matrix by at most the
# rate, so short runs need larger rates to move far enough. Without the decay, the matrices of a long run grow until
# steps change nothing.
MUON_RATE, MUON_DECAY = 0.02, 0.1
FULL_RUN, MOST_TIMES = 400, 4.0
# Whether matrices of a variant are trained with Muon by default. The papers' variants are trained with AdamW.
WITH_MUON = {"clover-x": True, "clover-2": False, "clover": False, "medusa": False, "eagle-3": True}


def muon_rate(steps: int) -> float:
    """Muon's default learning rate for a run of `steps` steps."""
    return MUON_RATE * min(max((FULL_RUN / max(steps, 1)) ** 0.5, 1.0), MOST_TIMES)


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """`matrix` [m, n] with singular values of about 1: torch's Newton-Schulz iteration, in the matrix's precision."""
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Muon if HAS_MUON else torch.optim.Optimizer):  # type: ignore[misc]
    """torch's Muon, which iterates in bfloat16. On devices that have to emulate bfloat16 it iterates in float32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if multiplies_bfloat16_fast(self.param_groups[0]["params"][0].device):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                moment = state["momentum_buffer"]
                moment.lerp_(weight.grad, 1 - momentum)
                ahead = weight.grad.lerp(moment, momentum)  # Nesterov's
                update = orthogonalized(ahead.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)
        return loss


class MuonAndAdamW(torch.optim.Optimizer):
    """
    Args:
        params: parameters, or groups of them; each group may have its own `weight_decay`. Muon trains the parameters
            with two dimensions, AdamW the others.
        lr, betas, eps: for AdamW.
        muon_lr, momentum: for Muon.
        weight_decay: for both, unless a group has its own.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        muon_lr: float = 0.02,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        given: list[Any] = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices := _chosen(groups, lambda parameter: parameter.ndim == 2):
            self.parts.append(Muon(matrices, lr=muon_lr, weight_decay=weight_decay, momentum=momentum))
        if others := _chosen(groups, lambda parameter: parameter.ndim != 2):
            self.parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_groups()

    def set_muon_rate(self, rate: float) -> None:
        for part in self.parts:
            if isinstance(part, Muon):
                for group in part.param_groups:
                    group["lr"] = rate

    def _share_groups(self) -> None:
        """Use the groups of the parts as this optimizer's own, so that a schedule changes them in both."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def _chosen(groups: list[dict[str, Any]], wanted: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
    """The groups, reduced to the parameters that are `wanted`; groups without any are left out."""
    chosen = [
        {**group, "params": [parameter for parameter in group["params"] if wanted(parameter)]} for group in groups
    ]
    return [group for group in chosen if group["params"]]


__all__ = [
    "HAS_MUON",
    "MUON_DECAY",
    "MUON_RATE",
    "WITH_MUON",
    "Muon",
    "MuonAndAdamW",
    "multiplies_bfloat16_fast",
    "muon_rate",
]
