"""Every private name of transformers, trl and torch that is used outside the network, behind a name that explains it,
and the public names that their versions spell differently.

Contract: `why_unavailable` checks, before a call of `generate` relies on them, the names of transformers that decoding
cannot do without, with the parameters that are passed to them. What is merely good to have has a default here. What
training cannot do without is checked where it is imported, by `require`. Other modules use no private
name of another library.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.utils import GenerationMixin

# What each is for: why no public name will do.
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    # The loop of plain generate, for targets that cannot verify drafts: nothing public runs it on prepared inputs.
    "_sample": ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"),
    # Cuts off what a cache holds already, and goes in chunks: each version does it in another way.
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
    # Models override it, for inputs of their own.
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs"),
}


def generation_mixin() -> "type[GenerationMixin]":
    """Imported when it is asked for: importing it loads the hook, which needs this module whole."""
    from transformers.generation.utils import GenerationMixin

    return GenerationMixin


def allowed_by(processor: Any) -> "Callable[[int, torch.Tensor], list[int]] | None":
    """`prefix_allowed_tokens_fn` of a processor that asks one: `generate` wraps it, and keeps it nowhere else."""
    from transformers import PrefixConstrainedLogitsProcessor

    is_one = type(processor) is PrefixConstrainedLogitsProcessor
    return getattr(processor, "_prefix_allowed_tokens_fn", None) if is_one else None


@functools.cache
def cache_name() -> str:
    """What `generate`, forwards and their outputs call the cache: `cache` since transformers 5.24, and
    `past_key_values` before."""
    parameters = inspect.signature(generation_mixin().prepare_inputs_for_generation).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), "cache")


def why_unavailable() -> str | None:
    """What this version of transformers lacks that speculation needs; None where all is there."""
    for name, wanted in PRIVATE_NAMES.items():
        if not hasattr(generation_mixin(), name):
            return f"no `{name}`"
        found = _parameters(getattr(generation_mixin(), name))
        lost = set(wanted) - found
        if "*" not in found and lost:
            return f"no parameter `{min(lost)}` of `{name}`"
    return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Their names; `*` for `*args`, which another library's wrapper takes, and which tells nothing."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset("*" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name for parameter in parameters)


def require(owner: type, names: tuple[str, ...]) -> None:
    """`owner` of another library has these methods, which a class of ours overrides."""
    for name in names:
        if not hasattr(owner, name):
            library = owner.__module__.partition(".")[0]
            raise ImportError(
                f"This version of {library} has no `{owner.__name__}.{name}`: install one that hf_clover supports."
            )


# ---------------------------------------------------------------------- one call of generate


def read_prompt(target: "PreTrainedModel", input_ids: torch.Tensor, config: "GenerationConfig", inputs: dict) -> Any:
    """The target's outputs for the prompt, in chunks where the config says so. `inputs` gets what was made for it."""
    return target._prefill(input_ids, config, inputs)  # type: ignore[operator]


def generate_plainly(target: "PreTrainedModel", *arguments: Any, **options: Any) -> Any:
    return target._sample(*arguments, **options)  # type: ignore[operator]


def inputs_after(target: "PreTrainedModel", outputs: Any, inputs: dict, tokens: int = 1) -> dict[str, Any]:
    """What the next forward takes beside its tokens, once so many more are there."""
    update = target._update_model_kwargs_for_generation
    asked = {"is_encoder_decoder": target.config.is_encoder_decoder, "num_new_tokens": tokens}
    return update(outputs, inputs, **asked)  # type: ignore[operator]


def inputs_of_step(
    target: "PreTrainedModel", input_ids: torch.Tensor, inputs: dict, fed: int | None, wanted: int
) -> dict[str, Any]:
    """All that a forward over the last `fed` tokens takes (None: over the whole text), for `wanted` rows of logits."""
    prepare = target.prepare_inputs_for_generation
    made = prepare(input_ids, next_sequence_length=fed, **inputs)  # type: ignore[operator]
    if "logits_to_keep" in made:
        made["logits_to_keep"] = wanted
    return made


def makes_inputs_itself(target: "PreTrainedModel") -> bool:
    """Whether its class has a way of its own to make a step's inputs, and not every model's."""
    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    return any(
        getattr(getattr(target, name), "__func__", None) is not getattr(generation_mixin(), name) for name in names
    )


def is_the_users(cache: Any) -> bool:
    """Whether the caller passed this cache and so keeps it, and not generate made it."""
    return cache is not None and getattr(cache, "_is_user_defined", False)


# ---------------------------------------------------------------------- a target


def looks_up_attention(target: "PreTrainedModel") -> bool:
    """Whether its layers look the attention up anew at every forward; older ones are made for one implementation."""
    return getattr(target, "_supports_attention_backend", False)


def attention_of(config: Any) -> str | None:
    return config._attn_implementation


def set_attention(config: Any, implementation: str | None) -> None:
    """Of this config alone: `set_attn_implementation` would change all in the model, and check the name."""
    config._attn_implementation = {"": implementation}


def has_attention_by_name(query: torch.Tensor) -> bool:
    """Whether `attention_by_name` takes such queries [..., D]."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and is_half and query.shape[-1] % 8 == 0 and hasattr(torch.ops.aten, _EFFICIENT)


_EFFICIENT = "_scaled_dot_product_efficient_attention"


def attention_by_name(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the memory-efficient kernel, whichever torch would choose.
    `torch.nn.attention.sdpa_kernel`, the public way, switches for all threads."""
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])  # [B, K, n, C]
    return getattr(torch.ops.aten, _EFFICIENT)(query, key, value, mask, False, scale=scale)[0]


def efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_by_name`, and the log-sum-exps [B, K, n], which nothing public gives."""
    bias = bias.expand(*query.shape[:3], key.shape[2])
    out, sums, *_ = getattr(torch.ops.aten, _EFFICIENT)(query, key, value, bias, True, scale=scale)
    return out, sums[..., : query.shape[2]]  # there are as many as fill its blocks


def flash_attention_of_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [S, R, D] is one token with R heads for each sequence, key and value [T, 1, D] are all tokens; where: 0 to
    S, the beginnings [S + 1] of the sequences and their lengths [S], of int32 -> [S, R, D], log-sum-exps [S, R].
    The kernel divides a sequence among blocks where it has one query token, of more heads than its keys have.
    `torch.nn.attention.varlen`, the public way, launches a kernel more."""
    order, starts, lengths = where
    sizes: tuple = (1, longest, 0.0, False, False)  # query tokens and keys of a sequence; no dropout, not causal
    asked: dict = {"scale": scale, "seqused_k": lengths}
    out, sums, *_ = torch.ops.aten._flash_attention_forward(query, key, value, order, starts, *sizes, **asked)
    return out, sums.view(query.shape[1], len(query)).T


def is_compiled(target: "PreTrainedModel") -> bool:
    """Whether somebody has compiled its forward, by `target.compile()` or in its place."""
    is_replaced = hasattr(target.forward, "_torchdynamo_orig_callable")
    return is_replaced or getattr(target, "_compiled_call_impl", None) is not None


def experts_of(target: "PreTrainedModel") -> str | None:
    """How it computes a mixture's experts; None where it has none, or one way only."""
    can_choose = getattr(target, "_can_set_experts_implementation", bool)()
    return getattr(target.config, "_experts_implementation", None) if can_choose else None


def as_for_decoding(target: "PreTrainedModel") -> AbstractContextManager:
    """What generate does to a target for steps of one token, where it does something."""
    optimise = getattr(target, "_optimize_model_for_decode", None)
    return nullcontext() if optimise is None else optimise()


# ---------------------------------------------------------------------- transformers serve


def response_parser(tokenizer: Any, target: "PreTrainedModel", prompt: list[int], tools: Any) -> Any:
    """What tells reasoning and calls of tools from text in this model's answers; None where nothing is known of it, or
    this version of transformers has no such thing."""
    try:
        from transformers.cli.serving.utils import build_response_parser
    except (ImportError, NameError):
        return None
    return build_response_parser(tokenizer, target, prompt, tools=tools)
