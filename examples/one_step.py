"""Speculative decoding with Clover heads, with nothing left out but what makes it fast: draft, verify, accept, repeat.

Read this file to understand the library. It has one text at a time, drafts a chain and not a tree, picks greedily,
and keeps no keys and values: every forward reads the whole text again. The target and the heads are the real ones.
At the end it compares its text with the target's own `generate`, token for token.

    python examples/one_step.py
    python examples/one_step.py --target examples/smollm2/target --heads examples/smollm2/heads --prompt "The sea"

Where the library does the same, and more, in `hf_clover/decoding`: `loop.py` is the loop, `drafting.py` the draft,
`target_run.py` the forward that verifies, `walk.py` what is accepted. CONTRIBUTING.md walks through them.

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

    Gives its choice of a next token at every position [1, T], and the hidden states there [1, T, d]. The heads read
    hidden states as they are before the target's final norm, so a hook takes them at the norm's entrance.
    """
    hidden: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda norm, inputs: hidden.append(inputs[0]))
    logits = target(text, use_cache=False).logits  # [1, T, V]
    hook.remove()
    return logits.argmax(-1), hidden[0]


def draft(heads: CloverHeads, hidden: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """A guess at the tokens after the text [1, T]: one token from each head -> [1, n].

    The target has not read the last token of the text yet, so there are hidden states [1, T - 1, d] for all but that
    one. Each of them is paired with the token after it. Head 0 guesses the first new token, head 1 the second, with
    the guess of head 0 among what it reads, and so on: this is what makes Clover's heads recurrent.
    """
    drafted = text[:, :0]  # [1, 0]
    for level in range(heads.config.num_heads):
        tokens = torch.cat([text[:, 1:], drafted], dim=1)  # [1, T - 1 + level], the tokens after each hidden state
        # Drafted tokens have no hidden state. Zeros fill their places, and nothing before them can see these.
        outputs = heads(pad(hidden, (0, 0, 0, level)), tokens).head_outputs  # [K, 1, T - 1 + level, d]
        last = outputs[level][:, hidden.shape[1] - 1]  # [1, d], what this head says at the end of the text
        guess = heads.score(last).argmax(-1)  # [1], through the target's own output layer
        if heads.config.draft_vocab_size is not None:  # heads that score the most frequent ids only
            guess = heads.draft_ids[guess]
        drafted = torch.cat([drafted, guess[:, None]], dim=1)
    return drafted


def count_accepted(drafted: torch.Tensor, chosen: torch.Tensor) -> int:
    """How many drafted tokens [1, n] in a row, from the first on, are what the target chooses there [1, n + 1]."""
    agrees = drafted[0] == chosen[0, :-1]  # [n]
    return int(agrees.cumprod(0).sum())


@torch.no_grad()
def speculate(
    target: PreTrainedModel, heads: CloverHeads, text: torch.Tensor, max_new_tokens: int, end: list[int]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]:
    """The text [1, T] and up to `max_new_tokens` more, no further than a token of `end`. Beside it, what each step
    drafted [1, n] and how many of these tokens were accepted."""
    heads.bind(target)  # the heads borrow the target's output layer, embedding and final norm
    steps, length = [], text.shape[1]

    # The prompt's forward: it gives the first token, and the hidden states that the first draft starts from.
    chosen, hidden = run_target(target, text)
    text = torch.cat([text, chosen[:, -1:]], dim=1)

    while text.shape[1] < length + max_new_tokens and text[0, -1].item() not in end:
        # 1. Draft: the heads guess what comes next. This is cheap, and may be wrong.
        drafted = draft(heads, hidden, text)

        # 2. Verify: one forward of the target over text and draft tells what it would have chosen at every place.
        chosen, hidden = run_target(target, torch.cat([text, drafted], dim=1))
        chosen = chosen[:, text.shape[1] - 1 :]  # [1, n + 1], after the text, and after each drafted token

        # 3. Accept: drafted tokens are good up to the first that the target would not have chosen. What it chooses in
        # that place comes free, so that a step gives one token even if all of the draft was wrong.
        accepted = count_accepted(drafted, chosen)
        new = chosen[:, : accepted + 1]  # the accepted drafts, which the target chose too, and one token more
        text = torch.cat([text, new], dim=1)

        # 4. Keep: hidden states after a wrong draft belong to a text that never was. The next step starts before them.
        hidden = hidden[:, : text.shape[1] - 1]
        steps.append((drafted, accepted))

        # The library looks for an end at every token. Here the text is cut there once the step is over.
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
