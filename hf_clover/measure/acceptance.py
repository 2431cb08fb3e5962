"""How often drafts are right: at each place of a chain (for `verify`), and on made-up targets (for `hf-clover env`).

Contract: `right_by_place` feeds finished texts to the heads, as training does. `tried` takes a second, needs no files,
leaves the caller's random numbers unchanged, and raises nothing: a failure is reported in its line. Its drafts are
copies of plain generate's text or, in chains, one likely token, so most of them should be accepted.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..decoding.draft.copies import TextMemory
from ..network.modeling_clover import CloverHeads
from ..network.modeling_heads import DraftHeads
from ..targets.hidden_states import capture_states
from ..targets.made_up import made_up_bloom, made_up_llama

NEW_TOKENS = 48
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [0, 0, 9, 8, 7, 6, 5]]  # the second is padded


@torch.no_grad()
def right_by_place(
    target: PreTrainedModel, heads: DraftHeads, texts: Sequence[tuple[torch.Tensor, int]]
) -> list[dict[str, int]]:
    """Count the heads' right drafts: the first ones, the second ones where the first is right, and so on.

    Args:
        target: the model that wrote the texts
        heads: their copied drafts are not used
        texts: each [L], with the place where the answer begins; drafts are made at every token of the answer

    Returns:
        for each place, how many drafts were `asked` for and how many were `right`
    """
    heads.bind(target)
    found = [{"asked": 0, "right": 0} for _ in range(heads.config.num_heads)]
    for ids, start in texts:
        captured: list[torch.Tensor] = []
        with capture_states(target, captured, heads.feature_layers):
            target(ids[None])
        hidden, ids = captured[0].to(heads.device), ids.to(heads.device)
        outputs = heads(hidden[:, :-1], ids[None, 1:]).head_outputs[:, 0, start - 1 :]  # [K, t, d]
        is_right = torch.ones(outputs.shape[1], dtype=torch.bool, device=ids.device)
        for place, (of_place, output) in enumerate(zip(found, outputs)):
            truth = ids[start + 1 + place :]
            if not len(truth):
                break
            drafts = heads.score(output[: len(truth)]).argmax(-1)
            drafts = drafts if heads.config.draft_vocab_size is None else heads.draft_ids[drafts]
            is_right = is_right[: len(truth)]  # and all drafts before
            of_place["asked"] += int(is_right.sum())
            is_right = is_right & (drafts == truth)
            of_place["right"] += int(is_right.sum())
    return found


def tried() -> dict[str, str]:
    """Try trees, chains, a batch and a static cache. A result begins with "yes" if drafts were accepted."""
    with _one_thread(), torch.random.fork_rng(devices=[]):
        llama = made_up_llama()
        return {
            "trees": _said(llama, "tree"),
            "chains": _said(made_up_bloom(), "chain"),
            "a batch": _said(llama, "tree", rows=2),
            "a static cache": _said(llama, "tree", cache_implementation="static"),
        }


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine several threads wait for each other longer than these small products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _said(target: PreTrainedModel, method: str, rows: int = 1, **options: Any) -> str:
    try:
        ids = torch.tensor(PROMPTS[:rows])
        call = {"attention_mask": (ids != 0).long(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = target.generate(ids, **call)  # type: ignore[operator]
        # Untrained heads of this kind repeat the target's own guess.
        heads = CloverHeads.from_target(target, variant="medusa", draft_copies=10)
        heads.text_memory = TextMemory(plain.numel())
        for text in plain.tolist():
            heads.text_memory.add(text)
        drafting = {"assistant_model": heads, "num_assistant_tokens": 8, "return_dict_in_generate": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the record has their text
            out = target.generate(ids, **call, **drafting, **options)  # type: ignore[operator]
    except Exception as error:
        return f"no: {type(error).__name__}: {error}"
    record = out.speculation
    if not torch.equal(out.sequences, plain):
        return f"no: another text than plain generate's ({record.method})"
    if record.method != method:
        return f"no: {record.method}, since {record.reason}"
    drafted = f"{record.accepted_tokens} of {record.new_tokens} tokens drafted"
    if 2 * record.accepted_tokens < record.new_tokens:
        return f"no: {drafted}, and more than half should be"
    return f"yes: {drafted}, the text is the same"


__all__ = ["right_by_place", "tried"]
