"""When the engine does not fit, its error is the plan: in Python, for generate and for serve."""

from __future__ import annotations

import argparse
import ast
import shlex
from pathlib import Path

import pytest

from minisgl import LLM
from minisgl.cli import main
from minisgl.config import EngineConfig, engine_options
from minisgl.engine import engine as engine_module
from minisgl.engine.memory import DoesNotFit
from minisgl.generate import add_generate_arguments
from minisgl.planner import options_of
from minisgl.planner.command import add_plan_arguments
from tests.e2e.model_factory import make_model

TOO_MANY = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model(path, "qwen3_moe")
    return str(path)


def suggestions(text: str) -> list[str]:
    """The lines after "These fit:", without their remarks."""
    lines = text[text.index("These fit:") :].splitlines()[1:]
    found = [line.split("   # ")[0].strip() for line in lines if "   # " in line]
    assert 1 <= len(found) <= 3
    return found


def test_in_python_the_error_names_calls_that_work(folder: str) -> None:
    with pytest.raises(DoesNotFit, match="GiB are missing") as error:
        LLM(folder, device="cpu", num_pages=TOO_MANY, page_size=8)
    assert error.value.needed > error.value.available and error.value.ledger is not None
    calls = suggestions(str(error.value))
    call = ast.parse(calls[0], mode="eval").body
    assert isinstance(call, ast.Call) and ast.literal_eval(call.args[0]) == folder
    options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    assert options["page_size"] == 8, "what was asked for and is not too much stays"
    LLM(folder, **options).close()


def test_generate_exits_with_command_lines_that_parse(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--model", folder, "--num-pages", str(TOO_MANY), "--page-size", "8", "a fox"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert "GiB are missing" in err and "LLM(" not in err
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    for command in suggestions(err):
        words = shlex.split(command)
        assert words[:4] == ["python", "-m", "minisgl", "generate"]
        args = parser.parse_args(words[4:])
        assert args.prompt == ["a fox"] and args.page_size == 8
        EngineConfig.from_kwargs(**engine_options(args))
    assert main([*shlex.split(suggestions(err)[0])[3:], "--max-tokens", "2"]) == 0


def test_serve_tells_it_before_it_ends(folder: str) -> None:
    factory = pytest.importorskip("minisgl.server.engine_factory", reason="needs minisgl[server]")
    commands = pytest.importorskip("minisgl.server.commands", reason="needs minisgl[server]")
    config = EngineConfig.from_kwargs(model=folder, num_pages=TOO_MANY, page_size=8, device="cpu")
    with pytest.raises(DoesNotFit, match="GiB are missing") as error:
        factory.ModelEngine(config, folder)()
    parser = argparse.ArgumentParser()
    commands.add_serve_arguments(parser)
    for command in suggestions(str(error.value)):
        words = shlex.split(command)
        assert words[:4] == ["python", "-m", "minisgl", "serve"]
        EngineConfig.from_kwargs(**engine_options(parser.parse_args(words[4:])))


def test_options_of_a_configuration_make_it_again() -> None:
    given = {"model": "x", "page_size": 8, "moe_expert_offload": True, "moe_replicated_experts": ()}
    config = EngineConfig.from_kwargs(**given)
    assert options_of(config) == {"model": "x", "page_size": 8, "moe_expert_offload": True}
    assert EngineConfig.from_kwargs(**options_of(config)) == config


def test_the_allocators_refusal_is_one_too(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch_error("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    torch_error = engine_module.torch.OutOfMemoryError
    monkeypatch.setattr(engine_module, "load_weights", refuse)
    monkeypatch.setattr(engine_module, "cuda_budget", lambda *_: 2**30)
    with pytest.raises(DoesNotFit, match=r"ran out of memory while loading \(CUDA out of memory"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu-memory", "12 potatoes"],
        ["--gpu", "Voodoo 2"],
        ["--context", "-1"],
        ["--gpu", "H200", "--tp", "3"],
        ["--link-gbps", "nan"],
        ["--moe-expert-quantization", "int3"],
    ],
)
def test_bad_input_ends_with_exit_code_2(
    folder: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["plan", "--model", folder, *words])
    except SystemExit as error:  # argparse's own refusals
        code = error.code
    assert code == 2 and capsys.readouterr().err.count("\n") >= 1


def test_bad_configs_end_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ('{"architectures": ["X"]}', '{"num_hidden_layers": 2, "num_experts": 0}', "{", "[]"):
        (tmp_path / "config.json").write_text(text)
        assert main(["plan", "--model", str(tmp_path / "config.json"), "--gpu", "H200"]) == 2
        assert "error:" in capsys.readouterr().err
    assert main(["plan", "--model", str(tmp_path / "absent"), "--offline"]) == 2
    assert main(["plan", "--gpu", "H200"]) == 2, "no model"
    assert "--model" in capsys.readouterr().err


def test_plan_takes_the_flags_of_the_engine() -> None:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    args = parser.parse_args(["--model", "x", "--offline", "--tp", "2", "--moe-expert-cache-size", "9"])
    expected = {"model": "x", "offline": True, "tensor_parallel_size": 2, "moe_expert_cache_size": "9"}
    assert engine_options(args) == expected
