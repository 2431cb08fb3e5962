"""`hf-clover env`: what it says, what it must not say, and the templates that ask for it."""

import getpass
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin
from typer.testing import CliRunner

import hf_clover
from hf_clover import cli
from hf_clover.measure.environment import PACKAGES, as_text, environment

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def report():
    return environment()


def test_the_report_agrees_with_this_machine(report):
    assert report["hf_clover"] == hf_clover.__version__
    assert report["python"] == platform.python_version()
    assert report["packages"] == {name: importlib.metadata.version(name) for name in PACKAGES}
    assert report["torch_build"]["threads"] == torch.get_num_threads()
    assert report["torch_build"]["cuda"] == torch.version.cuda
    assert 1 <= report["cpu"]["cores"] <= os.cpu_count()
    assert report["cpu"]["memory_gib"] > 0
    assert report["cpu"]["model"]
    assert len(report["devices"]) == torch.cuda.device_count()
    assert report["attention"][:2] == ["eager", "sdpa"]
    assert report["generate"] == {"hook_installed": True, "lacking_in_transformers": None}
    assert list(report["drafts"]) == ["trees", "chains", "a batch", "a static cache"]
    for said in report["drafts"].values():
        assert re.fullmatch(r"yes: \d+ of (48|96) tokens drafted, the text is the same", said)
    assert json.loads(json.dumps(report)) == report


def test_the_report_names_missing_packages_and_a_missing_hook(monkeypatch):
    hf_clover.uninstall_hook()
    try:
        monkeypatch.delattr(GenerationMixin, "_prefill")
        monkeypatch.setattr("hf_clover.measure.environment.installed_version", {"torch": "1.2"}.get)
        report = environment()
    finally:
        monkeypatch.undo()
        hf_clover.install_hook()
    assert report["generate"] == {"hook_installed": False, "lacking_in_transformers": "no `_prefill`"}
    assert report["packages"]["trl"] is None
    text = as_text(report)
    assert "- trl: not installed" in text
    assert "- torch: 1.2" in text
    assert "- generate: hook installed no, lacking in transformers no `_prefill`" in text


def test_a_hook_that_leaves_heads_out_is_reported_as_not_installed(monkeypatch):
    """Where transformers lacks a name, the only wrapper is the one that leaves heads out."""
    from hf_clover.targets import private_api

    hf_clover.uninstall_hook()
    monkeypatch.setattr(private_api, "PRIVATE_NAMES", {"_renamed_since": ()})
    try:
        with pytest.warns(UserWarning, match="no `_renamed_since`"):
            hf_clover.install_hook()
        assert environment()["generate"]["hook_installed"] is False
    finally:
        hf_clover.uninstall_hook()
        monkeypatch.undo()
        hf_clover.install_hook()
    assert environment()["generate"]["hook_installed"] is True


def test_the_report_describes_every_gpu(monkeypatch):
    properties = type("Properties", (), {"name": "NVIDIA H200", "total_memory": 141 * 2**30, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device = {"name": "NVIDIA H200", "memory_gib": 141.0, "capability": "9.0"}
    assert environment()["devices"] == [device, device]
    one = "name NVIDIA H200, memory gib 141.0, capability 9.0"
    assert f"- devices: {one}; {one}" in as_text(environment())


def test_the_env_command_prints_the_report(report):
    printed = CliRunner().invoke(cli.app, ["env"])
    assert (printed.exit_code, printed.stdout.strip()) == (0, as_text(report))
    assert all(re.fullmatch(r"- [\w ]+: \S.*", line) for line in printed.stdout.splitlines())
    as_json = CliRunner().invoke(cli.app, ["env", "--json"])
    assert json.loads(as_json.stdout) == report


@pytest.mark.long("hf_clover/cli", "hf_clover/measure")
def test_the_report_holds_no_user_name_path_or_token(tmp_path):
    """In a process with a name, a home and tokens that would be noticed."""
    home = tmp_path / "home-of-somebody"
    home.mkdir()
    secrets = {
        "HOME": str(home),
        "USER": "somebodysname",
        "LOGNAME": "somebodysname",
        "HF_TOKEN": "hf_secretsecret",
        "HF_HOME": str(home / "hub"),
        "OPENAI_API_KEY": "sk-secretsecret",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", "from hf_clover.cli import main; main()", "env", "--json"]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=home, env={**os.environ, **secrets}
    )
    assert process.returncode == 0, process.stderr
    said = json.dumps(json.loads(process.stdout))
    users = [name for name in (getpass.getuser(), socket.gethostname()) if len(name) > 4]
    for private in (*secrets.values(), str(ROOT), sys.prefix, "/", "somebody", "secret", *users):
        assert private not in said, private


# ---------------------------------------------------------------------- the papers of the project


@pytest.mark.parametrize("form", ["bug", "slow", "question"])
def test_issue_forms_ask_for_the_report(form):
    yaml = pytest.importorskip("yaml")
    asked = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())
    assert {"name", "description", "body"} <= set(asked)
    fields = {field["id"]: field for field in asked["body"]}
    assert "hf-clover env" in fields["env"]["attributes"]["label"]
    assert form == "question" or fields["env"]["validations"]["required"]


def test_paths_named_in_contributing_changelog_and_checklist_exist():
    known = {"examples/experiments", "examples/benchmarks"}
    for page in ("CONTRIBUTING.md", "CHANGELOG.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        text = (ROOT / page).read_text()
        paths = re.findall(
            r"`((?:hf_clover|tests|examples|hub_cards|\.ci)/[\w/.]*|[\w-]+\.(?:txt|cfg|md|toml))`", text
        )
        assert paths, page
        for path in {*paths, *known}:
            homes = (ROOT / path, ROOT / "hf_clover" / path)
            assert any(home.exists() for home in homes), f"{page} names {path}"
