"""The whole idea in a few seconds, with no download: a tiny target, heads that learn its text, the same tokens sooner.

The target is a small random model that this program makes, so its text means nothing. The heads learn that one text by
heart. So this shows how the parts work together, not how fast heads are on a real model. Everything else is as with a
real model: `CloverHeads.from_target`, then `generate(assistant_model=heads)`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import tqdm

from hf_clover import CloverHeads  # from here on, `generate` takes Clover heads as the assistant
from hf_clover.targets.hidden_states import capture_states

PROMPT, NEW_TOKENS, STEPS = torch.arange(1, 9)[None], 120, 60


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=None, **shape)).eval()
    for parameter in target.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.25)  # large enough weights that the text does not repeat itself
    return target


def fit(heads: CloverHeads, target: LlamaForCausalLM, text: torch.Tensor) -> None:
    """Teach every head this one text [1, T] by heart."""
    captured: list[torch.Tensor] = []
    with torch.no_grad(), capture_states(target, captured):
        target(text)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3)
    for _ in tqdm(range(STEPS), desc="fitting the heads"):
        outputs = heads(captured[0][:, :-1], text[:, 1:]).head_outputs  # [K, 1, T - 1, 64]
        loss = torch.zeros(())
        for i, out in enumerate(outputs):
            logits = heads.score(out[0, : text.shape[1] - 2 - i])  # [T - 2 - i, V]
            loss = loss + torch.nn.functional.cross_entropy(logits, text[0, 2 + i :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    target = tiny_target()
    heads = CloverHeads.from_target(target)
    plain = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=NEW_TOKENS)
    rows = []
    for label in ("fresh heads", "fitted heads"):
        if label == "fitted heads":
            fit(heads, target, plain)
        out = target.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=NEW_TOKENS,
            assistant_model=heads,
            return_dict_in_generate=True,
        )
        same = "yes" if torch.equal(out.sequences, plain) else "NO"
        said = out.speculation
        rows.append((label, said.new_tokens, said.target_forwards, f"{said.tokens_per_forward:.2f}", same))
    print(f"\n{'':14}{'new tokens':>12}{'forwards':>10}{'tokens per forward':>20}{'same as plain':>15}")
    print(f"{'plain':14}{NEW_TOKENS:>12}{NEW_TOKENS:>10}{'1.00':>20}{'':>15}")
    for label, *values in rows:
        print(f"{label:14}{values[0]:>12}{values[1]:>10}{values[2]:>20}{values[3]:>15}")
    print("\nThe heads were fitted to this very text, so this is the most that trees of this depth can give.")
    print("With your own model: heads = CloverHeads.from_target(model), then generate(..., assistant_model=heads).")


if __name__ == "__main__":
    main()
