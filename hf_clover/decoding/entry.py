"""Both doors lead here: `generate_with` checks what can be checked, chooses the route and takes it.

Contract: everything that can be known before a token is generated is refused here, by the argument's name. What a
target cannot do falls back with one warning. The hook and `custom_generate=heads.generate_with` both call this.
"""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.utils import logging

from ..network.modeling_clover import CloverHeads
from ..network.target_parts import device_of, unwrap
from .budget import check_nodes
from .loop import CloverGenerateOutput, speculate
from .private_api import generate_plainly, why_unavailable
from .ranks import share_random_state
from .record import Speculation, report
from .state import Text
from .support import PLAIN, TREE, Route, choose_route, warn

logger = logging.get_logger(__name__)


def generate_with(
    heads: CloverHeads,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    num_assistant_tokens: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """`speculate`, after everything that can be known before a token is generated has been checked."""
    refuse_what_cannot_work(model, generation_config)
    refuse_empty_prompts(input_ids, model_kwargs)
    settings = (generation_config, "_clover_"), (heads.generation_config, "")  # the call's own before the heads'
    schedule = _first_set("num_assistant_tokens_schedule", settings)
    if num_assistant_tokens is None:
        num_assistant_tokens = _first_set("num_assistant_tokens", settings)
    check_nodes(num_assistant_tokens)
    check_memory(heads)
    place_heads(heads, model)
    heads.bind(model)
    share_random_state(model)
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
    text = Text.start(*arguments, streamer)
    lacking = why_unavailable(model)
    if lacking is None:
        route = choose_route(model, text, generation_config, model_kwargs)
    else:
        route = Route(PLAIN, f"transformers has {lacking}")
    options = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
    if route.method == PLAIN:
        warn(f"`{type(model).__name__}` cannot verify drafts here ({route.reason}); plain generate is used instead")
        return with_plain_record(generate_plainly(model, *arguments, **options), input_ids.shape[1], route.reason)
    if route.method != TREE:
        warn(f"`{type(model).__name__}` cannot verify a tree ({route.reason}); chains are drafted instead")
        text = Text.start(*arguments, streamer, all_as_one=True)
    budget = {"num_assistant_tokens": num_assistant_tokens, "is_ceiling": schedule not in (None, "constant")}
    return speculate(model, heads, input_ids, text, model_kwargs, **budget, synced_gpus=synced_gpus, route=route)


def _first_set(name: str, settings: tuple[tuple[GenerationConfig, str], ...]) -> Any:
    values = (getattr(config, prefix + name, None) for config, prefix in settings)
    return next((value for value in values if value is not None), None)


def with_plain_record(result: Any, prompt_length: int, reason: str | None) -> Any:
    """What plain generate gave, with the record of it: one token a forward, and why."""
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    steps = sequences.shape[1] - prompt_length
    stats = Speculation(method="plain", reason=reason, target_forwards=steps)
    stats.new_tokens = stats.row_forwards = steps * len(sequences)
    return _with_speculation(result, stats)


def _with_speculation(result: Any, stats: Speculation) -> Any:
    report(stats)
    if isinstance(result, torch.Tensor):
        return result
    return CloverGenerateOutput(**dict(result.items()), speculation=stats)


# ---------------------------------------------------------------------- refusals


def plain_mode(config: GenerationConfig) -> GenerationMode:
    return GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH


def refuse_what_cannot_work(
    model: PreTrainedModel, config: GenerationConfig, mode: GenerationMode = GenerationMode.ASSISTED_GENERATION
) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"`assistant_model`: Clover heads draft for decoder-only models, and `{type(model).__name__}` is an "
            "encoder-decoder. Call `generate` without `assistant_model`."
        )
    if (config.num_beams or 1) > 1 or mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"`num_beams={config.num_beams}`: Clover heads work with greedy decoding and sampling. Leave `num_beams` "
            "at 1, or call `generate` without `assistant_model`."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(
                f"`{name}=True` is not supported with Clover heads: a forward covers a whole tree, so there is no "
                "such tensor per token. Call the target on the finished sequences for them."
            )


def refuse_empty_prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    if input_ids.shape[1] == 0 and embeds is None:
        raise ValueError(
            f"`input_ids` of shape {tuple(input_ids.shape)} is empty: a prompt needs at least one token (a "
            "beginning-of-sequence token will do)."
        )
    if mask is not None:
        empty = (mask.sum(dim=1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"`attention_mask` leaves batch row {empty[0]} without a prompt: every row needs at least one token "
                "(a beginning-of-sequence token will do), or leave the row out of the batch."
            )


def check_memory(heads: CloverHeads) -> None:
    if heads.text_memory is not None and not heads.config.draft_copies:
        raise ValueError(
            "`heads.text_memory` is set, and `heads.config.draft_copies=0` copies nothing from it: set the second to "
            "10, as new heads have it, or the first to None."
        )


def place_heads(heads: CloverHeads, model: PreTrainedModel) -> None:
    """Heads on another device are moved to where the target's hidden states are; another dtype is kept and cast to."""
    if any(parameter.is_meta for parameter in heads.parameters()):
        raise ValueError(
            "`assistant_model` is on the meta device, so its weights were never loaded: load the heads with "
            "`AutoModel.from_pretrained(...)`, or give them memory and weights."
        )
    if any(parameter.is_meta for parameter in model.parameters()) and not hasattr(model, "hf_device_map"):
        raise ValueError("the target is on the meta device: load its weights before calling `generate`.")
    lm_head = unwrap(model).get_output_embeddings()
    device = device_of(model, lm_head)
    if heads.device == device:
        return
    spread = sorted(map(str, set(getattr(heads, "hf_device_map", {}).values())))
    if len(spread) > 1:
        raise ValueError(
            f"`assistant_model` is spread over several devices ({', '.join(spread)}), "
            f"while drafting happens on one: load the heads with `device_map={{'': '{device}'}}`."
        )
    logger.info(f"Moving the Clover heads from {heads.device} to {device}, where the target ends.")
    heads.to(device)
