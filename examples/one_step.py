"""Speculative decoding with Clover heads, complete except for everything that makes it fast: draft, verify, accept,
repeat.

Read this file to understand the library. It handles one text at a time, drafts a chain and not a tree, decodes
greedily, and keeps no keys and values: every forward reads the whole text again. The target and the heads are the real
ones. At the end it compares its text with that of the target's own `generate`, token for token.

    python examples/one_step.py
    python examples/one_step.py --target examples/smollm2/target --heads examples/smollm2/heads --prompt "The sea"

The library does the same, and more, in `hf_clover/decoding`: `loop.py` is the loop, `draft/drafter.py` drafts,
`target/trees.py` runs the forward that verifies, and `walk.py` accepts tokens. CONTRIBUTING.md walks through them.

Shapes: T tokens of text, n drafted tokens, d hidden size, V vocabulary. The first dimension is the batch, always 1.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_clover import CloverHeads

STAND_IN = Path(__file__).resolve().parent / "stand_in"
PROMPT = '''import os

def copy_file(source, target):
    """Copy a file."""
    with open('''


def run_target(target: PreTrainedModel, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of the target over the text [1, T].

    Returns its choice of a next token at every position [1, T], and the hidden states there [1, T, d]. The heads read
    hidden states before the target's final norm, so a hook records the input of that norm.
    """
    hidden: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda norm, inputs: hidden.append(inputs[0]))
    logits = target(text, use_cache=False).logits  # [1, T, V]
    hook.remove()
    return logits.argmax(-1), hidden[0]


def draft(heads: CloverHeads, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """A guess at the tokens after the text [1, T]: one token from each head -> [1, n].

    The target has not read the last token of the text yet, so there are hidden states [1, T - 1, d] for all tokens but
    that one. Each state is paired with the token after it. Head 0 guesses the first new token. Head 1 also reads this
    guess and guesses the second token, and so on: this makes Clover's heads recurrent.
    """
    drafted = text[:, :0]  # [1, 0]
    for level in range(heads.config.num_heads):
        tokens = torch.cat([text[:, 1:], drafted], dim=1)  # [1, T - 1 + level], the tokens after each hidden state
        # Drafted tokens have no hidden state. Zeros take their place; no position before them can see the zeros.
        outputs = heads(pad(hidden, (0, 0, 0, level)), tokens).head_outputs  # [K, 1, T - 1 + level, d]
        last = outputs[level][:, hidden.shape[1] - 1]  # [1, d], the output of this head at the end of the text
        guess = heads.score(last).argmax(-1)  # [1], through the target's own output layer
        if heads.config.draft_vocab_size is not None:  # heads that score the most frequent ids only
            guess = heads.draft_ids[guess]
        drafted = torch.cat([drafted, guess[:, None]], dim=1)
    return drafted


def count_accepted(drafted: torch.Tensor, chosen: torch.Tensor) -> int:
    """How many drafted tokens [1, n], counted from the first without a gap, equal the target's choices [1, n + 1]."""
    agrees = drafted[0] == chosen[0, :-1]  # [n]
    return int(agrees.cumprod(0).sum())


@torch.no_grad()
def speculate(
    target: PreTrainedModel, heads: CloverHeads, text: torch.Tensor, max_new_tokens: int, end: list[int]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]:
    """The text [1, T] with up to `max_new_tokens` more tokens; a token of `end` ends it. Also returns, for each step,
    the drafted tokens [1, n] and how many of these were accepted."""
    heads.bind(target)  # the heads borrow the target's output layer, embedding and final norm
    steps, length = [], text.shape[1]

    # The prompt's forward: it gives the first token, and the hidden states that the first draft starts from.
    chosen, hidden = run_target(target, text)
    text = torch.cat([text, chosen[:, -1:]], dim=1)

    while text.shape[1] < length + max_new_tokens and text[0, -1].item() not in end:
        # 1. Draft: the heads guess what comes next. This is cheap, and may be wrong.
        drafted = draft(heads, hidden, text)

        # 2. Verify: one forward of the target over text and draft gives its own choice at every position.
        chosen, hidden = run_target(target, torch.cat([text, drafted], dim=1))
        chosen = chosen[:, text.shape[1] - 1 :]  # [1, n + 1], after the text, and after each drafted token

        # 3. Accept: drafted tokens are accepted up to the first that the target would not have chosen. The forward
        # has also computed the target's own choice there, so a step gives one token even if all of the draft is wrong.
        accepted = count_accepted(drafted, chosen)
        new = chosen[:, : accepted + 1]  # the accepted drafts, which the target chose too, and one more token
        text = torch.cat([text, new], dim=1)

        # 4. Keep: hidden states after a wrong draft belong to another text. They are dropped.
        hidden = hidden[:, : text.shape[1] - 1]
        steps.append((drafted, accepted))

        # The library checks every token for an end. Here the text is cut at the end token after the step.
        ends = [place for place, token in enumerate(new[0].tolist()) if token in end]
        text = text[:, : text.shape[1] - new.shape[1] + ends[0] + 1] if ends else text
    return text[:, : length + max_new_tokens], steps


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(STAND_IN / "target"), help="a model of the Llama architecture")
    parser.add_argument("--heads", default=str(STAND_IN / "heads"), help="heads that were trained for it")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    heads = AutoModel.from_pretrained(args.heads, dtype=torch.float32).eval()
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)

    plain = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)  # one token a forward
    end = torch.tensor(target.generation_config.eos_token_id or []).flatten().tolist()
    text, steps = speculate(target, heads, inputs.input_ids, args.max_new_tokens, end)

    print("What each step drafted: accepted | not accepted")
    for number, (drafted, accepted) in enumerate(steps, 1):
        words = [repr(tokenizer.decode(token)) for token in drafted[0]]
        print(f"step {number:2}  {' '.join(words[:accepted])} | {' '.join(words[accepted:])}")
    new_tokens, forwards = text.shape[1] - inputs.input_ids.shape[1], len(steps) + 1  # the prompt's forward, too
    print(f"\n{tokenizer.decode(text[0], skip_special_tokens=True)}\n")
    print(f"{new_tokens} tokens in {forwards} forwards: {new_tokens / forwards:.2f} tokens per forward")

    assert torch.equal(text, plain), "not the text of plain generate"
    print("The same tokens as plain generate's.")
    return {"new_tokens": new_tokens, "forwards": forwards, "accepted": sum(accepted for _, accepted in steps)}


if __name__ == "__main__":
    main()
