"""A short fit of heads to a tiny target's own text, so that some of their drafts are accepted."""

import hashlib

import torch

from hf_clover.network.modeling_heads import DraftHeads
from hf_clover.targets.hidden_states import capture_states

_fitted: dict[str, dict[str, torch.Tensor]] = {}  # digest of heads and target before -> the heads' weights after


def fit(
    heads: DraftHeads, target, steps: int = 60, temperature: float = 1.0, prompt=None, texts=None, count: int = 64
) -> DraftHeads:
    """Train every head by cross-entropy on `texts` [N, T], or on `count` texts that the target writes after
    `prompt`. Each process does the same fit only once."""
    known = _digest(heads, target, steps, temperature, prompt, texts, count)
    if known in _fitted:
        heads.load_state_dict(_fitted[known])
        return heads
    prompt = torch.tensor([[1, 4, 2, 5, 3]]) if prompt is None else prompt
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if texts is None:
            texts = target.generate(
                prompt.repeat(count, 1),
                attention_mask=torch.ones(count, prompt.shape[1], dtype=torch.long),
                do_sample=True,
                temperature=temperature,
                max_new_tokens=12,
            )
        captured: list[torch.Tensor] = []
        with torch.no_grad(), capture_states(target, captured, heads.feature_layers):
            target(texts)
        optimizer = torch.optim.AdamW(heads.parameters(), lr=5e-3)
        for _ in range(steps):
            outputs = heads(captured[0][:, :-1], texts[:, 1:]).head_outputs  # [K, B, T, d]
            loss = 0.0
            for i, out in enumerate(outputs):
                logits = heads.score(out[:, : texts.shape[1] - 2 - i])
                loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 2 + i :].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    _fitted[known] = {name: value.detach().clone() for name, value in heads.state_dict().items()}
    return heads


def _digest(heads: DraftHeads, target, *settings) -> str:
    found = hashlib.sha256(repr((type(heads), heads.config.to_dict(), target.config.to_dict(), settings)).encode())
    for module in (heads, target):
        for value in module.state_dict().values():
            found.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()
