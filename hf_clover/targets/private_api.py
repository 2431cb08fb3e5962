"""Every private name of transformers, trl and torch that is used outside the network, behind a name that explains it,
and the public names that their versions spell differently.

Contract: `why_unavailable` checks the names of transformers that decoding needs, and the parameters that are passed to
them, before a call of `generate` relies on them. Names that are merely good to have get a default here. `require`
checks the names that training needs, where they are imported. Other modules use no private name of another library.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PrefixConstrainedLogitsProcessor, PreTrainedModel

# The comment on each says why no public name will do.
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    # The loop of plain generate, for targets that cannot verify drafts: nothing public runs it on prepared inputs.
    "_sample": ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"),
    # Cuts off the tokens that a cache already holds, and runs in chunks: each version does both in another way.
    "_prefill": ("input_ids", "generation_config", "model_kwargs"),
    # Models override it to update inputs of their own.
    "_update_model_kwargs_for_generation": ("outputs", "model_kwargs"),
}


def allowed_by(processor: Any) -> "Callable[[int, torch.Tensor], list[int]] | None":
    """The `prefix_allowed_tokens_fn` that `processor` calls, or None. `generate` keeps the function nowhere else."""
    is_one = type(processor) is PrefixConstrainedLogitsProcessor
    return getattr(processor, "_prefix_allowed_tokens_fn", None) if is_one else None


@functools.cache
def cache_name() -> str:
    """The name of the cache in `generate`, in forwards and in their outputs: `cache` since transformers 5.24,
    `past_key_values` before."""
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), "cache")


def why_unavailable() -> str | None:
    """What speculation needs and this version of transformers lacks; None if nothing is missing."""
    for name, wanted in PRIVATE_NAMES.items():
        if not hasattr(GenerationMixin, name):
            return f"no `{name}`"
        found = _parameters(getattr(GenerationMixin, name))
        lost = set(wanted) - found
        if "*" not in found and lost:
            return f"no parameter `{min(lost)}` of `{name}`"
    return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters of `function`. `*` stands for `*args`: a wrapper of another library, whose names say
    nothing."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset("*" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name for parameter in parameters)


def require(owner: type, names: tuple[str, ...]) -> None:
    """Raise unless `owner`, a class of another library, has these methods, which a class of ours overrides."""
    for name in names:
        if not hasattr(owner, name):
            library = owner.__module__.partition(".")[0]
            raise ImportError(
                f"This version of {library} has no `{owner.__name__}.{name}`: install one that hf_clover supports."
            )


# ---------------------------------------------------------------------- one call of generate


def read_prompt(target: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, inputs: dict) -> Any:
    """The target's outputs for the prompt, computed in chunks if the config says so. Changes `inputs` in place."""
    return target._prefill(input_ids, config, inputs)  # type: ignore[operator]


def generate_plainly(target: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
    return target._sample(*arguments, **options)  # type: ignore[operator]


def inputs_after(target: PreTrainedModel, outputs: Any, inputs: dict, tokens: int = 1) -> dict[str, Any]:
    """The arguments of the next forward beside its tokens, after `tokens` more of them."""
    update = target._update_model_kwargs_for_generation
    asked = {"is_encoder_decoder": target.config.is_encoder_decoder, "num_new_tokens": tokens}
    return update(outputs, inputs, **asked)  # type: ignore[operator]


def inputs_of_step(
    target: PreTrainedModel, input_ids: torch.Tensor, inputs: dict, fed: int | None, wanted: int
) -> dict[str, Any]:
    """All arguments of a forward over the last `fed` tokens (None: the whole text), for `wanted` rows of logits."""
    prepare = target.prepare_inputs_for_generation
    made = prepare(input_ids, next_sequence_length=fed, **inputs)  # type: ignore[operator]
    if "logits_to_keep" in made:
        made["logits_to_keep"] = wanted
    return made


def makes_inputs_itself(target: PreTrainedModel) -> bool:
    """Whether the target's class overrides the methods that make a step's inputs."""
    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    return any(
        getattr(getattr(target, name), "__func__", None) is not getattr(GenerationMixin, name) for name in names
    )


def is_the_users(cache: Any) -> bool:
    """Whether the caller passed this cache, and so keeps it, or `generate` made it."""
    return cache is not None and getattr(cache, "_is_user_defined", False)


# ---------------------------------------------------------------------- a target


def looks_up_attention(target: PreTrainedModel) -> bool:
    """Whether the target's layers look up the attention implementation at every forward. Older models fix it when they
    are made."""
    return getattr(target, "_supports_attention_backend", False)


def attention_of(config: Any) -> str | None:
    return config._attn_implementation


def set_attention(config: Any, implementation: str | None) -> None:
    """Set it in this config only. `set_attn_implementation` would set it in the whole model, and check the name."""
    config._attn_implementation = {"": implementation}


def has_attention_by_name(query: torch.Tensor) -> bool:
    """Whether `attention_by_name` takes such queries [..., D]."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and is_half and query.shape[-1] % 8 == 0 and hasattr(torch.ops.aten, _EFFICIENT)


_EFFICIENT = "_scaled_dot_product_efficient_attention"


def attention_by_name(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the memory-efficient kernel, whatever torch would choose. The public way,
    `torch.nn.attention.sdpa_kernel`, switches the kernel for all threads."""
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])  # [B, K, n, C]
    return getattr(torch.ops.aten, _EFFICIENT)(query, key, value, mask, False, scale=scale)[0]


def efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_by_name`, and the log-sum-exps [B, K, n], which no public function returns."""
    bias = bias.expand(*query.shape[:3], key.shape[2])
    out, sums, *_ = getattr(torch.ops.aten, _EFFICIENT)(query, key, value, bias, True, scale=scale)
    return out, sums[..., : query.shape[2]]  # the kernel pads them to whole blocks


def flash_attention_of_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    longest: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of S sequences -> the output [S, R, D] and the log-sum-exps [S, R].

    `query` [S, R, D] is one token with R heads per sequence; `key` and `value` [T, 1, D] are all tokens. `where`, of
    int32: the numbers 0 to S, the beginnings [S + 1] of the sequences, and their lengths [S]. The kernel divides a
    sequence among blocks if it has one query token, with more heads than its keys have. The public way,
    `torch.nn.attention.varlen`, launches one more kernel."""
    order, starts, lengths = where
    sizes: tuple = (1, longest, 0.0, False, False)  # query tokens and keys of a sequence; no dropout, not causal
    asked: dict = {"scale": scale, "seqused_k": lengths}
    out, sums, *_ = torch.ops.aten._flash_attention_forward(query, key, value, order, starts, *sizes, **asked)
    return out, sums.view(query.shape[1], len(query)).T


def is_compiled(target: PreTrainedModel) -> bool:
    """Whether the target's forward is compiled, by `target.compile()` or by replacing `target.forward`."""
    is_replaced = hasattr(target.forward, "_torchdynamo_orig_callable")
    return is_replaced or getattr(target, "_compiled_call_impl", None) is not None


def experts_of(target: PreTrainedModel) -> str | None:
    """The implementation of the target's experts; None if it has no experts, or only one implementation."""
    can_choose = getattr(target, "_can_set_experts_implementation", bool)()
    return getattr(target.config, "_experts_implementation", None) if can_choose else None


def as_for_decoding(target: PreTrainedModel) -> AbstractContextManager:
    """The context in which `generate` runs steps of one token; it does nothing if transformers has none."""
    optimise = getattr(target, "_optimize_model_for_decode", None)
    return nullcontext() if optimise is None else optimise()


# ---------------------------------------------------------------------- transformers serve


def response_parser(tokenizer: Any, target: PreTrainedModel, prompt: list[int], tools: Any) -> Any:
    """A parser that separates reasoning and tool calls from text in this model's answers. None if transformers has no
    parser for this model, or no parsers at all."""
    try:
        from transformers.cli.serving.utils import build_response_parser
    except (ImportError, NameError):
        return None
    return build_response_parser(tokenizer, target, prompt, tools=tools)
