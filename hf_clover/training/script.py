"""The training program, behind `hf-clover train` and `examples/train.py`.

Contract: reads arguments, and leaves trained heads in `output_dir`. All arguments are fields of trl's
`ScriptArguments` and `ModelConfig` and of `CloverTrainingConfig`, on the command line or in a YAML file given with
`--config`. This module reads arguments and loads data; the trainer does the rest.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ..targets.loading import hide_loading_bars
from .callbacks import AcceptanceCallback
from .config import CloverTrainingConfig
from .data import source_of
from .storage import WEIGHTS
from .trainer import CloverTrainer


@dataclass
class TargetModelConfig(ModelConfig):
    """
    trl's `ModelConfig`, with these meanings: `model_name_or_path` and `model_revision` name heads to train further
    (without them, new heads are made); `use_peft` and `lora_*` describe an adapter for those heads; `dtype`,
    `attn_implementation`, `load_in_4bit`, `gguf_file` and the like say how the target is loaded.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Heads to go on with (a Hub id or a folder). Default: new ones."}
    )
    model_revision: str = field(default="main", metadata={"help": "The revision of those heads."})
    attn_implementation: str | None = field(default=None, metadata={"help": "The attention of the target."})
    use_peft: bool = field(
        default=False, metadata={"help": "Train a LoRA adapter on the heads of `model_name_or_path`, not the heads."}
    )
    load_in_8bit: bool = field(
        default=False, metadata={"help": "Load the target in 8 bits. It is frozen, and needs no LoRA for that."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Load the target in 4 bits. It is frozen, and needs no LoRA for that."}
    )
    dtype: str | None = field(
        default="auto",
        metadata={
            "help": "The dtype to load the target in. It defaults to the target's own.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    gguf_file: str | None = field(
        default=None, metadata={"help": "Load the target from this GGUF file in its repository or folder."}
    )


def make_parser(prog: str | None = None) -> TrlParser:
    example = f"Example: {prog or 'train.py'} --config examples/configs/qwen3-0.6b.yaml"
    classes: Any = (ScriptArguments, CloverTrainingConfig, TargetModelConfig)  # trl's type allows several of one kind
    return TrlParser(classes, prog=prog, epilog=example)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> CloverTrainer:
    hide_loading_bars()
    script_args, training_args, model_args = make_parser(prog).parse_args_and_config(argv)
    if training_args.teacher_model_name_or_path is None:
        raise ValueError("`teacher_model_name_or_path` is required: the target to make heads for.")
    if script_args.dataset_name is None:
        raise ValueError("`dataset_name` is required: a dataset of the Hub, a folder of files, or a file.")
    training_args.teacher_model_init_kwargs = target_options(training_args, model_args)
    if model_args.model_name_or_path is not None:
        options = training_args.model_init_kwargs or {}
        training_args.model_init_kwargs = {"revision": model_args.model_revision, **options}

    source = source_of(script_args.dataset_name)
    dataset = load_dataset(**source, name=script_args.dataset_config, streaming=script_args.dataset_streaming)
    evaluates = training_args.eval_strategy != "no"
    trainer = CloverTrainer(
        model=model_args.model_name_or_path,
        teacher_model=training_args.teacher_model_name_or_path,
        args=training_args,
        train_dataset=_split(dataset, script_args, "dataset_train_split"),
        eval_dataset=_split(dataset, script_args, "dataset_test_split") if evaluates else None,
        peft_config=get_peft_config(model_args),
    )
    if evaluates and not trainer.teacher.is_sharded:
        trainer.add_callback(AcceptanceCallback(trainer))

    trainer.train(resume_from_checkpoint=_checkpoint(training_args.resume_from_checkpoint))
    if trainer.was_interrupted:
        trainer.accelerator.print("Interrupted. Go on with the same arguments and `--resume_from_checkpoint true`.")
        return trainer
    if trainer.is_over and any(os.path.exists(os.path.join(training_args.output_dir, name)) for name in WEIGHTS):
        trainer.accelerator.print(f"The run was over: the heads in {training_args.output_dir} are as they were.")
    else:
        trainer.save_model(training_args.output_dir)
        trainer.create_model_card(dataset_name=script_args.dataset_name)
        trainer.accelerator.print(f"Heads saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.accelerator.print(f"Heads pushed to https://huggingface.co/{trainer.hub_model_id}.")
    trainer.end()
    return trainer


def _split(dataset: DatasetDict | IterableDatasetDict, args: ScriptArguments, name: str) -> Dataset | IterableDataset:
    """The split that the argument `name` names."""
    split = getattr(args, name)
    if split not in dataset:
        is_test = name == "dataset_test_split"
        if is_test and list(dataset) == [args.dataset_train_split]:
            only, kind = args.dataset_train_split, Path(str(args.dataset_name)).suffix or ".jsonl"
            raise ValueError(
                f"`{name}={split!r}`: {args.dataset_name!r} has {only!r} alone. Put its evaluation data beside it in "
                f"a folder, as {only}{kind} and {split}{kind}, and pass the folder; or pass `--eval_strategy no`."
            )
        otherwise = ", or pass `--eval_strategy no`" if is_test else ""
        raise ValueError(f"`{name}={split!r}`: {args.dataset_name!r} has {sorted(dataset)}; name one{otherwise}.")
    return dataset[split]


def target_options(training_args: CloverTrainingConfig, model_args: TargetModelConfig) -> dict[str, Any]:
    """The keyword arguments for loading the target; those in `teacher_model_init_kwargs` win."""
    if model_args.load_in_4bit and model_args.dtype == "auto":
        model_args.dtype = "bfloat16"  # 4-bit weights need a dtype to compute in
    options = {
        "dtype": model_args.dtype,
        "gguf_file": model_args.gguf_file,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
        "quantization_config": get_quantization_config(model_args),
    }
    given: Any = training_args.teacher_model_init_kwargs or {}  # text is parsed by now
    return {name: value for name, value in {**options, **given}.items() if value is not None}


def _checkpoint(value: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint`, with the text "true" from the command line as `True`: `output_dir`'s last one."""
    return value.lower() == "true" or value if isinstance(value, str) else value


if __name__ == "__main__":
    main()
