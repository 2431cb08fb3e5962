"""A conversation with a target, and the loop that runs it in a terminal.

Contract: a `Conversation` holds the ids of everything said, and their cache. A turn feeds the target only the new ids,
and the heads' state continues with the cache. The tokens are those of plain `generate` on the whole conversation. If
an exception interrupts an answer, the part that was generated stays in the conversation, and the next turn continues
from there. `chat` knows lines and keys, not models. Heads with a learner learn while `chat` waits for a line.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from ..measure.prompts import prompt_ids
from ..measure.step_record import StepRecord
from ..targets.private_api import cache_name
from .lines import lines_of, print_line
from .live import LiveStreamer

HELP = """\
/clear   forget what was said and begin anew
/help    this text
/exit    leave; Ctrl-D does so too
Ctrl-C   stop the answer; the part that was written stays\
"""


class ConversationFull(ValueError):
    """The target has no positions left."""


class Conversation:
    """A conversation of messages, if the tokenizer has a chat template. Otherwise it is one text: each turn appends to
    it, and the target continues it.

    Args:
        target, tokenizer, heads: As for `generate`; without heads, plain `generate` answers.
        max_new_tokens (`int`): Most tokens of an answer.
        options: Further keywords for `generate`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        heads: Any = None,
        max_new_tokens: int = 512,
        **options: Any,
    ) -> None:
        self.target, self.tokenizer, self.heads = target, tokenizer, heads
        self.max_new_tokens, self.options = max_new_tokens, options
        self.clear()

    def clear(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []
        self.cache: Any = None  # holds the first of the ids, or all of them

    @property
    def learner(self) -> Any:
        """The heads' `OnlineLearner`, while one is open."""
        return getattr(self.heads, "learner", None)

    def answer(self, text: str, record: StepRecord) -> Any:
        """Answer `text` in one turn, recorded by `record`. Returns the output of `generate`."""
        ids = self._asked(text)
        room = self._room(ids)
        cache, self.cache = self._matching(ids), None  # an interrupted call may leave the cache in any state
        input_ids = torch.tensor([ids], device=self.target.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        try:
            options = {cache_name(): cache, "max_new_tokens": room, **self.options}
            out = record.generate(self.target, inputs, self.heads, **options)
            self.cache = out[cache_name()]
        finally:
            self._said(text, ids, record.tokens)
        return out

    def _asked(self, text: str) -> list[int]:
        """The ids of the conversation up to the next answer."""
        if self.tokenizer.chat_template is not None:
            messages = [*self.messages, {"role": "user", "content": text}]
            return prompt_ids(self.tokenizer, messages)
        if not self.ids:
            return prompt_ids(self.tokenizer, text)
        is_mid_line = not self.tokenizer.decode(self.ids[-8:]).endswith("\n")  # type: ignore[union-attr]
        return self.ids + self.tokenizer("\n" * is_mid_line + text, add_special_tokens=False)["input_ids"]

    def _room(self, ids: list[int]) -> int:
        most = getattr(self.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is None:
            return self.max_new_tokens
        if len(ids) >= most:
            raise ConversationFull(
                f"the conversation has {len(ids)} tokens and the target is made for {most}: /clear begins a new one"
            )
        return min(self.max_new_tokens, most - len(ids))

    def _matching(self, ids: list[int]) -> Any:
        """The part of the cache that matches `ids`; None if no part does. A template may write earlier messages in
        another way than before."""
        if self.cache is None:
            return None
        known = self.cache.get_seq_length()
        same = next((i for i, (a, b) in enumerate(zip(self.ids, ids)) if a != b), min(len(self.ids), len(ids)))
        if known <= min(same, len(ids) - 1):
            return self.cache
        if not same or any(type(layer) is not DynamicLayer for layer in self.cache.layers):
            return None  # a window or a recurrent state cannot be cut
        cut = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            cut.update(layer.keys[:, :, :same].clone(), layer.values[:, :, :same].clone(), index)
        return cut

    def _said(self, text: str, ids: list[int], tokens: list[int]) -> None:
        if not tokens:  # interrupted before the first token: leave the turn out
            self.cache = None
            return
        answer: Any = self.tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        if self.tokenizer.chat_template is None and tokens[-1] in self._ends():
            tokens = tokens[:-1]  # the text goes on
        self.ids = ids + tokens

    def _ends(self) -> list[int]:
        ends = self.target.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]


def chat(conversation: Conversation, console: Console, read: Callable[[], str]) -> None:
    """Run the conversation until /exit, or until `read` raises EOFError."""
    kind = "chat" if conversation.tokenizer.chat_template is not None else "no chat template: your text is continued"
    console.print(f"{kind}; /help lists the commands", style="dim", highlight=False)
    while True:
        try:
            with nullcontext() if conversation.learner is None else conversation.learner.idle():
                line = read()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves", style="dim", highlight=False)
            continue
        command = line.strip()
        if command == "/exit":
            return
        if command == "/clear":
            conversation.clear()
            console.print("a new conversation", style="dim", highlight=False)
        elif command.startswith("/"):
            console.print(HELP, style="dim", highlight=False)
        elif command:
            _turn(conversation, line, console)


def _turn(conversation: Conversation, line: str, console: Console) -> None:
    live, beginning = LiveStreamer(conversation.tokenizer, console, skip_prompt=True), ""
    try:
        conversation.answer(line, live)
    except ConversationFull as error:
        print_line(console, str(error), "red")
        return
    except KeyboardInterrupt:
        beginning = "stopped; "
    for line in (beginning + live.summary(), *lines_of(conversation.learner)):
        print_line(console, line, "dim")


__all__ = ["Conversation", "ConversationFull", "chat"]
