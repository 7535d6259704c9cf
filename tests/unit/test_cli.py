"""The command line: what a user types, and what it says when that cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minisgl.cli import COMMANDS, main
from tests.e2e.model_factory import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen3_moe")
    return str(path)


def test_generate_streams_one_prompt(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "generate",
                "--model",
                folder,
                "--device",
                "cpu",
                "--num-pages",
                "50",
                "a fox",
                "--max-tokens",
                "8",
            ]
        )
        == 0
    )
    first = capsys.readouterr().out
    assert (
        main(
            [
                "generate",
                "--model",
                folder,
                "--device",
                "cpu",
                "--num-pages",
                "50",
                "a fox",
                "--max-tokens",
                "8",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == first != "\n"


def test_generate_json_for_several_prompts(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "generate",
        "--model",
        folder,
        "--device",
        "cpu",
        "--num-pages",
        "50",
        "--max-tokens",
        "4",
        "--json",
        "a",
        "b",
    ]
    assert main(line) == 0
    outputs = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [o["prompt"] for o in outputs] == ["a", "b"]
    assert all(1 <= len(o["token_ids"]) <= 4 for o in outputs)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["generate", "hello"], "--model"),
        (["generate", "--model", "/no/such/folder", "hello"], "/no/such/folder"),
        (["generate", "--model", "FOLDER", "--page-size", "0", "hello"], "--page-size"),
        (["generate", "--model", "FOLDER", "--temperature", "-1", "hello"], "temperature"),
        (["generate", "--model", "FOLDER", "--tp", "3", "hello"], "--tp=3 does not fit"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    folder: str, line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([folder if word == "FOLDER" else word for word in line]) == 2
    message = capsys.readouterr().err
    assert words in message.replace("\n", " ")
    assert "Traceback" not in message


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"minisgl {command}" in capsys.readouterr().out


def test_tuning_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["tune", "--model", "demo"]) == 2
    assert "CUDA" in capsys.readouterr().err
