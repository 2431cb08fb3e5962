"""A target whose weights are divided among two processes says what it says in one, and no process waits for ever."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_text import ASCII, save_folders
from transformers import AutoModelForCausalLM
from two_ranks import OWN, SAMPLED, SHARED, TEXTS, UNEVEN, prompts, said

pytestmark = pytest.mark.long(
    "hf_clover/decoding/processes.py",
    "hf_clover/decoding/loop.py",
    "hf_clover/decoding/draft/session.py",
    "hf_clover/decoding/target",
)

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folders(tmp_path_factory.mktemp("two ranks"), says=ASCII)


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "target")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes under torchrun gave."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*TORCHRUN, str(HERE / "two_ranks.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


# ---------------------------------------------------------------------- tensor parallel


@pytest.mark.parametrize("name", SHARED)
def test_tensor_parallel_gives_the_tokens_of_one_process(name, ranks, target):
    plain = SHARED[name](target, None)
    first, second = (rank["tensor parallel"][name] for rank in ranks)
    assert first["method"] == second["method"] == "tree"
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    assert first["after"] == second["after"] == plain["after"]
    assert first["accepted"] > 2
    assert first["sizes"] == second["sizes"]


def test_every_process_holds_half_of_the_target(ranks, target):
    whole = target.model.layers[0].self_attn.k_proj.weight.shape[0]
    assert [rank["tensor parallel"]["local heads"] for rank in ranks] == [whole // 2] * 2


def test_all_processes_follow_the_first_ones_automatic_budget(ranks, target):
    first, second = (rank["tensor parallel"]["automatic"] for rank in ranks)
    plain = said(target, None, prompts(TEXTS[0]), **{**SAMPLED, "max_new_tokens": 60})
    assert first["sizes"] == second["sizes"]
    assert len(set(first["sizes"])) > 2  # it did choose
    assert first["tokens"] == second["tokens"] == plain["tokens"]


def test_all_processes_use_the_first_ones_random_numbers(ranks, target):
    first, second = (rank["tensor parallel"]["other seed"] for rank in ranks)
    plain = said(target, None, prompts(TEXTS[0]), **SAMPLED)
    assert first["tokens"] == second["tokens"] == plain["tokens"]


def test_making_heads_from_a_divided_target_is_refused(ranks):
    for rank in ranks:
        assert "is divided among processes" in rank["tensor parallel"]["from target"]


# ---------------------------------------------------------------------- FSDP


CASES = [("own", OWN), ("uneven", UNEVEN), ("turned", UNEVEN[::-1]), ("by transformers", UNEVEN)]


@pytest.mark.parametrize(("name", "cases"), CASES)
def test_processes_with_texts_of_different_lengths_end_together(name, cases, ranks, target):
    results = [rank["sharded"][name] for rank in ranks]
    for got, (inputs, options) in zip(results, cases, strict=True):
        plain = said(target, None, inputs, **options)
        assert got["tokens"] == plain["tokens"]
        assert got["cached"] == plain["cached"]
    assert sum(got["accepted"] for got in results) > 5
    assert results[0]["forwards"] == results[1]["forwards"]
    steps = [len(got["sizes"]) for got in results]
    assert steps[0] != steps[1]  # one of them kept the other company


def test_the_uneven_case_has_rows_that_end_far_apart(ranks):
    end = UNEVEN[0][1]["eos_token_id"]
    ends = [row.index(end, -24) for row in ranks[0]["sharded"]["uneven"]["tokens"]]
    assert ends[0] > ends[1] + 8
