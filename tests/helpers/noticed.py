"""What a caller notices of a call of generate beside its tokens: a streamer's events, a cache, recorded scores."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class Events(BaseStreamer):
    """A streamer that keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def kept_of(cache: Any) -> list[tuple] | None:
    """Of each layer: its class, length, recording, and how much it keeps."""
    return None if cache is None else [_kept_of_layer(layer) for layer in getattr(cache, "layers", ())]


def _kept_of_layer(layer: Any) -> tuple:
    keys = getattr(layer, "keys", None)
    length = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else None
    shape = None if keys is None else tuple(keys.shape)
    return type(layer).__name__, length, getattr(layer, "record_past", None), shape


def are_near(theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor], off: float) -> bool:
    """Recorded scores or logits, of as many steps, up to `off`, absolute and relative."""
    pairs = zip(theirs, ours, strict=False)
    return len(theirs) == len(ours) and all(torch.allclose(a, b, rtol=off, atol=off, equal_nan=True) for a, b in pairs)
