"""Where speculation enters transformers.

Contract: with the hook installed, `generate(assistant_model=heads)` runs transformers' own `generate`, whose decoding
loop is `entry.generate_with`; every other call reaches transformers' code unchanged. Only the public `generate` is
wrapped. Heads are recognized by their attributes (`are_heads`), since remote code makes another class object. If
transformers lacks something that decoding needs, `install_hook` warns, and `generate` with heads is plain `generate`:
the same tokens, one at a time.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from ..network.modeling_heads import DraftHeads
from ..targets.private_api import why_unavailable
from .entry import generate_through

_transformers: Any = GenerationMixin  # `generate` of this class is replaced
_original: Callable[..., Any] | None = None  # transformers' generate, while ours is in its place
_is_active = False


def are_heads(model: Any) -> bool:
    """Whether `model` drafts as this library's heads do; found without importing a class."""
    return hasattr(model, "new_drafter") and hasattr(model, "feature_layers")


def is_installed() -> bool:
    """Whether heads given to `generate` speculate there."""
    return _is_active and why_unavailable() is None


def install_hook() -> None:
    """Let `generate(assistant_model=heads)` speculate. `import hf_clover` does this; doing it again changes nothing.

    Example:

    ```python
    >>> import hf_clover

    >>> hf_clover.uninstall_hook()
    >>> hf_clover.install_hook()
    ```
    """
    global _original, _is_active
    lacking = why_unavailable()
    if lacking is not None:
        warnings.warn(
            f"hf_clover: this version of transformers has {lacking}, so drafting is off, and `generate` with heads "
            "is plain `generate`. Install a version that hf_clover supports, or look for a newer hf_clover.",
            UserWarning,
            stacklevel=2,
        )
    if _original is None:
        _original = GenerationMixin.generate
        _transformers.generate = functools.wraps(_original)(_generate)
    _is_active = True


def uninstall_hook() -> None:
    """Leave `generate` as transformers made it. Doing it again changes nothing.

    Example:

    ```python
    >>> from hf_clover import install_hook, uninstall_hook
    >>> from transformers import GenerationMixin

    >>> ours = GenerationMixin.generate
    >>> uninstall_hook()
    >>> GenerationMixin.generate is ours
    False
    >>> install_hook()
    ```
    """
    global _original, _is_active
    _is_active = False
    # If another library has wrapped our function since, it stays in that chain and passes every call on.
    if _transformers.generate is _generate:
        _transformers.generate, _original = _original, None


def _generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate`, with another decoding loop where heads are given."""
    original = _original or _transformers.generate
    call = {**dict(zip(_positional_names(original), args)), **kwargs}
    heads = _heads_of(call) if _is_active else None
    if heads is None:
        return original(self, *args, **kwargs)
    return generate_through(original, heads, self, call)


@functools.cache
def _positional_names(generate: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the positional parameters after `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(generate).parameters.values() if p.kind in kinds)[1:]


def _heads_of(call: dict[str, Any]) -> DraftHeads | None:
    """The heads that this call is to draft with: `assistant_model`, or those of `custom_generate`."""
    loop, assistant = call.get("custom_generate"), call.get("assistant_model")
    if isinstance(assistant, (str, os.PathLike)):
        raise TypeError(
            f"`assistant_model={str(assistant)!r}` is a name, and `generate` takes a model: pass "
            f"`assistant_model=AutoModel.from_pretrained({str(assistant)!r})`, loaded once for all calls."
        )
    if loop is not None:
        owner = getattr(loop, "__self__", None)
        return owner if are_heads(owner) and loop.__name__ == "generate_with" else None
    if not are_heads(assistant) or call.get("cache_implementation") == "paged":  # transformers refuses heads with it
        return None
    return assistant
