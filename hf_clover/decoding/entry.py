"""From a call of `generate` to the decoding loop: `generate_with` checks the call and chooses a route.

Contract: arguments that cannot work are refused here, by name, before a token is generated. Where a target cannot
verify trees, the call falls back to chains or to plain generate, with one warning. The hook calls `generate_through`,
which runs transformers' own `generate` with `generate_with` as its loop (`custom_generate`). It also passes on what
transformers gives to no such loop: the streamer, the tokenizer, `synced_gpus` and the size of trees.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode
from transformers.utils import logging

from ..network.modeling_heads import DraftHeads
from ..network.target_parts import device_of, unwrap
from ..targets.private_api import generate_plainly, why_unavailable
from .budget.fixed import check_nodes
from .call import Text, longest_text, room_beside
from .loop import speculate
from .processes import goes_in_step, share_random_state, tensor_parallel_group
from .record import Speculation, with_record
from .route import PLAIN, TREE, Route, choose_route, warn

logger = logging.get_logger(__name__)


# Arguments of the call that go to the heads, and not to transformers' `generate`.
DRAFTING = ("num_assistant_tokens", "num_assistant_tokens_schedule")
NOT_PASSED = (*DRAFTING, "assistant_model", "assistant_tokenizer", "custom_generate")


def generate_through(
    original: Callable[..., Any], heads: DraftHeads, model: PreTrainedModel, call: dict[str, Any]
) -> Any:
    """`original`, transformers' `generate`, with `generate_with` as its loop. `call`: all arguments by name."""
    passed = {name: value for name, value in call.items() if name not in NOT_PASSED}
    lacking = why_unavailable()
    if lacking is not None:
        result, prompt = original(model, **passed), call.get("inputs", call.get("input_ids"))
        return with_plain_record(result, 0 if prompt is None else prompt.shape[1], f"transformers has {lacking}")
    bound = {name: _asked(name, call) for name in DRAFTING}
    bound["streamer"] = call.get("streamer")
    bound["synced_gpus"] = goes_in_step(model) if call.get("synced_gpus") is None else call["synced_gpus"]

    def loop(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> Any:
        return generate_with(heads, model, input_ids, **{**prepared, **bound})

    return original(model, **_without_tokenizer(model, passed), custom_generate=loop)


def _asked(name: str, call: dict[str, Any]) -> Any:
    """The value of a setting: an argument of the call, else in its `generation_config`."""
    return call.get(name, getattr(call.get("generation_config"), name, None))


def _without_tokenizer(model: PreTrainedModel, call: dict[str, Any]) -> dict[str, Any]:
    """The call without its tokenizer, which transformers does not pass to a custom loop. What needs a tokenizer (stop
    strings, token healing) is done here."""
    call = dict(call)
    tokenizer, config, own = call.pop("tokenizer", None), call.get("generation_config"), model.generation_config
    settings = {name: _asked(name, call) for name in ("stop_strings", "token_healing")}
    settings = {name: getattr(own, name) if value is None else value for name, value in settings.items()}
    if tokenizer is None or not any(settings.values()):
        return call
    if settings["stop_strings"]:
        criterion = StopStringCriteria(tokenizer, settings["stop_strings"])
        call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or ()), criterion])
    if settings["token_healing"]:
        prompt = "inputs" if call.get("inputs") is not None else "input_ids"
        call[prompt] = model.heal_tokens(call[prompt], tokenizer)  # type: ignore[operator]
    if config is not None:
        call["generation_config"] = config = copy.deepcopy(config)
    for name in settings:  # done
        call.pop(name, None)
        if config is not None:
            setattr(config, name, None)
        if config is None or getattr(own, name):
            call[name] = None
    return call


def generate_with(
    heads: DraftHeads,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    num_assistant_tokens: int | None = None,
    num_assistant_tokens_schedule: str | None = None,
    **model_kwargs: Any,
) -> Any:
    """Check everything that can be checked before a token is generated, then run `speculate` or plain generate."""
    refuse_what_cannot_work(model, generation_config)
    refuse_empty_prompts(input_ids, model_kwargs)
    if num_assistant_tokens is None:
        num_assistant_tokens = heads.generation_config.num_assistant_tokens
    if num_assistant_tokens_schedule is None:
        num_assistant_tokens_schedule = heads.generation_config.num_assistant_tokens_schedule
    longest = longest_text(stopping_criteria, generation_config)
    check_nodes(num_assistant_tokens, room_beside(generation_config, longest))
    check_memory(heads)
    place_heads(heads, model)
    heads.bind(model)
    group = tensor_parallel_group(model)
    share_random_state(model, group)
    arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
    lacking = why_unavailable()
    if lacking is None:
        route = choose_route(model, input_ids, longest, generation_config, model_kwargs)
    else:
        route = Route(PLAIN, f"transformers has {lacking}", is_understood=False)
    if route.method != TREE:
        warn(route.complaint(model))
    if route.method == PLAIN:
        options = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        return with_plain_record(generate_plainly(model, *arguments, **options), input_ids.shape[1], route.reason)
    text = Text.start(*arguments, streamer, all_as_one=route.method != TREE)
    return speculate(
        *(model, heads, input_ids, text, model_kwargs, num_assistant_tokens),
        is_ceiling=num_assistant_tokens_schedule not in (None, "constant"),
        synced_gpus=synced_gpus,
        group=group,
        route=route,
    )


def with_plain_record(result: Any, prompt_length: int, reason: str | None) -> Any:
    """Plain generate's result with its record: one token per forward, and the reason."""
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    steps = sequences.shape[1] - prompt_length
    stats = Speculation(method="plain", reason=reason, target_forwards=steps)
    stats.new_tokens = stats.row_forwards = steps * len(sequences)
    return with_record(result, stats)


# ---------------------------------------------------------------------- refusals


# Settings that ask transformers for another way to decode.
OTHER_WAYS = (
    *("num_beams", "prompt_lookup_num_tokens", "use_mtp", "assistant_early_exit", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids"),
)


def refuse_what_cannot_work(model: PreTrainedModel, config: GenerationConfig) -> None:
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"`assistant_model`: Clover heads draft for decoder-only models, and `{type(model).__name__}` is an "
            "encoder-decoder. Call `generate` without `assistant_model`."
        )
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asked = ((name, getattr(config, name, None)) for name in OTHER_WAYS)
        name, value = next((name, value) for name, value in asked if value and (name, value) != ("num_beams", 1))
        raise ValueError(
            f"`{name}={value}`: Clover heads work with greedy decoding and sampling. Leave `{name}` out, or call "
            "`generate` without `assistant_model`."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(
                f"`{name}=True` is not supported with Clover heads: a forward covers a whole tree, so there is no "
                "such tensor per token. Call the target on the finished sequences to get them."
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


def check_memory(heads: DraftHeads) -> None:
    if heads.text_memory is not None and not heads.config.draft_copies:
        raise ValueError(
            "`heads.text_memory` is set, and `heads.config.draft_copies=0` copies nothing from it: set "
            "`draft_copies` to 10, the default of new heads, or `text_memory` to None."
        )


def place_heads(heads: DraftHeads, model: PreTrainedModel) -> None:
    """Move the heads to the device of the target's hidden states. Their dtype stays: hidden states are cast to it."""
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
    logger.info(f"Moving the Clover heads from {heads.device} to {device}, the device of the target's states.")
    heads.to(device)  # type: ignore[arg-type]  # transformers' wrapper counts `self` too
