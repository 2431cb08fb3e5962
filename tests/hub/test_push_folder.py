"""What a push takes along, what it leaves, and what happens when it goes wrong. No model is loaded here."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hub_models import files_in
from hub_server import TOKEN

from hf_clover.hub import push as push_module
from hf_clover.hub.cards import MARKER

pytestmark = pytest.mark.long("hub_cards", "hf_clover/network")

CARD = "---\nlicense: mit\n---\nMy own words.\n"
PUSH = "from hf_clover.hub.push import push_folder; print(push_folder({0!r}, {1!r}, **{2!r}).oid)"


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    return Path(shutil.copytree(folders.heads, tmp_path / "heads"))


@pytest.fixture
def repo(request) -> str:
    """A name of its own for each test."""
    return f"org/{request.node.name.replace('[', '-').strip(']').replace(' ', '-')}"[:90].replace("_", "-")


@pytest.fixture
def push(client):
    def push(folder: Path, repo: str, fails: bool = False, **options) -> subprocess.CompletedProcess:
        return client(PUSH.format(str(folder), repo, options), fails=fails, HF_DEBUG="1")

    return push


def test_files_that_do_not_belong_to_heads_are_not_pushed(hub, push, folder, repo):
    others = ("training_args.bin", "optimizer.pt", "checkpoint-10/model.safetensors", "runs/events", ".env", "x.log")
    for path in others:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(b"\x80")
    (folder / "LICENSE").write_text("as you like")
    push(folder, repo)
    kept = files_in(folder).keys() - {*others}
    assert hub.repositories[repo].files().keys() == {*kept, ".gitattributes"}
    assert kept > {"LICENSE", "custom_generate/generate.py"}


def test_a_second_push_makes_a_commit_of_what_has_changed_since(hub, push, folder, repo):
    first = push(folder, repo, license="mit").stdout
    assert push(folder, repo).stdout == first
    assert len(hub.repositories[repo].commits) == 2, "one, and the creation"
    (folder / "clover_results.json").write_text(json.dumps({"training": {"tokens": 4321}}))
    push(folder, repo)
    card = hub.repositories[repo].files()["README.md"].decode()
    for words in (MARKER, "4,321", "license: mit", f'from_pretrained("{repo}")'):
        assert words in card
    assert (folder / "README.md").read_text() == card


def test_a_name_without_a_namespace_belongs_to_the_user(hub, push, folder):
    push(folder, "heads-of-mine")
    assert b'"me/heads-of-mine"' in hub.repositories["me/heads-of-mine"].files()["README.md"]


def test_a_pull_request_leaves_the_branch_alone(hub, push, folder, repo):
    hub.put(repo, {"README.md": b"theirs"})
    push(folder, repo, create_pr=True)
    assert hub.repositories[repo].files() == {"README.md": b"theirs"}
    assert "model.safetensors" in hub.repositories[repo].files("refs/pr/1")


def test_weights_of_an_earlier_push_are_removed_and_other_files_kept(hub, push, folder, repo):
    """transformers would load them in place of the new ones. A card written by hand is kept, too."""
    old = {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"{}"}
    kept = {"notes.txt": b"kept", "other/model.safetensors": b"kept", "README.md": CARD.encode()}
    hub.put(repo, {**old, **kept})
    push(folder, repo)
    files = hub.repositories[repo].files()
    assert not files.keys() & old.keys()
    assert {path: files[path] for path in kept} == kept


def test_a_card_written_by_hand_in_the_folder_is_pushed(hub, push, folder, repo):
    (folder / "README.md").write_text(CARD)
    push(folder, repo)
    assert hub.repositories[repo].files()["README.md"].decode() == CARD


def test_paths_of_this_machine_are_not_pushed(hub, push, folder, repo, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["target_name_or_path"] = str(tmp_path / "my target")
    (folder / "config.json").write_text(json.dumps(config))
    push(folder, repo)
    files = hub.repositories[repo].files()
    assert json.loads(files["config.json"])["target_name_or_path"] == "my-target"
    assert not [path for path, content in files.items() if str(tmp_path).encode() in content]
    assert b"base_model" not in files["README.md"]


def test_the_card_form_that_peft_leaves_is_replaced(hub, push, folders, repo, tmp_path):
    folder = Path(shutil.copytree(folders.adapter, tmp_path / "adapter"))
    (folder / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n# Model Card for Model ID\n[More Information Needed]"
    )
    push(folder, repo)
    files = hub.repositories[repo].files()
    assert set(files) - {".gitattributes"} <= {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "clover_results.json"),
    }
    assert b"[More Information Needed]" not in files["README.md"]
    assert b"base_model: org/clover-heads" in files["README.md"]


# ---------------------------------------------------------------------- without a Hub


NOBODY = "http://127.0.0.1:9"  # where no Hub answers


def test_a_failed_push_leaves_the_folder_as_it_was(folders, client, tmp_path):
    for name, kind in (("heads", folders.heads), ("adapter", folders.adapter)):
        folder = Path(shutil.copytree(kind, tmp_path / name))
        shutil.rmtree(folder / "custom_generate", ignore_errors=True)
        before = files_in(folder)
        done = client(PUSH.format(str(folder), "me/x", {}), fails=True, HF_ENDPOINT=NOBODY)
        assert f"ConnectionError: the Hub at {NOBODY} does not answer" in done.stderr
        assert "Nothing was pushed to 'me/x', and nothing has changed in" in done.stderr
        assert files_in(folder) == before


def command(environment: dict[str, str], *words: str, **changes: str) -> subprocess.CompletedProcess:
    code = "from hf_clover.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment | changes, capture_output=True, text=True, timeout=180
    )


def test_the_push_command_says_in_one_line_that_no_hub_answers(environment, folder):
    before = files_in(folder)
    done = command(environment, "push", str(folder), "me/x", HF_ENDPOINT=NOBODY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hf-clover: the Hub at {NOBODY} does not answer")
    assert len(done.stderr.splitlines()) == 1
    assert files_in(folder) == before


def test_a_dry_run_shows_the_files_and_the_card(environment, hub, push, folder, repo):
    before, asked = files_in(folder), len(hub.requests)
    done = command(environment, "push", str(folder), repo, "--subfolder", "heads", "--dry-run", HF_ENDPOINT=NOBODY)
    assert done.returncode == 0, done.stderr
    files, card = done.stdout.split("\nheads/README.md, ", 1)
    assert f"Would go to {repo}:" in files
    said = {line.split()[0] for line in files.splitlines()[1:] if line}
    assert f'from_pretrained("{repo}", subfolder="heads")' in card
    assert (files_in(folder), len(hub.requests)) == (before, asked)
    push(folder, repo, subfolder="heads")
    assert set(hub.repositories[repo].files()) == {*said, ".gitattributes"}
    assert hub.repositories[repo].files()["heads/README.md"].decode() == card.split("\n\n", 1)[1]


# ---------------------------------------------------------------------- what is wrong with the folder, said first


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "holds neither heads nor an adapter of heads nor a dataset"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "holds neither heads"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "no weights in safetensors"),
        (lambda f: (f / "clover_results.json").write_text(json.dumps({"benchmarks": [{}]})), "has no `prompts`"),
        (lambda f: (f / "clover_results.json").write_text(json.dumps({"note": TOKEN})), "access token in 'clover_res"),
        (lambda f: (f / "LICENSE").write_text("hf_" + "a1" * 17), "access token in 'LICENSE': take it out"),
    ],
)
def test_a_folder_that_cannot_be_pushed_is_refused_before_any_request(spoil, message, folder, monkeypatch):
    spoil(folder)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(push_module, "HfApi", lambda **_: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match=message) as refused:
        push_module.push_folder(folder, "org/never")
    assert TOKEN not in str(refused.value)


# ---------------------------------------------------------------------- what goes wrong on the way


@pytest.fixture
def changed(hub, folder, repo) -> Path:
    """A folder that is on the Hub, and its weights changed since."""
    hub.put(repo, files_in(folder))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-4:] = hashlib.sha1(repo.encode()).digest()[:4]  # which the server has not seen
    (folder / "model.safetensors").write_bytes(weights)
    return folder


FAULTS = {
    "no such repository": (("POST", "/preupload/"), 404, "404"),
    "server error": (("POST", "/commit/"), 500, "500"),
    "dropped connection": (("POST", "/commit/"), "drop", "RemoteProtocolError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_hub_is_reported_and_changes_nothing(fault, hub, push, changed, repo):
    where, what, message = FAULTS[fault]
    before = hub.repositories[repo].files()
    hub.faults[where] = what
    try:
        done = push(changed, repo, fails=True)
    finally:
        hub.faults.clear()
    assert message in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert hub.repositories[repo].files() == before


def test_a_wrong_token_is_reported_and_not_printed(hub, push, folder):
    wrong = "hf_" + "x" * 34
    done = push(folder, "org/never", fails=True, token=wrong)
    assert "401" in done.stderr
    assert "Invalid username or password" in done.stderr
    assert wrong not in done.stdout + done.stderr
    assert "org/never" not in hub.repositories


def test_an_interrupted_push_leaves_the_old_revision_and_can_be_repeated(hub, environment, push, changed, repo):
    before, commits = hub.repositories[repo].files(), len(hub.repositories[repo].commits)
    hub.faults["PUT", "/lfs/"] = "stall"
    code = PUSH.format(str(changed), repo, {})
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        assert hub.stalled.wait(60)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        hub.faults.clear()
    assert hub.repositories[repo].files() == before
    push(changed, repo)
    after = hub.repositories[repo]
    assert after.files()["model.safetensors"] == (changed / "model.safetensors").read_bytes()
    assert len(after.commits) == commits + 1
