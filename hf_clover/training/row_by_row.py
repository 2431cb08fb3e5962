"""Generation for many prompts at once, in which no answer depends on the other prompts.

Contract: `decode`, passed to `model.generate(..., custom_generate=...)`, returns the greedy tokens that `generate`
itself would return. It differs in two things. Rows that have ended leave the batch, so they do not slow down the
others. Each row is sampled with random numbers of its own, so its text does not depend on the rest of the batch.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..decoding.call import Text
from ..targets.private_api import cache_name, inputs_after, read_prompt


def own_seed(ids: Sequence[int], seed: int) -> int:
    """The seed of this prompt's generator of random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {list(ids)}".encode()).digest()[:8], "big", signed=True)


def own_random_numbers(ids: Sequence[int], seed: int, count: int) -> torch.Tensor:
    """Random numbers [count] from 0 to 1, which depend only on the prompt and the seed."""
    return torch.rand(count, dtype=torch.float32, generator=torch.Generator().manual_seed(own_seed(ids, seed)))


def pick(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Tokens [B] from probabilities [B, V] and random numbers [B]: the first whose running sum exceeds the number."""
    sums = probs.cumsum(-1)  # [B, V]
    passed = numbers[:, None] * sums[:, -1:] * (1 - 2**-22)  # below the last sum, whatever the rounding
    return torch.searchsorted(sums, passed, right=True)[:, 0]


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    numbers: torch.Tensor | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Sequences [B, T]. `numbers` [B, most new tokens] are the random numbers for sampling; without them, greedy."""
    text = Text.start(input_ids, logits_processor, stopping_criteria, generation_config, None)
    may_leave = (
        text.scores_decide  # processors that read the text may keep state per row
        and not text.in_lockstep
        and type(model_kwargs.get(cache_name())) is DynamicCache
        and model.config.get_text_config() is model.config  # such models keep image positions per row
    )
    written, rows = list(input_ids), torch.arange(len(input_ids), device=input_ids.device)  # rows: still in the batch
    ended, step = torch.zeros_like(rows, dtype=torch.bool), 0
    outputs = read_prompt(model, input_ids, generation_config, model_kwargs)
    while True:
        model_kwargs = inputs_after(model, outputs, model_kwargs)
        logits = outputs.logits[:, -1].to(input_ids.device, torch.float32, copy=True)  # [B, V]
        scores = logits_processor(input_ids, logits)  # type: ignore[arg-type]  # [B, V]
        if numbers is None:
            tokens = scores.argmax(-1)  # [B]
        else:
            tokens = pick(scores.softmax(-1), numbers[rows, step])  # [B]
        if text.pad is not None:
            tokens = tokens.masked_fill(ended, text.pad)
        input_ids = torch.cat((input_ids, tokens[:, None]), dim=-1)  # [B, L + 1]
        ended |= stopping_criteria(input_ids, None)
        step += 1
        going_on = (~ended).nonzero()[:, 0]
        is_over = len(going_on) == 0
        if is_over or (may_leave and len(going_on) < len(rows)):  # copies the cache, as any step does
            for place in ended.nonzero()[:, 0].tolist():
                written[int(rows[place])] = input_ids[place]
            if is_over:
                break
            input_ids, rows, ended = input_ids[going_on], rows[going_on], ended[going_on]
            model_kwargs[cache_name()].batch_select_indices(going_on)
            for name in ("attention_mask", "position_ids"):
                if model_kwargs.get(name) is not None:
                    model_kwargs[name] = model_kwargs[name][going_on]
        new = 1 if model_kwargs.get("use_cache") else None
        inputs = model.prepare_inputs_for_generation(  # type: ignore[operator]
            input_ids, next_sequence_length=new, **model_kwargs
        )
        outputs = model(**inputs, return_dict=True)
    return pad_sequence(written, batch_first=True, padding_value=text.pad or 0)


__all__ = ["decode", "own_random_numbers", "own_seed", "pick"]
