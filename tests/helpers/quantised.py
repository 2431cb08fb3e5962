"""Stand-ins for what quantisers leave of linear layers: their numbers can be used but not read."""

import torch
from torch import nn


class FourBit(nn.Module):
    """Weights that are no floating point numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale, self.bias = linear.weight.detach().abs().max() / 7, linear.bias
        codes = (linear.weight.detach() / self.scale).round() + 8
        self.weight = nn.Parameter(codes.to(torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 8) * self.scale, self.bias)


class Float8(nn.Linear):
    """A floating point weight that means nothing without its scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.scale, self.bias = linear.weight.detach().abs().max() / 400, linear.bias
        codes = (linear.weight.detach() / self.scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantise(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))
    return model
