"""Data from the target itself: prompts in, the target's own answers out.

Contract: `regenerate` asks `answers` for every prompt of a dataset and leaves in a folder what `load_dataset(folder)`
reads and the trainer takes: `prompt` and `completion`. Each answer is on disk as soon as it is there, so a run that
was stopped goes on after its last finished sample, with any number of processes. A sample that fails is set aside in
`errors.jsonl` with its reason and tried again by the next run. Where answers come from is not known to `regenerate`:
`TargetAnswers` (generate, with heads or without) or `EndpointAnswers` (a server with OpenAI's interface).
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
MOST_PADDING = 128  # tokens before a prompt: reading more of them costs more than another, smaller batch
REQUEST_TIMEOUT = 3600  # seconds; a busy server keeps requests waiting


class Answers(Protocol):
    """Where answers come from. `settings` says what they depend on."""

    settings: dict[str, Any]

    def __call__(self, prompts: Sequence[Prompt]) -> Iterable[tuple[int, str | Exception]]:
        """The place of each prompt and its answer, or why there is none, in any order."""


class TargetAnswers:
    """
    Answers by the target's own `generate`, in batches.

    Args:
        model (`PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`):
            The target's.
        assistant_model ([`CloverHeads`], *optional*):
            Heads to speculate with; the answers stay the target's.
        batch_size (`int`, *optional*, defaults to 32):
            Prompts in one call of `generate`, which are of about the same length; the longest go first.
        seed (`int`, *optional*, defaults to 0):
            For samples. Without heads an answer depends on the seed and its own prompt (and on rounding): not on the
            order, the batch, the number of processes or on where a run was stopped. A prompt that comes twice gets the
            same answer twice. With heads it depends on the other prompts of its batch too.
        generation_kwargs:
            For `generate`, such as `max_new_tokens` (1024 unless given), `do_sample`, `temperature`.

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
        for place in sorted(ids, key=lambda place: -len(ids[place])):  # what is too much for the memory shows at once
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
        for half in (
            places[: len(places) // 2],
            places[len(places) // 2 :],
        ):  # one prompt of them, or too many at once
            yield from self._answers(half, ids)

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
    Answers by a server that speaks OpenAI's chat interface, such as vLLM, SGLang or TGI serving the target.

    Args:
        base_url (`str`):
            Of the server.
        model (`str`):
            The name under which the server knows the target.
        api_key (`str`, *optional*):
            Where the server wants one.
        concurrency (`int`, *optional*, defaults to 64):
            Requests under way at once.
        request_kwargs:
            For each request, such as `max_tokens` (1024 unless given) and `temperature`.

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
            With a column `prompt` (texts or messages), or `messages` or `conversations`, of which everything up to the
            last message of the user is the prompt.
        answers ([`TargetAnswers`] or [`EndpointAnswers`]):
            Where answers come from.
        output_dir (`str` or `os.PathLike`):
            Where they are kept. It belongs to one dataset and one kind of answers; running again continues what is
            missing.

    Returns:
        `Dataset`: with the columns `prompt` and `completion`

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
    """The answers in the order of their prompts as one file, the errors that no later run has mended as another."""
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
    # The break first, so that what a killed run left half-written stays alone.
    try:
        file.write("\n" + json.dumps(line, default=str))
        file.flush()
    except OSError as error:
        with suppress(OSError):  # it tries once more
            file.close()
        raise not_written(file.name, error) from error


def _read_lines(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in sorted(files):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # empty, or cut off when a run was killed
                continue


__all__ = ["EndpointAnswers", "TargetAnswers", "regenerate"]
