"""Trials of a target: how far its logits for drafts are from those of plain forwards.

Contract: the loop's own code verifies a small tree, or some chains, and the logits are compared with those of plain
forwards over the same tokens. An error is the root mean square of the differences, divided by the standard deviation
of the plain logits. The arguments of a tree's forward are compared with those that plain generate would pass at each
step. The target is not changed, and no random number is drawn.

Shapes: B rows, T prompt columns, n nodes, k tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ...network.target_parts import device_of
from ...targets.private_api import cache_name, inputs_after, inputs_of_step, makes_inputs_itself, read_prompt
from ..tree import Tree, chain_of
from .chains import ChainRun
from .trees import MADE_ANEW, OF_EACH_TOKEN, TargetRun, takes_positions

# A tree with a fork, a grandchild on either side, and below each a node that no walk keeps.
_TREE_PARENTS = (0, 0, 0, 1, 2, 3, 4)
_TREE_DEPTHS = (0, 1, 1, 2, 2, 3, 3)
_TREE_LEAVES = sorted({*range(len(_TREE_PARENTS))} - {*_TREE_PARENTS})  # their paths cover all nodes
_WALKED = ((0, 2, 4), (0, 1))  # what the two rows keep, so that they end at different lengths


def precision_of(target: PreTrainedModel) -> torch.dtype:
    """The dtype of the target's matrix products; under `torch.autocast` not the dtype of its weights."""
    kind = device_of(target).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else target.dtype


def rounding_tolerance(target: PreTrainedModel) -> float:
    """The greatest error, as a share of the logits' spread, at which two results count as the same."""
    if precision_of(target) in (torch.float32, torch.float64):
        return 1e-3 if device_of(target).type == "cpu" else 1e-2  # tensor cores may round float32 products
    return 0.1


@contextmanager
def left_as_it_was(target: PreTrainedModel) -> Iterator[None]:
    """Restore the target after a trial's forwards: some targets (RecurrentGemma) keep a conversation's states in their
    modules."""
    kept = {
        module: {name: value for name, value in vars(module).items() if value is None or torch.is_tensor(value)}
        for module in target.modules()
    }
    try:
        yield
    finally:
        for module, values in kept.items():
            vars(module).update(values)


class ChangingInputError(Exception):
    """Plain generate passes an argument that changes with every step."""


def own_inputs(target: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The caller's inputs that are passed on from step to step, cut to one row. Only a trial of a target that makes
    its steps' inputs itself needs them; other targets pass them on unchanged."""
    names = {name for name, value in model_kwargs.items() if value is not None and name not in MADE_ANEW}
    if not names or not makes_inputs_itself(target):
        return {}
    try:
        inputs, ids = inputs_after(target, {}, dict(model_kwargs)), F.pad(input_ids, (0, 1), value=1)
        names &= set(inputs_of_step(target, ids, inputs, 1, 1))  # leaves out images, which belong to the prompt
    except Exception:  # its method needs the outputs of a forward
        return {}
    return _of_one_row({name: model_kwargs[name] for name in names}, len(input_ids))


def _of_one_row(inputs: dict[str, Any], rows: int) -> dict[str, Any]:
    return {
        name: value[:1] if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows else value
        for name, value in inputs.items()
    }


def _of_rows(own: dict[str, Any], rows: int, columns: int) -> dict[str, Any]:
    """The inputs that `own_inputs` returned, widened to a trial's text."""
    made = {}
    for name, value in own.items():
        if name in OF_EACH_TOKEN:
            value = value[..., -1:].expand(rows, columns)
        elif isinstance(value, torch.Tensor) and value.ndim and len(value) == 1:
            value = value.expand(rows, *value.shape[1:])
        made[name] = value
    return made


@torch.no_grad()
def tree_error(target: PreTrainedModel, own: dict[str, Any], in_graphs: bool = False) -> float:
    """The largest error of trees' logits, for two rows, one of them left-padded. The first tree's root is compared
    with a step of plain generate. The trees after it, which continue what was kept of it, are compared with plain
    forwards over their paths. `own`: what `own_inputs` returned."""
    vocabulary, device = target.config.get_text_config(decoder=True).vocab_size, device_of(target)
    ids = (torch.arange(3, 3 + 12 * 7, 7) * 31 % max(vocabulary - 2, 1) + 1).clamp(max=vocabulary - 1)  # fixed tokens
    prompts = [ids[:5].tolist(), ids[2:5].tolist()]
    width = max(map(len, prompts))
    prompt = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)  # [2, T]
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tokens = [ids[5:12].tolist(), ids[4:11].tolist()]  # per row, the nodes' tokens

    kwargs = {"attention_mask": mask, "position_ids": positions, "use_cache": True, **_of_rows(own, 2, width)}
    stepped, made = _plain_step(target, prompt, kwargs, torch.tensor(tokens, device=device)[:, :1])  # [2, V]
    own = {**own, **_of_one_row(made, 2)}
    run, errors = TargetRun(target, GenerationConfig(), kwargs, in_graphs=in_graphs), list[float]()
    drafted: list[tuple[torch.Tensor, list[int]]] = []  # logits [k, V] along a path, and the text that ends with it
    with run.open():
        run.prefill(prompt)
        # The second tree continues what was kept of the first. Its forward is captured as a graph, and the third
        # replays it.
        for turn in range(3 if in_graphs else 2):
            logits = run.verify(_trial_tree(torch.tensor(tokens, device=device)))  # [2, n, V]
            if turn == 0:
                errors += map(_distance, logits[:, 0], stepped)
            for row, text in enumerate(prompts if turn else ()):
                for path in map(_path_to, _TREE_LEAVES):
                    drafted.append((logits[row, path], text + [tokens[row][n] for n in path]))
            run.commit(_WALKED)
            prompts = [text + [tokens[row][n] for n in _WALKED[row]] for row, text in enumerate(prompts)]
            tokens = [row[1:] + row[:1] for row in tokens]
    return max(errors + _errors_along_paths(target, drafted, own))


def _plain_step(
    target: PreTrainedModel, prompt: torch.Tensor, kwargs: dict[str, Any], token: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits [B, V] of `token` [B, 1], run after `prompt` [B, T] with the target's own methods, and the arguments that
    these make for this step and the next."""
    inputs = {**kwargs, cache_name(): DynamicCache(config=target.config.get_text_config(decoder=True))}
    outputs, ids = read_prompt(target, prompt, GenerationConfig(), inputs), prompt
    found: list[dict[str, Any]] = []
    for step in (1, 2):
        inputs, ids = inputs_after(target, outputs, inputs), torch.cat((ids, token), dim=1)
        made = inputs_of_step(target, ids, inputs, 1, 1)
        positions = made.get("position_ids")
        if positions is not None and not bool((positions == kwargs["position_ids"][:, -1:] + step).all()):
            raise ChangingInputError("position_ids")
        found.append({name: value for name, value in made.items() if name not in MADE_ANEW and value is not None})
        if step == 1:
            outputs = target(**made, return_dict=True)
    first, second = found
    changing = [name for name in {**first, **second} if not _is_same(first.get(name), second.get(name))]
    if changing:
        raise ChangingInputError(min(changing))
    return outputs.logits[:, -1], first


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return one is other or bool(one == other)


def _trial_tree(tokens: torch.Tensor) -> Tree:
    parents, depths = (torch.tensor(v, device=tokens.device).expand_as(tokens) for v in (_TREE_PARENTS, _TREE_DEPTHS))
    ones = torch.ones_like(tokens)
    return Tree(tokens, parents, depths, torch.zeros_like(ones).float(), ones.bool(), max_depth=max(_TREE_DEPTHS))


def _path_to(node: int) -> list[int]:
    return [0] if node == 0 else [*_path_to(_TREE_PARENTS[node]), node]


class NotANumberError(Exception):
    """The target's plain logits are NaN, so there is nothing to compare with."""


def _errors_along_paths(
    target: PreTrainedModel, drafted: Sequence[tuple[torch.Tensor, list[int]]], own: dict[str, Any]
) -> list[float]:
    """The errors of logits [k, V] against plain logits of the last k tokens of their texts. All texts are rows of one
    forward: what fills a row up stands behind its text, where no token of a causal model sees it."""
    rows, width = len(drafted), max(len(text) for _, text in drafted)
    ids = torch.tensor([text + [0] * (width - len(text)) for _, text in drafted], device=device_of(target))  # [P, T]
    inputs = {"input_ids": ids, **_of_rows(own, rows, width)}
    if takes_positions(target):  # as plain generate passes them: without them, some models start at another number
        inputs["position_ids"] = torch.arange(width, device=ids.device).expand(rows, -1)
    plain = target(**inputs, use_cache=False).logits  # [P, T, V]
    return [
        _distance(*pair)
        for row, (logits, text) in zip(plain, drafted, strict=True)
        for pair in zip(logits, row[len(text) - len(logits) : len(text)], strict=True)
    ]


def _distance(logits: torch.Tensor, plain: torch.Tensor) -> float:
    plain = plain.float()
    if bool(plain.isnan().any()):
        raise NotANumberError
    return float((logits.float().to(plain.device) - plain).pow(2).mean().sqrt() / plain.std().clamp(min=1e-12))


# ---------------------------------------------------------------------- chains


@torch.no_grad()
def chain_error(
    target: PreTrainedModel, replays: bool, steps: bool, rows: int, has_cache: bool, own: dict[str, Any]
) -> float:
    """The largest error of chains, compared with steps of one token. Some, none or all drafts of a chain are kept.
    There is one row, or two, one of them left-padded."""
    vocabulary, device = target.config.get_text_config(decoder=True).vocab_size, device_of(target)
    ids = (torch.arange(3, 3 + 40 * 7, 7, device=device) * 31 % max(vocabulary - 2, 1) + 1).clamp(max=vocabulary - 1)
    prompt, texts = ids[:6].expand(rows, -1).clone(), torch.stack([ids[6 + row :][:30] for row in range(rows)])
    mask = torch.ones_like(prompt)
    if rows > 1:
        prompt[1, :2], mask[1, :2] = 0, 0

    def run(how: tuple[bool, bool], chains: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Logits [B, ., V] along `texts` by chains of (nodes, how many of them are kept)."""
        kwargs = {"attention_mask": mask, "use_cache": True, **_of_rows(own, rows, prompt.shape[1])}
        if takes_positions(target):
            kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if has_cache:  # the kind that `generate` makes; otherwise the target makes its own
            kwargs[cache_name()] = DynamicCache(config=target.config.get_text_config(decoder=True))
        one, got, place = ChainRun(target, GenerationConfig(), kwargs, *how), [], 0
        with one.open():
            one.prefill(prompt, limit=prompt.shape[1] + texts.shape[1])
            for nodes, kept in chains:
                tokens = texts[:, place : place + nodes].clone()
                tokens[:, kept:] = texts[:, :1]  # dropped tokens differ from the text
                got.append(one.verify(chain_of(tokens))[:, :kept])
                one.commit([range(kept)] * rows)
                place += kept
        return torch.cat(got, dim=1)

    chains = run((replays, steps), _TRIAL_CHAINS)
    plain = run((True, False), [(1, 1)] * chains.shape[1])
    pairs = zip(chains.flatten(0, 1), plain.flatten(0, 1), strict=True)
    return max(_distance(chain, single) for chain, single in pairs)


_TRIAL_CHAINS = ((5, 2), (4, 1), (3, 3), (1, 1), (4, 4), (2, 1), (5, 3), (1, 1), (4, 2))  # nodes, how many are kept
