"""Where speculation enters transformers.

Contract: with the hook installed, `generate(assistant_model=heads)` reaches `entry.generate_with`; every other call
reaches transformers' own code unchanged. Heads are known by `config.model_type`, since remote code is another class
object. Where a private name of transformers is gone that speculation relies on, installing says so, and `generate`
with heads is plain `generate`: the same tokens, one at a time. Nothing else of ours is imported before heads are seen.
"""

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.generation.utils import GenerationMixin

from .private_api import originals, why_unavailable

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

HOOKED_NAMES = ("_assisted_decoding", "_validate_generation_mode", "_prepare_generation_config")
_installed: dict[str, Callable[..., Any]] = {}
_is_active = False


def is_clover(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) == "clover"


def is_installed() -> bool:
    """Whether heads given to `generate` speculate there, and not only stand aside."""
    return _is_active and set(HOOKED_NAMES) <= set(_installed)


def install_hook() -> None:
    """Let `generate(assistant_model=heads)` speculate. Done by `import hf_clover`; doing it again changes nothing."""
    global _is_active
    lacking = why_unavailable()
    if lacking is not None:
        warnings.warn(
            f"hf_clover: this version of transformers has {lacking}, so drafting is off, and `generate` with heads "
            "is plain `generate`. Install a version that hf_clover supports, or look for a newer hf_clover.",
            UserWarning,
            stacklevel=2,
        )
    for name, wrapper in (_WRAPPERS if lacking is None else {"generate": _generate_plainly}).items():
        if name not in _installed:
            originals[name] = getattr(GenerationMixin, name)
            _installed[name] = functools.wraps(originals[name])(wrapper)
            setattr(GenerationMixin, name, _installed[name])
    _is_active = True


def uninstall_hook() -> None:
    """Leave `generate` as transformers made it. Doing it again changes nothing."""
    global _is_active
    _is_active = False
    for name, wrapper in list(_installed.items()):
        # Where another library has wrapped ours since, ours stays in its chain and passes everything through.
        if getattr(GenerationMixin, name) is wrapper:
            setattr(GenerationMixin, name, originals[name])
            del _installed[name]


def _prepare_generation_config(
    self: "PreTrainedModel", generation_config: "GenerationConfig | None", **kwargs: Any
) -> tuple["GenerationConfig", dict[str, Any]]:
    """Remembers the call's own tree size and schedule, which transformers' defaults would hide."""
    prepared = originals["_prepare_generation_config"](self, generation_config, **kwargs)
    for name in ("num_assistant_tokens", "num_assistant_tokens_schedule"):
        asked = kwargs.get(name, getattr(generation_config, name, None))
        if _is_active and asked is not None:
            setattr(prepared[0], f"_clover_{name}", asked)
    return prepared


def _validate_generation_mode(
    self: "PreTrainedModel", generation_mode: Any, generation_config: "GenerationConfig", generation_mode_kwargs: dict
) -> None:
    """What transformers refuses for assistants in general, heads can do; what heads cannot, is refused here."""
    validate = originals["_validate_generation_mode"]
    if not _is_active or not is_clover(generation_mode_kwargs.get("assistant_model")):
        return validate(self, generation_mode, generation_config, generation_mode_kwargs)
    from .entry import plain_mode, refuse_what_cannot_work

    refuse_what_cannot_work(self, generation_config, generation_mode)
    kept = {k: v for k, v in generation_mode_kwargs.items() if k not in ("assistant_model", "assistant_tokenizer")}
    return validate(self, plain_mode(generation_config), generation_config, kept)


def _assisted_decoding(self: "PreTrainedModel", input_ids: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
    if not _is_active or not is_clover(kwargs.get("assistant_model")):
        return originals["_assisted_decoding"](self, input_ids, *args, **kwargs)
    from .entry import generate_with

    for name in ("assistant_tokenizer", "tokenizer", "inputs_tensor"):
        kwargs.pop(name, None)
    return generate_with(kwargs.pop("assistant_model"), self, input_ids, *args, **kwargs)


def _generate_plainly(self: "PreTrainedModel", *args: Any, **kwargs: Any) -> Any:
    """`generate` where something is lacking: heads, and what is asked of them, are left out."""
    if not _is_active or not is_clover(kwargs.get("assistant_model")):
        return originals["generate"](self, *args, **kwargs)
    from .entry import with_plain_record

    for name in ("assistant_model", "assistant_tokenizer", "num_assistant_tokens", "num_assistant_tokens_schedule"):
        kwargs.pop(name, None)
    result = originals["generate"](self, *args, **kwargs)
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    return with_plain_record(result, 0 if prompt is None else prompt.shape[1], f"transformers has {why_unavailable()}")


_WRAPPERS = {
    "_assisted_decoding": _assisted_decoding,
    "_validate_generation_mode": _validate_generation_mode,
    "_prepare_generation_config": _prepare_generation_config,
}
