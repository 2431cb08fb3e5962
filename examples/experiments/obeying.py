"""What is it worth that drafts obey the caller?

A target answers under a grammar, a JSON schema of ten fields through xgrammar, and with its own words banned: those of
four letters and more that it says most often in answers to the same questions. Trees of one size are drafted twice, by
heads that are told what cannot come and by heads that are not, as before there were such drafts. Only forwards are
counted, so the machine does not matter.

    pip install --no-deps xgrammar apache-tvm-ffi   # without them it would bring triton, which nothing here needs
    python examples/experiments/obeying.py --target TARGET --heads HEADS
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from common import HERE, finish, line, load_heads, load_target, panel, parse
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hf_clover.decoding.draft import session
from hf_clover.measure.prompts import EVERYDAY, Question, load_prompts

DEFAULTS = dict(
    heads=str(HERE.parent / "stand_in" / "heads"), num_prompts=6, max_new_tokens=160, nodes=(16,), banned=300
)
TOY = dict(num_prompts=2, max_new_tokens=12, nodes=(4,), banned=6)

TEXT = {"type": "string"}
FIELDS = {
    "first_name": TEXT,
    "last_name": TEXT,
    "date_of_birth": {"type": "string", "format": "date"},
    "nationality": TEXT,
    "occupation": TEXT,
    "is_married": {"type": "boolean"},
    "number_of_children": {"type": "integer"},
    "email_address": {"type": "string", "format": "email"},
    "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
    "preferred_language": TEXT,
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
PEOPLE = (
    "a nurse from Lisbon",
    "a retired sailor from Norway",
    "a student of physics in Delhi",
    "a baker in a village in France",
    "a young teacher who plays the violin",
    "a farmer with a large family",
    "an engineer who builds bridges",
    "a grandmother in Buenos Aires",
)

Options = Callable[[], dict[str, Any]]  # of a call: what has a state is made anew for each


def forms(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Prompts that ask for a form to be filled in."""
    asked = (f"Make up {who}. Answer in JSON with the fields {', '.join(FIELDS)}." for who in PEOPLE[:count])
    return [Question([[{"role": "user", "content": text}]]).encode(tokenizer) for text in asked]


def under_schema(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Options:
    import xgrammar
    from xgrammar.contrib.hf import LogitsProcessor

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: {"logits_processor": LogitsProcessorList([LogitsProcessor(compiled)])}


def without_words(tokenizer: PreTrainedTokenizerBase, answers: Sequence[torch.Tensor], count: int) -> Options:
    """The words as they stand behind a space."""
    said = Counter(word for ids in answers for word in re.findall(r"[A-Za-z]{4,}", tokenizer.decode(ids)))
    words = [tokenizer(f" {word}", add_special_tokens=False).input_ids for word, _ in said.most_common(count)]
    return lambda: {"bad_words_ids": words} if words else {}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    heads = load_heads(args, target)

    def answer(prompt: list[int], options: Options, **drafting: Any) -> Any:
        ids = torch.tensor([prompt], device=target.device)
        size = dict(max_new_tokens=args.max_new_tokens, do_sample=False, return_dict_in_generate=True)
        return target.generate(ids, attention_mask=torch.ones_like(ids), **size, **options(), **drafting)

    questions = load_prompts(EVERYDAY, tokenizer, args.num_prompts)
    said = [answer(prompt, dict).sequences[0, len(prompt) :] for prompt in questions]
    cases = {
        "JSON schema": (forms(tokenizer, args.num_prompts), under_schema(target, tokenizer)),
        "banned words": (questions, without_words(tokenizer, said, args.banned)),
    }
    rows = []
    for case, (prompts, options) in cases.items():
        plain = [answer(prompt, options).sequences for prompt in prompts]
        for nodes in args.nodes:
            for method, obeys in (("deaf drafts", lambda _: False), ("drafts that obey", session.must_obey)):
                new = forwards = same = 0
                with mock.patch.object(session, "must_obey", obeys):
                    for prompt, wanted in zip(prompts, plain, strict=True):
                        out = answer(prompt, options, assistant_model=heads, num_assistant_tokens=nodes)
                        new += out.speculation.new_tokens
                        forwards += out.speculation.row_forwards
                        same += torch.equal(out.sequences, wanted)
                row = {"case": case, "nodes": nodes, "method": method, "new_tokens": new, "forwards": forwards}
                rows.append({**row, "tokens_per_forward": new / forwards, "identical": same == len(prompts)})
    found: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append((f"{row['case']}, {row['nodes']} nodes", row["tokens_per_forward"]))
    series = [line(method, points) for method, points in found.items()]
    panels = [panel("bars", "What cannot come is not drafted", "", "tokens per target forward", series)]
    return finish(args, target, __doc__, rows, "Drafts that obey the caller", panels, rows, script=__file__)


if __name__ == "__main__":
    main()
