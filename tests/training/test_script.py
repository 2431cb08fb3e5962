"""The training program from its arguments to saved heads, and the ready configurations."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from tiny import make_target, make_tokenizer

from hf_clover import CloverHeads
from hf_clover.training import script

pytestmark = pytest.mark.long("hf_clover/network")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A target with its tokenizer, and a dataset with a training and a test split."""
    make_target().save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "data").mkdir()
    for split, count in (("train", 8), ("test", 2)):
        turns = [
            [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": "w3 w4 w5"}] for i in range(count)
        ]
        Dataset.from_dict({"messages": turns}).to_json(tmp_path / "data" / f"{split}.jsonl")
    return tmp_path


def write_config(workdir: Path, **fields: Any) -> list[str]:
    config = {
        "teacher_model_name_or_path": str(workdir / "target"),
        "dataset_name": str(workdir / "data"),
        "output_dir": str(workdir / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 2,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"variant": "medusa", "num_heads": 2},
        **fields,
    }
    (workdir / "config.yaml").write_text(yaml.safe_dump(config))
    return ["--config", str(workdir / "config.yaml")]


def test_training_takes_a_config_file_and_flags(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = script.main([*write_config(workdir), "--assistant_only_loss", "--loss_type", "acceptance"])
    assert trainer.args.loss_type == "acceptance"
    assert any("eval_tokens_per_forward" in line for line in trainer.state.log_history)
    heads = CloverHeads.from_pretrained(workdir / "out")
    assert (heads.config.variant, heads.config.num_heads) == ("medusa", 2)
    assert heads.config.target_name_or_path == str(workdir / "target")
    assert f"Heads saved to {workdir / 'out'}" in capsys.readouterr().out


def test_training_goes_on_from_a_checkpoint_and_from_saved_heads(workdir: Path) -> None:
    script.main(write_config(workdir))
    resumed = script.main([*write_config(workdir, max_steps=6), "--resume_from_checkpoint", "true"])
    steps = [line["step"] for line in resumed.state.log_history if "train_runtime" in line]
    assert steps[-1] == 6
    adapted = script.main(
        write_config(
            workdir,
            model_name_or_path=str(workdir / "out"),
            output_dir=str(workdir / "adapter"),
            model_init_kwargs=None,
            use_peft=True,
            lora_r=2,
            eval_strategy="no",
        )
    )
    assert adapted.heads.config.num_heads == 2
    assert (workdir / "adapter" / "adapter_model.safetensors").exists()


def test_a_finished_run_changes_nothing(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_config(workdir, max_steps=3, lr_scheduler_type="constant", eval_strategy="no")
    script.main(arguments)
    before = {file: file.read_bytes() for file in (workdir / "out").rglob("*") if file.is_file()}
    capsys.readouterr()
    script.main([*arguments, "--resume_from_checkpoint", "true"])
    assert {file: file.read_bytes() for file in (workdir / "out").rglob("*") if file.is_file()} == before
    assert capsys.readouterr().out == f"The run was over: the heads in {workdir / 'out'} are as they were.\n"
    (workdir / "out" / "model.safetensors").unlink()  # killed after the last checkpoint
    script.main([*arguments, "--resume_from_checkpoint", "true"])
    assert (workdir / "out" / "model.safetensors").read_bytes() == before[workdir / "out" / "model.safetensors"]


@pytest.mark.parametrize("name", ["teacher_model_name_or_path", "dataset_name"])
def test_a_missing_argument_is_named(workdir: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is required"):
        script.main(write_config(workdir, **{name: None}))


def test_a_dataset_file_is_read_and_a_missing_split_refused(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir / "data")
    script.main(write_config(workdir, dataset_name="train.jsonl", eval_strategy="no", max_steps=1))
    assert CloverHeads.from_pretrained(workdir / "out").config.num_heads == 2
    message = (
        r"`dataset_test_split='test'`: 'train.jsonl' has 'train' alone\. Put its evaluation data beside it in a "
        r"folder, as train.jsonl and test.jsonl, and pass the folder; or pass `--eval_strategy no`"
    )
    with pytest.raises(ValueError, match=message):
        script.main(write_config(workdir, dataset_name="train.jsonl"))
    with pytest.raises(
        ValueError, match=r"'dev'`: '\.' has \['test', 'train'\]; name one, or pass `--eval_strategy no`"
    ):
        script.main(write_config(workdir, dataset_name=".", dataset_test_split="dev"))
    with pytest.raises(ValueError, match=r"`dataset_train_split='learn'`: '\.' has \['test', 'train'\]; name one\."):
        script.main(write_config(workdir, dataset_name=".", dataset_train_split="learn"))


def test_the_help_describes_heads_and_not_fine_tuning() -> None:
    said = " ".join(script.make_parser().format_help().split())
    of_fine_tuning = ("Works only with LoRA", "instruction fine-tuning", "for weights initialization")
    for untrue in (*of_fine_tuning, "throughput by ~20"):
        assert untrue not in said
    assert "Load the target in 4 bits" in said
    assert "Heads to go on with" in said


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "data/trian.jsonl", "nowhere.jsonl"])
def test_a_mistyped_path_is_an_error_at_once(workdir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)
    with pytest.raises(ValueError, match=f"the dataset {name!r} is not here: there is no such file or folder"):
        script.main(write_config(workdir, dataset_name=name))
    with pytest.raises(ValueError, match=r"the target '\./nowhere' is not here"):
        script.main(write_config(workdir, teacher_model_name_or_path="./nowhere"))
    with pytest.raises(ValueError, match=r"the heads '\./nowhere' is not here"):
        script.main(write_config(workdir, model_name_or_path="./nowhere", model_init_kwargs=None))


def test_unknown_fields_are_named(workdir: Path) -> None:
    with pytest.raises(ValueError, match="--no_such_field"):
        script.main(write_config(workdir, no_such_field=1))


def test_options_for_loading_the_target_come_from_the_arguments() -> None:
    parse = script.make_parser().parse_args_and_config
    common = ["--output_dir", "out", "--use_cpu", "--bf16", "false"]
    _, training_args, model_args = parse([*common, "--attn_implementation", "sdpa"])
    options = script.target_options(training_args, model_args)
    assert options == {"dtype": "auto", "attn_implementation": "sdpa", "trust_remote_code": False}
    _, training_args, model_args = parse(
        [*common, "--teacher_model_init_kwargs", '{"revision": "v2", "dtype": "float32"}']
    )
    options = script.target_options(training_args, model_args)
    assert (options["revision"], options["dtype"]) == ("v2", "float32")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("configs/*.yaml")), ids=lambda file: file.stem)
def test_example_configs_are_understood(file: Path) -> None:
    parser = script.make_parser()
    script_args, training_args, model_args = parser.parse_args_and_config(
        ["--config", str(file), "--use_cpu", "--bf16", "false"]
    )
    assert script_args.dataset_name
    assert training_args.teacher_model_name_or_path
    assert model_args.load_in_4bit == ("4bit" in file.stem)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("accelerate/*.yaml")), ids=lambda file: file.stem)
def test_accelerate_files_are_understood(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))
    assert config.mixed_precision == "bf16"
    if "fsdp" in file.stem:
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False
