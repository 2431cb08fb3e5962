"""Which targets can verify a tree, and what is done for those that cannot.

Contract: `choose_route` returns "tree", "chain", "replayed chain" (`target/chains.py`) or "plain", and the reason. It
reads what the config says and *measures* the rest once per target: the loop's own code verifies a small tree, or some
chains, and their logits are compared with those of plain forwards over the same tokens. So an unknown architecture
gets plain generate and a reason, never a wrong token. If a made-up Llama cannot verify a tree either, the reason is
the version of transformers and not the target.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin

from .._versions import installed_version, wanted
from ..network.target_parts import device_of
from ..targets.made_up import made_up_llama
from ..targets.private_api import attention_of, cache_name, makes_inputs_itself
from .target.attention import shared_heads
from .target.graph_rules import tell_why_no_graphs, why_no_graphs
from .target.memory import memory_of
from .target.trial import (
    ChangingInputError,
    NotANumberError,
    chain_error,
    left_as_it_was,
    own_inputs,
    precision_of,
    rounding_tolerance,
    tree_error,
)

TREE, CHAIN, REPLAYED, PLAIN = "tree", "chain", "replayed chain", "plain"
TREE_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
CLOSER = 0.1  # factor of the tolerance for replayed chains: a recurrent state keeps every error
LARGEST_TREE = 512  # more slots than any step uses beyond the text


class CloverWarning(UserWarning):
    """Something was not done in the way that the caller asked for; the tokens are right all the same."""


def warn(message: str) -> None:
    warnings.warn(f"hf_clover: {message}.", CloverWarning, stacklevel=3)


@dataclass(frozen=True)
class Route:
    method: str  # "tree", "chain", "replayed chain" or "plain"
    reason: str | None = None
    steps: bool = False  # recurrent layers take the tokens of a forward one by one
    in_graphs: bool = False  # forwards over trees are captured
    is_understood: bool = True  # False: `reason` is about this version of transformers, not the target

    def complaint(self, target: PreTrainedModel) -> str:
        """The text of a warning: what is not done as asked, and why."""
        instead = "plain `generate` is used" if self.method == PLAIN else "chains are drafted"
        if not self.is_understood:
            return f"{self.reason}. Until then {instead}"
        drafts = "drafts here" if self.method == PLAIN else "a tree"
        return f"`{type(target).__name__}` cannot verify {drafts} ({self.reason}); {instead} instead"


AS_TREES = Route(TREE)


def choose_route(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    longest: int,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Route:
    """`longest`: tokens of the longest text that `input_ids` [B, T] may become."""
    cache = model_kwargs.get(cache_name())
    if not model_kwargs.get("use_cache", True):
        return Route(PLAIN, "`use_cache=False` leaves nothing to draft from")
    if target.training and any(getattr(module, "gradient_checkpointing", False) for module in target.modules()):
        return Route(PLAIN, "gradient checkpointing keeps no cache in training mode; call `.eval()` on the target")
    kind = None if cache is None else type(cache)
    if kind not in (None, DynamicCache, StaticCache) or getattr(cache, "offloading", False):
        kept = "an offloaded cache" if getattr(cache, "offloading", False) else f"a `{type(cache).__name__}`"
        return Route(PLAIN, f"a tree cannot be kept in {kept}")
    if input_ids.dim() > 2:  # [B, T, codebooks]
        return Route(PLAIN, f"each place of its text holds {input_ids.shape[-1]} numbers, and not one token")
    reason = _why_only_one_by_one(target, input_ids.shape[1], longest, model_kwargs)
    if reason is not None:
        return Route(PLAIN, reason)
    own = own_inputs(target, input_ids, model_kwargs)
    eager_since = why_no_graphs(target, generation_config)
    reason = _why_no_tree(target, own, eager_since is None) or _why_not_so_long(target, longest)
    if reason is None:
        if eager_since is None:
            eager_since = memory_of(target).why_no_graphs  # a trial may just have shown it
        if eager_since is not None:
            tell_why_no_graphs(target, eager_since)
        return Route(TREE, in_graphs=eager_since is None)
    route = _without_trees(target, len(input_ids), cache, reason, own)
    misunderstood = why_not_understood()
    return route if misunderstood is None else replace(route, reason=misunderstood, is_understood=False)


def _without_trees(
    target: PreTrainedModel, batch: int, cache: Cache | None, reason: str, own: dict[str, Any]
) -> Route:
    """The first kind of chain that is exact, else plain. `reason`: why no tree."""
    if type(cache) is StaticCache:  # in it, some of these (GPT-Neo) write another text than in a growing one
        return Route(PLAIN, f"{reason}, and chains are drafted only in a cache that grows, `generate`'s default")
    # Cropping would remove the past states that the caller's cache is to record.
    records = any(getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ()))
    for route in (
        *(() if records else (Route(CHAIN, reason),)),
        Route(REPLAYED, reason),
        Route(REPLAYED, f"{reason}, and its recurrent layers take tokens one by one", steps=True),
    ):
        why_not = _why_no_chain(target, route, batch, cache is not None, own)
        if why_not is None:
            return route
    return Route(PLAIN, f"{reason}; {why_not}")


@functools.cache
def why_not_understood() -> str | None:
    """None where a made-up Llama verifies a tree, as it does in every version of transformers that hf_clover supports.
    Called only when a target could not, and measured once per process: it takes half a second."""
    try:
        found = _why_no_tree(made_up_llama(), {}, in_graphs=False)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is None:
        return None
    return (
        f"transformers {installed_version('transformers')} is not understood: any Llama should give a tree the logits "
        f"of its paths, but a trial with a made-up one found: {found}. Install {wanted('transformers')}, or look for "
        "a newer hf_clover"
    )


# ---------------------------------------------------------------------- trees


def _why_no_tree(target: PreTrainedModel, own: dict[str, Any], in_graphs: bool) -> str | None:
    """None where a tree is verified exactly. `own`: what `own_inputs` returned."""
    config = target.config.get_text_config(decoder=True)
    # A layer that uses another layer's keys and values, or has no attention, has a `DummyLayer`.
    layers = [layer for layer in _cache_layers(config) if type(layer).__name__ != "DummyLayer"]
    if any(not isinstance(layer, CacheLayerMixin) for layer in layers):
        return "it keeps a recurrent or convolution state, which cannot branch"
    others = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if others:
        return f"its layers keep more than keys and values ({', '.join(sorted(others))})"
    kinds = set(getattr(config, "layer_types", None) or ()) - set(TREE_LAYERS)
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    parameters = inspect.signature(target.forward).parameters
    if cache_name() not in parameters:
        return f"its forward takes no `{cache_name()}`"
    if "position_ids" not in parameters:
        return "its forward takes no `position_ids`, so its positions are cache slots"
    if getattr(config, "alibi", False):
        return "alibi counts cache slots as positions"

    def measure() -> str | None:
        found = _measure(target, own, in_graphs)
        if found is not None and shared_heads(target) > 1:
            memory_of(target).is_never_packed = True
            found = _measure(target, own, in_graphs)
        return found

    try:
        return _found_once(target, (in_graphs, *_what_counts(target, own)), measure)
    except NotANumberError:
        return None  # the walk raises an error, and the next call measures again


def _found_once(target: PreTrainedModel, key: tuple, measure: Callable[[], str | None]) -> str | None:
    memory = memory_of(target)
    with memory.measuring:
        if key not in memory.why_not:
            memory.why_not[key] = measure()
        return memory.why_not[key]


def _why_not_so_long(target: PreTrainedModel, length: int) -> str | None:
    """Llama 4 scales its queries by cache slot, not position, from `floor_scale` slots on."""
    config = target.config.get_text_config(decoder=True)
    limit = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
    if limit is not None and length + LARGEST_TREE >= limit:
        return f"its attention temperature counts cache slots as positions from {limit} tokens on"
    return None


def _why_only_one_by_one(target: PreTrainedModel, start: int, end: int, model_kwargs: dict[str, Any]) -> str | None:
    """Some targets compute every token of a forward in another way once the text is longer than a limit. `start` and
    `end`: its length at first, and at most."""
    config = target.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    embeds = model_kwargs.get("inputs_embeds")
    if start == 0 and embeds is not None:  # then `max_length` does not count the prompt
        start, end = embeds.shape[1], end + embeds.shape[1]
    limit = getattr(config, "original_max_position_embeddings", None)
    if limit is not None and start <= limit < end:  # Phi-3 drops its cache there; related models drop more
        return f"its `generate` starts anew where the text grows past {limit} tokens"
    if config.model_type == "moshi" and end > config.sliding_window:
        return f"its cache forgets tokens beyond {config.sliding_window}, and its mask does not"
    for one in [p for p in parameters.values() if isinstance(p, dict)] or [parameters]:
        kind = one.get("rope_type") or "default"
        if "dynamic" in kind and end > config.max_position_embeddings:
            return f"its {kind} rotary embedding changes with every token beyond {config.max_position_embeddings}"
        if kind == "longrope" and start <= (limit := one["original_max_position_embeddings"]) < end:
            return f"its {kind} rotary embedding changes where the text grows past {limit} tokens"
    return None


def _cache_layers(config: Any) -> list[Any]:
    try:
        return DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a config transformers' own caches cannot read
        return [None]


def _what_counts(target: PreTrainedModel, own: dict[str, Any]) -> tuple:
    """Everything that a trial's outcome depends on."""
    config = target.config.get_text_config(decoder=True)
    own_names = (makes_inputs_itself(target), *sorted(own))
    return attention_of(config), target.dtype, precision_of(target), device_of(target), target.training, own_names


def _measure(target: PreTrainedModel, own: dict[str, Any], in_graphs: bool) -> str | None:
    try:
        with left_as_it_was(target):
            worst = tree_error(target, own, in_graphs)
        if worst <= rounding_tolerance(target):
            return None
        by = f"(by {worst:.1e} of their spread)"
        drops = "; it is in training mode, where dropout is random: call `.eval()` on it" if target.training else ""
        reason = f"its logits for a trial tree differ from those of plain forwards {by}{drops}"
        of_replays = f"their replays give other logits {by}"
    except NotANumberError:
        raise
    except ChangingInputError as error:
        return f"its class makes another `{error}` for every step, and the nodes of a tree belong to several steps"
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        reason, of_replays = f"a trial tree failed in it ({what})", f"a trial of them failed ({what})"
    if not in_graphs:
        return reason
    why_not_eagerly = _measure(target, own, in_graphs=False)
    if why_not_eagerly is None:
        memory_of(target).why_no_graphs = of_replays
    return why_not_eagerly


# ---------------------------------------------------------------------- chains


def _why_no_chain(
    target: PreTrainedModel, route: Route, batch: int, has_cache: bool, own: dict[str, Any]
) -> str | None:
    """None where chains are verified exactly."""
    replays = route.method == REPLAYED

    def measure() -> str | None:
        try:
            with left_as_it_was(target):
                worst = chain_error(target, replays, route.steps, min(batch, 2), has_cache, own)
        except NotANumberError:
            raise
        except Exception as error:
            return f"a trial chain failed in it ({type(error).__name__}: {error})"
        if worst <= rounding_tolerance(target) * (CLOSER if replays else 1):
            return None
        return f"several tokens in one forward get other logits than one by one (by {worst:.1e} of their spread)"

    try:
        key = (route.method, route.steps, batch > 1, has_cache, *_what_counts(target, own))
        return _found_once(target, key, measure)
    except NotANumberError:
        return "its logits are NaN"
