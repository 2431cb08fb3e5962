"""Training data from the target itself: its own answers to given prompts.

Contract: `regenerate` calls `answers` with every prompt of a dataset. It writes a folder that `load_dataset(folder)`
reads and the trainer takes, with the columns `prompt` and `completion`. Each answer is written to disk as soon as it
arrives, so a stopped run continues after its last finished sample, with any number of processes. A sample that fails
is written to `errors.jsonl` with its reason, and the next run tries it again. `regenerate` does not know the source of
answers: `TargetAnswers` (`generate`, with heads or without) or `EndpointAnswers` (a server with OpenAI's interface).
"""

import copy
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode
from transformers.utils import logging
from trl import maybe_convert_to_chatml

from ..hub.push import write_results
from ..measure.prompts import prompt_ids
from ..measure.provenance import provenance
from ..measure.whole_files import not_written, write_whole, writing_whole
from ..targets.loading import gguf_file_of
from .row_by_row import decode, own_random_numbers, own_seed
from .storage import claim

logger = logging.get_logger(__name__)

Prompt = str | list[dict[str, str]]  # a text, or messages
DATA_FILE = "train.parquet"
MOST_PADDING = 128  # most padding tokens before a prompt: more of them cost more than another, smaller batch
REQUEST_TIMEOUT = 3600  # seconds; a busy server lets requests wait


class Answers(Protocol):
    """A source of answers. `settings` holds everything that the answers depend on."""

    settings: dict[str, Any]

    def __call__(self, prompts: Sequence[Prompt]) -> Iterable[tuple[int, str | Exception]]:
        """The number of each prompt and its answer, or the error instead of it, in any order."""


class TargetAnswers:
    """
    Answers from the target's own `generate`, in batches.

    Args:
        model (`PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer.
        assistant_model ([`CloverHeads`], *optional*):
            Heads to speculate with; the answers stay the target's.
        batch_size (`int`, *optional*, defaults to 32):
            Most prompts in one call of `generate`. A batch has prompts of about the same length; the longest are
            answered first.
        seed (`int`, *optional*, defaults to 0):
            Seed for sampling. Without heads, an answer depends only on the seed, its own prompt and rounding. It does
            not depend on the order, the batch, the number of processes or interruptions; equal prompts get equal
            answers. With heads, it also depends on the other prompts of its batch.
        generation_kwargs:
            Arguments of `generate`, such as `max_new_tokens` (1024 by default), `do_sample`, `temperature`.

    Example:

    ```python
    >>> from hf_clover.training import TargetAnswers
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer

    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> answers = TargetAnswers(model, AutoTokenizer.from_pretrained("org/target"), max_new_tokens=8)
    >>> [(place, type(answer)) for place, answer in answers(["def f(x):"])]
    [(0, <class 'str'>)]
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        assistant_model: Any | None = None,
        batch_size: int = 32,
        seed: int = 0,
        **generation_kwargs: Any,
    ) -> None:
        self.model, self.tokenizer, self.heads = model.eval(), tokenizer, assistant_model
        self.batch_size, self.generation_kwargs = batch_size, {"max_new_tokens": 1024, **generation_kwargs}
        self.settings = {"model": model.config.name_or_path, **self.generation_kwargs}
        config = copy.deepcopy(model.generation_config)
        config.update(**self.generation_kwargs)
        self.mode, self.seed = config.get_generation_mode(), seed
        if config.do_sample:
            self.settings["seed"] = seed
        if gguf_file_of(model) is not None:
            self.settings["gguf_file"] = gguf_file_of(model)

    def __call__(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Exception]]:
        ids = {}
        for place, prompt in enumerate(prompts):
            try:
                ids[place] = prompt_ids(self.tokenizer, prompt)
            except Exception as error:
                yield place, error
        batch: list[int] = []
        for place in sorted(ids, key=lambda place: -len(ids[place])):  # too large batches fail at once
            padding = len(ids[batch[0]]) - len(ids[place]) if batch else 0
            if len(batch) == self.batch_size or padding > max(MOST_PADDING, len(ids[place]) // 4):
                yield from self._answers(batch, ids)
                batch = []
            batch.append(place)
        if batch:
            yield from self._answers(batch, ids)

    def _answers(self, places: list[int], ids: dict[int, list[int]]) -> Iterator[tuple[int, str | Exception]]:
        answers: Sequence[str | Exception] | None = None
        try:
            answers = self._answer([ids[place] for place in places])
        except Exception as error:
            if len(places) == 1:
                answers = [error]
        if answers is not None:
            yield from zip(places, answers, strict=True)
            return
        half = len(places) // 2  # either one prompt cannot be answered, or they are too many at once
        yield from self._answers(places[:half], ids)
        yield from self._answers(places[half:], ids)

    @torch.no_grad()
    def _answer(self, ids: list[list[int]]) -> list[str]:
        tokenizer, options = self.tokenizer, dict(self.generation_kwargs)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(self.model.device)
        if self.heads is not None:
            if self.mode == GenerationMode.SAMPLE:
                torch.manual_seed(own_seed(ids[0], self.seed))
            options["assistant_model"] = self.heads
        elif self.mode == GenerationMode.GREEDY_SEARCH:
            options["custom_generate"] = decode
        elif self.mode == GenerationMode.SAMPLE:
            count = options["max_new_tokens"]
            numbers = torch.stack([own_random_numbers(each, self.seed, count) for each in ids])  # [B, count]
            options["custom_generate"] = partial(decode, numbers=numbers.to(self.model.device))
        sequences = self.model.generate(**batch, pad_token_id=tokenizer.pad_token_id, **options)
        return tokenizer.batch_decode(sequences[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


class EndpointAnswers:
    """
    Answers from a server with OpenAI's chat interface, such as vLLM, SGLang or TGI, which serves the target.

    Args:
        base_url (`str`):
            Address of the server, such as `http://localhost:8000/v1`.
        model (`str`):
            The name under which the server knows the target.
        api_key (`str`, *optional*):
            The server's key, if it requires one.
        concurrency (`int`, *optional*, defaults to 64):
            Most requests that are open at once.
        request_kwargs:
            Fields of each request, such as `max_tokens` (1024 by default) and `temperature`.

    Example:

    ```python
    >>> from hf_clover.training import EndpointAnswers

    >>> answers = EndpointAnswers("http://localhost:8000/v1", "Qwen/Qwen3-0.6B", temperature=0.7)
    >>> answers.settings
    {'model': 'Qwen/Qwen3-0.6B', 'max_tokens': 1024, 'temperature': 0.7}
    ```
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        concurrency: int = 64,
        **request_kwargs: Any,
    ) -> None:
        self.url, self.concurrency = base_url.rstrip("/") + "/chat/completions", concurrency
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.settings = {"model": model, "max_tokens": 1024, **request_kwargs}

    def __call__(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Exception]]:
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            places = {pool.submit(self._answer, prompt): place for place, prompt in enumerate(prompts)}
            for future in as_completed(places):
                answer: str | Exception
                try:
                    answer = future.result()
                except Exception as error:
                    answer = error
                yield places[future], answer
        finally:
            pool.shutdown(cancel_futures=True)

    def _answer(self, prompt: Prompt) -> str:
        # Not through `huggingface_hub.InferenceClient`, which refuses any address while HF_HUB_OFFLINE is set.
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = json.dumps({"messages": messages, **self.settings}).encode()
        request = urllib.request.Request(self.url, body, self.headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error}: {error.read(500).decode(errors='replace')}") from error
        return answer["choices"][0]["message"]["content"] or ""


def regenerate(dataset: Dataset, answers: Answers, output_dir: str | os.PathLike) -> Dataset:
    """Answer every prompt of a dataset. Under `accelerate launch` each process answers its share.

    Args:
        dataset (`Dataset`):
            A dataset with a column `prompt` (texts or messages), `messages` or `conversations`. In messages, the
            prompt is everything up to the user's last message.
        answers ([`TargetAnswers`] or [`EndpointAnswers`]):
            The source of the answers.
        output_dir (`str` or `os.PathLike`):
            Folder for the answers. It belongs to one dataset and one kind of answers. A second run adds the answers
            that are missing.

    Returns:
        `Dataset`: the answers, with the columns `prompt` and `completion`

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_clover.training import TargetAnswers, regenerate
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer

    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> answers = TargetAnswers(model, AutoTokenizer.from_pretrained("org/target"), max_new_tokens=8)
    >>> regenerate(Dataset.from_dict({"prompt": ["def f(x):"]}), answers, "answers").column_names
    ['prompt', 'completion']
    ```
    """
    if not {"prompt", "messages", "conversations"} & set(dataset.column_names):
        raise ValueError(
            f"`dataset` has the columns {dataset.column_names} and no prompts: it needs `prompt`, `messages` or "
            "`conversations`."
        )
    state, folder = PartialState(), Path(output_dir)
    progress = folder / ".progress"
    progress.mkdir(parents=True, exist_ok=True)
    if state.is_main_process:
        _claim(progress / "identity.json", dataset, answers.settings)
    state.wait_for_everyone()
    finished = {line["index"] for line in _read_lines(progress.glob("answers-*.jsonl"))}
    own = [index for index in range(len(dataset)) if index not in finished][state.process_index :: state.num_processes]
    state.wait_for_everyone()  # no process writes before all have read

    with (
        open(progress / f"answers-{state.process_index:05d}.jsonl", "a") as answered,
        open(progress / f"errors-{state.process_index:05d}.jsonl", "a") as failed,
        tqdm(total=len(own), desc="Answering", unit="sample", disable=not state.is_local_main_process) as bar,
    ):
        asked, prompts = [], []
        for index in own:
            try:
                prompts.append(_prompt_of(dataset[index]))
                asked.append(index)
            except ValueError as error:
                _write_line(failed, index=index, sample=dataset[index], error=str(error))
                bar.update()
        for place, answer in answers(prompts):
            if isinstance(answer, Exception):
                reason = f"{type(answer).__name__}: {answer}"
                _write_line(failed, index=asked[place], prompt=prompts[place], error=reason)
            else:
                _write_line(answered, index=asked[place], prompt=prompts[place], completion=answer)
            bar.update()
    state.wait_for_everyone()
    if state.is_main_process:
        _collect(folder, progress, answers.settings)
    state.wait_for_everyone()
    return Dataset.from_parquet(str(folder / DATA_FILE))


def _prompt_of(sample: dict[str, Any]) -> Prompt:
    sample = maybe_convert_to_chatml(sample)
    prompt = sample.get("prompt") or sample.get("messages")
    if not prompt:
        raise ValueError("the sample has an empty prompt")
    if isinstance(prompt, str):
        return prompt
    last = max((place for place, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError("the sample has no message of the user")
    return [{"role": message["role"], "content": message["content"]} for message in prompt[: last + 1]]


def _collect(folder: Path, progress: Path, settings: dict[str, Any]) -> None:
    """Write one file of the answers, in the order of their prompts, and one of errors without a later answer."""
    answers = {line["index"]: line for line in _read_lines(progress.glob("answers-*.jsonl"))}
    failed = {line["index"]: line for line in _read_lines(progress.glob("errors-*.jsonl"))}
    errors = [failed[index] for index in sorted(failed.keys() - answers.keys())]
    write_whole(folder / "errors.jsonl", "".join(json.dumps(line) + "\n" for line in errors))
    if errors:
        logger.warning(
            f"{len(errors)} of {len(errors) + len(answers)} samples failed, the first with {errors[0]['error']!r}. "
            f"They are in {str(folder / 'errors.jsonl')!r}, and running again tries them again."
        )
    if not answers:
        reason = errors[0]["error"] if errors else "the dataset is empty"
        raise RuntimeError(f"No sample was answered: {reason}.")
    rows = []
    for index in sorted(answers):
        prompt, completion = answers[index]["prompt"], answers[index]["completion"]
        is_text = isinstance(prompt, str)
        message = [{"role": "assistant", "content": completion}]
        rows.append({"prompt": prompt, "completion": completion if is_text else message})
    with writing_whole(folder / DATA_FILE) as unfinished:
        Dataset.from_list(rows).to_parquet(str(unfinished))
    counts = {"samples": len(answers), "failed": len(errors)}
    made = {"model": settings["model"], **counts, "settings": settings, **provenance()}
    write_results(folder, regeneration=made)


def _claim(note: Path, dataset: Dataset, settings: dict[str, Any]) -> None:
    prompts = json.dumps(list(islice(dataset, 100)), sort_keys=True, default=str)
    identity = {
        "samples": len(dataset),
        "first_samples_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
        "settings": json.loads(json.dumps(settings, default=str)),
    }
    claim(note, identity, "output_dir", note.parent.parent, "answers to another dataset or with other settings")


def _write_line(file: Any, **line: Any) -> None:
    # The line break comes first, so that a line which a killed run left half-written stays a line of its own.
    try:
        file.write("\n" + json.dumps(line, default=str))
        file.flush()
    except OSError as error:
        with suppress(OSError):  # closing tries to write once more
            file.close()
        raise not_written(file.name, error) from error


def _read_lines(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in sorted(files):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # an empty line, or one that a killed run cut off
                continue


__all__ = ["EndpointAnswers", "TargetAnswers", "regenerate"]
