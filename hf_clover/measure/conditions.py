"""What a reader needs to judge figures: the target, the prompts, the chat template, and the prompts that were left
out."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..network.packing import is_packed
from .prompts import Question, kind_of, prompt_after
from .provenance import provenance

logger = logging.get_logger(__name__)


def that_fit(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Question | list[int]],
    max_new_tokens: int,
) -> tuple[list[Question | list[int]], list[dict[str, Any]]]:
    """The prompts that fit into the target's positions with their longest answers, and a list of the others."""
    most = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    fit: list[Question | list[int]] = []
    left_out: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        _, turns = kind_of(prompt)
        tokens = len(prompt_after(prompt, [""] * (turns - 1), tokenizer)) + turns * max_new_tokens
        if most is None or tokens <= most:
            fit.append(prompt)
        else:
            question = prompt.id if isinstance(prompt, Question) else None
            left_out.append({"prompt": number, "question": question, "tokens": tokens})
    if left_out:
        longest = max(one["tokens"] for one in left_out)
        said = (
            f"{len(left_out)} of {len(prompts)} prompts are too long for the target's {most} positions (up to "
            f"{longest} tokens, with `max_new_tokens={max_new_tokens}` for each answer)"
        )
        if not fit:
            raise ValueError(f"{said}: pass shorter ones, or fewer `max_new_tokens`.")
        logger.warning(f"{said}; they are left out.")
    return fit, left_out


def template_of(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Question | list[int]]) -> dict[str, Any]:
    """The chat template applied to a question, and whether the target thinks first (None: the template has no switch
    for it)."""
    if getattr(tokenizer, "chat_template", None) is None or not any(isinstance(p, Question) for p in prompts):
        return {"chat_template": None, "thinking": None}

    def made(**switch: Any) -> str:
        messages = [{"role": "user", "content": "QUESTION"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
        return text  # type: ignore[return-value]  # for one conversation it returns no list

    thinking = None
    for name in ("enable_thinking", "thinking"):
        on, off = made(**{name: True}), made(**{name: False})
        thinking = made() == on if on != off else thinking
    return {"chat_template": made(), "thinking": thinking}


def _name_of(target: PreTrainedModel) -> str:
    """The name of the target's repository or folder. For a folder named "target" or "model": the model type and
    size."""
    name = Path(target.config.name_or_path or "").name
    if name not in ("", "target", "model"):
        return name
    count, unit = target.num_parameters() / 1e3, "K"
    for larger in "MB":
        if count >= 1e3:
            count, unit = count / 1e3, larger
    return f"{target.config.model_type}-{count:.{'1f' if count < 10 else '0f'}}{unit}"


def circumstances(
    target: PreTrainedModel, prompt_set: str, prompts: Sequence[Any], max_new_tokens: int
) -> dict[str, Any]:
    """The target, the prompts, the machine and the date of a measurement."""
    return {
        "target": _name_of(target),
        "prompts": Path(prompt_set).name,
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "packed": any(is_packed(module) for module in target.modules()),
        **provenance(),
        "date": datetime.date.today().isoformat(),
    }
