"""Do heads hold on prompts that are longer than the texts they learned from?

Every question is asked at the end of texts of several lengths: its own passage, as far as it fits, and before that
what the other questions of the set bring. So the questions are the same at every length, and the answers nearly. Trees
of fixed sizes and plain generate take turns.

    python examples/experiments/prompt_length.py
    python examples/experiments/prompt_length.py --target TARGET --heads HEADS --prompts RAG.jsonl
"""

from collections.abc import Sequence
from typing import Any

from common import (
    GENERATION,
    PLAIN,
    TOY_GENERATION,
    finish,
    line,
    load_heads,
    load_target,
    panel,
    parse,
    with_range,
)
from transformers import PreTrainedTokenizerBase

from hf_clover.measure.benchmark import measure, plain, with_heads
from hf_clover.measure.prompts import Question, load_questions, prompt_ids

DEFAULTS = {**GENERATION, "contexts": (128, 512, 2048, 4096), "nodes": (16,)}
TOY = {**TOY_GENERATION, "contexts": (32, 64), "nodes": (4,)}


def ending_with(
    place: int, questions: Sequence[Question | list[int]], length: int, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """A prompt of `length` tokens that ends with the question at `place`, with the other questions before it."""
    others = [*questions[place + 1 :], *questions[:place]]
    if not isinstance(questions[place], Question):
        return [token for ids in (*others, questions[place]) for token in ids][-length:]
    text = "\n\n".join(question.turns[0][-1]["content"] for question in (*others, questions[place]))
    empty = [{"role": "user", "content": ""}]
    room = length - (len(prompt_ids(tokenizer, empty)) if tokenizer.chat_template else 0)
    text = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][-room:])
    return Question([[{"role": "user", "content": text}]]).encode(tokenizer)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(__doc__, argv, DEFAULTS, TOY)
    target, tokenizer = load_target(args)
    heads = load_heads(args, target)
    questions = load_questions(args.prompts, tokenizer)
    rows = []
    for length in args.contexts:
        prompts = [ending_with(place, questions, length, tokenizer) for place in range(args.num_prompts)]
        shortest = min(map(len, prompts))
        if shortest < 0.9 * length:
            raise SystemExit(
                f"--contexts {length}: all of {args.prompts} is {shortest} tokens; give it more questions."
            )
        rows += [
            {"context": length, **row}
            for row in measure(
                target,
                tokenizer,
                [plain(), *(with_heads(heads, f"{nodes} nodes", nodes) for nodes in args.nodes)],
                prompts,
                max_new_tokens=args.max_new_tokens,
                repeats=args.repeats,
                seed=args.seed,
            )
        ]
    of_size = {nodes: [row for row in rows if row["nodes"] == nodes] for nodes in args.nodes}
    per_forward = [
        line(f"{nodes} nodes", [(row["context"], row["tokens_per_forward"]) for row in mine])
        for nodes, mine in of_size.items()
    ]
    speedups = [
        line(f"{nodes} nodes", [(row["context"], with_range(row, "speedup")) for row in mine])
        for nodes, mine in of_size.items()
    ]
    panels = [
        panel("lines", "Tokens per forward", "tokens of a prompt", "tokens per target forward", per_forward, "log2"),
        panel("lines", "Speedup", "tokens of a prompt", "× plain generate", speedups, "log2", reference=PLAIN),
    ]
    columns = ("context", "method", "tokens_per_second", "tokens_per_forward", "speedup", "efficiency", "identical")
    table = [{name: row.get(name) for name in columns} for row in rows]
    return finish(args, target, __doc__, rows, "The length of the prompt", panels, table, script=__file__)


if __name__ == "__main__":
    main()
