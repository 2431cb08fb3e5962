"""Commands as a user types them, and the tiny models that they are given."""

import io
import sys
from types import SimpleNamespace

import pytest
from helpers.tiny_text import ASCII, save_folders

from hf_clover import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("commands"), says=ASCII)


@pytest.fixture(scope="module")
def models(folder) -> list[str]:
    return ["--target", str(folder / "target"), "--heads", str(folder / "heads")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`main` with these words -> exit code, stdout, stderr. Nothing is a terminal."""

    def call(*words: str, stdin: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["hf-clover", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            sys.exit(cli.main())
        out, err = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code or 0, out=out, err=err)

    return call
