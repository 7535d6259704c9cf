"""A converted checkpoint holds the bits that quantizing while loading gives; damage is named; a full disk leaves nothing."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl import LLM, SamplingParams
from minisgl.convert import add_convert_arguments, run_convert
from minisgl.models import converting, loader
from minisgl.models.checkpoints import ExpertChoice
from minisgl.models.checkpoints.converted import DENSE, MANIFEST, check_sums, load_records, read_manifest
from minisgl.models.converting import convert
from minisgl.models.experts import expert_shape, resident_moe
from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec
from minisgl.moe.formats import get_format
from minisgl.moe.store import ResidentStore
from minisgl.moe.store.shard import ExpertShard, ExpertSpread
from minisgl.parallel import Shard
from minisgl.planner.numbers import read_numbers
from tests.checkpoint_writers import gptq_config, gptq_encoder, quantize_folder
from tests.e2e.model_factory import make_model, make_prompts
from tests.unit.models.decoder_harness import CPU, Decoder, empty_decoder

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64}
CHOICES = [
    ExpertChoice("int8"),
    ExpertChoice("fp8_block"),
    ExpertChoice("int4", 32),
    ExpertChoice("int4_asym", 64),
    ExpertChoice("mxfp4"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_model(folder, "qwen3_moe_mixed", dtype=torch.bfloat16, num_hidden_layers=6, **SIZES)
    return folder


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    convert(source, tmp_path / "out", ExpertChoice("int4", 32), CPU)
    return tmp_path / "out"


def loaded(folder: Path, choice: ExpertChoice) -> Decoder:
    spec = ModelSpec.from_folder(folder)
    factory = resident_moe(
        spec, weight_format=choice.name, group_size=choice.group_size, device=CPU, dtype=torch.float32
    )
    decoder = empty_decoder(spec, moe_factory=factory)
    load_weights(decoder, folder)
    return decoder


def command(*words: str) -> int:
    """`minisgl convert` with these words."""
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    return run_convert(parser.parse_args(words))


def assert_same(one: Decoder, other: Decoder) -> None:
    places = other.places()
    assert all(torch.equal(place, places[name]) for name, place in one.places().items())
    layers = other.moe_layers()
    for index, layer in one.moe_layers().items():
        assert layer.store.format.name == layers[index].store.format.name
        for part, tensor in layer.store.parts.items():  # type: ignore[attr-defined]
            assert torch.equal(tensor, layers[index].store.parts[part])  # type: ignore[attr-defined]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_bits_are_those_of_quantizing_while_loading(
    source: Path, tmp_path: Path, choice: ExpertChoice
) -> None:
    manifest = convert(source, tmp_path / "out", choice, CPU)
    assert read_manifest(tmp_path / "out") == manifest
    assert sorted(manifest.layers) == ["1", "5"]  # layer 3 is dense
    assert_same(loaded(tmp_path / "out", choice), loaded(source, choice))


def test_a_quantized_checkpoint_keeps_its_bits(tmp_path: Path) -> None:
    make_model(tmp_path / "source", "qwen3_moe", **SIZES)
    quantize_folder(tmp_path / "source", gptq_encoder(32), gptq_config(32))
    source, out = str(tmp_path / "source"), str(tmp_path / "out")
    assert command("--model", source, "--out", out, "--check") == 0
    choice = ExpertChoice("int4", 32)
    assert_same(loaded(tmp_path / "out", choice), loaded(tmp_path / "source", choice))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "minisgl", "format": "int4", "group_size": 32}
    assert read_numbers(config).stored_format == "int4"
    (tmp_path / "out" / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"a converted model without its minisgl.json: convert it again"):
        loaded(tmp_path / "out", choice)


def test_records_start_on_a_page_and_one_read_fills_one_slot(converted: Path) -> None:
    manifest = read_manifest(converted)
    assert manifest is not None
    layout = get_format("int4", group_size=32).layout(expert_shape(ModelSpec.from_folder(converted)))
    for layer, name in manifest.layers.items():
        data = (converted / name).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 4096 == 0 and len(data) == start + 8 * layout.nbytes
        records = load_file(converted / name)[f"layers.{layer}.experts"]  # any safetensors reader takes it
        assert records.shape == (8, layout.nbytes)
        assert records[3].numpy().tobytes() == data[start + 3 * layout.nbytes :][: layout.nbytes]


def test_llm_just_works(converted: Path, source: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = make_prompts([5, 12])
    one = LLM(str(converted), device="cpu", num_pages=50)
    assert one.config.kernel.moe_expert_quantization == "int4" and one.tokenizer is not None
    other = LLM(
        str(source),
        device="cpu",
        num_pages=50,
        moe_expert_quantization="int4",
        moe_quantization_group_size=32,
    )
    assert [o.token_ids for o in one.generate(prompts, params)] == [
        o.token_ids for o in other.generate(prompts, params)
    ]
    with pytest.raises(ValueError, match="holds experts as int4 with groups of 32: leave out"):
        LLM(str(converted), device="cpu", num_pages=50, moe_expert_quantization="fp8")


@pytest.mark.parametrize("kind", ["contiguous", "round-robin"])
def test_a_rank_reads_its_experts_alone(converted: Path, kind) -> None:
    manifest, whole = read_manifest(converted), loaded(converted, ExpertChoice("int4", 32))
    assert manifest is not None
    shape, weight_format = expert_shape(whole.spec), get_format("int4", group_size=32)
    shard = ExpertSpread(8, 2, kind, replicated=(3,)).shard(1, shape.hidden_dim)
    store = ResidentStore(len(shard.experts), shape, weight_format, CPU)
    num_bytes = load_records(converted, manifest, {1: (store, shard)}, lambda n: None)
    assert num_bytes == len(shard.experts) * manifest.record_bytes and not store.missing()
    expected = whole.moe_layers()[1].store.records_EB[list(shard.experts)]  # type: ignore[attr-defined]
    assert torch.equal(store.records_EB, expected)


def test_a_rank_reads_its_part_of_every_expert(converted: Path) -> None:
    manifest, whole = read_manifest(converted), loaded(converted, ExpertChoice("int4", 32))
    assert manifest is not None
    shape, weight_format = expert_shape(whole.spec), get_format("int4", group_size=32)
    gate_up, down = (whole.moe_layers()[1].store.weight(name) for name in ("gate_up", "down"))
    for index in range(2):
        shard = ExpertShard(8, tuple(range(8)), Shard(shape.hidden_dim, index, 2))
        part = type(shape)(shape.model_dim, shape.hidden_dim // 2)
        store = ResidentStore(8, part, weight_format, CPU)
        load_records(converted, manifest, {1: (store, shard)}, lambda n: None)
        rows = slice(index * 32, index * 32 + 32)
        gate, up = gate_up.chunk(2, dim=1)
        assert torch.equal(store.weight("gate_up"), torch.cat((gate[:, rows], up[:, rows]), dim=1))
        assert torch.equal(store.weight("down"), down[:, :, rows])


def test_a_part_that_ends_inside_of_a_block_is_refused(source: Path, tmp_path: Path) -> None:
    manifest = convert(source, tmp_path / "out", ExpertChoice("fp8_block"), CPU)
    shape = expert_shape(ModelSpec.from_folder(source))
    half = ExpertShard(8, tuple(range(8)), Shard(shape.hidden_dim, 0, 2))
    store = ResidentStore(8, type(shape)(shape.model_dim, 32), get_format("fp8_block"), CPU)
    with pytest.raises(
        ValueError, match="ends inside of a block of weights that share a scale: use --expert"
    ):
        load_records(tmp_path / "out", manifest, {1: (store, half)}, lambda n: None)


# --- when it would help ------------------------------------------------------------------------------------------------


def hints(caplog) -> list[str]:
    found = [r.getMessage() for r in caplog.records if "minisgl convert" in r.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    "choice", [ExpertChoice("int4", 64), ExpertChoice("int4_asym", 32), ExpertChoice("fp8")]
)
def test_a_slow_load_names_the_command_that_makes_it_fast(
    source: Path, tmp_path: Path, monkeypatch, caplog, choice: ExpertChoice
) -> None:
    loaded(source, choice)
    assert not hints(caplog), "a quick load is no reason"
    monkeypatch.setattr(loader, "WORTH_CONVERTING_S", 0.0)
    streamed = loaded(source, choice)
    (hint,) = hints(caplog)
    words = hint.split("`")[1].replace("DIR", str(tmp_path / "out")).split()
    assert words[:2] == ["minisgl", "convert"] and command(*words[2:]) == 0
    assert_same(loaded(tmp_path / "out", choice), streamed)
    size = sum(entry.num_bytes for entry in read_manifest(tmp_path / "out").files.values())  # type: ignore[union-attr]
    assert f"later starts read {size / 1e9:.2f} GB" in hint
    loaded(source, ExpertChoice("none"))
    assert not hints(caplog), "nothing that could be kept, and nothing to keep"


def test_a_process_without_logging_says_it_too(source: Path) -> None:
    """As `serve`'s engine process is, and `generate`."""
    code = (
        "from minisgl.models import loader; loader.WORTH_CONVERTING_S = 0; from minisgl import LLM;"
        f"LLM({str(source)!r}, device='cpu', num_pages=20, moe_expert_quantization='int8')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert "`minisgl convert --model" in result.stderr, result.stderr


# --- damage --------------------------------------------------------------------------------------------------------


def test_check_names_the_file_that_changed(converted: Path) -> None:
    assert command("--check", "--model", str(converted)) == 0
    name = "experts-00005.safetensors"
    with (converted / name).open("r+b") as stream:
        stream.seek(6000)
        byte = stream.read(1)
        stream.seek(6000)
        stream.write(bytes([byte[0] ^ 1]))
    manifest = read_manifest(converted)
    assert manifest is not None and check_sums(converted, manifest) == [name]
    with pytest.raises(ValueError, match=f"{name} changed since it was written"):
        command("--check", "--model", str(converted))


def test_truncated_and_missing_files_are_named_before_anything_loads(converted: Path) -> None:
    file = converted / "experts-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(
        ValueError, match=rf"experts-00001.safetensors has {len(data) - 1} bytes, not {len(data)}"
    ):
        LLM(str(converted), device="cpu")
    file.unlink()
    with pytest.raises(ValueError, match=r"experts-00001.safetensors is missing: convert the model again"):
        LLM(str(converted), device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "'minisgl checkpoint' version 99, this is version 2"),
        ({"kind": "other"}, "says 'other'"),
        ({"parts": []}, "describes other records than config.json"),
        ({"layers": {}}, "names no experts of layer 1"),
        ({"surplus": 1}, r"minisgl.json is damaged"),
    ],
)
def test_a_foreign_manifest_is_refused(converted: Path, change: dict, message: str) -> None:
    path = converted / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        LLM(str(converted), device="cpu")


def test_half_a_manifest(converted: Path) -> None:
    text = (converted / MANIFEST).read_text()
    (converted / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"minisgl.json is damaged .*convert the model again"):
        LLM(str(converted), device="cpu")


@pytest.mark.parametrize("file", [DENSE, "experts-00005.safetensors", MANIFEST])
def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, monkeypatch, file: str) -> None:
    def full(*args):
        raise OSError(28, "No space left on device")

    if file == MANIFEST:
        monkeypatch.setattr(converting.Manifest, "save", full)
    else:
        written = converting._write_file
        monkeypatch.setattr(
            converting,
            "_write_file",
            lambda path, *rest: full() if path.name == file else written(path, *rest),
        )
    with pytest.raises(
        ValueError, match=r"can't be written .No space left on device.: nothing is left of it"
    ):
        convert(source, tmp_path / "out", ExpertChoice("int8"), CPU)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits file sizes by setrlimit")
def test_a_limit_on_file_sizes_leaves_nothing(source: Path, tmp_path: Path) -> None:
    code = (
        "import resource; from pathlib import Path; import torch;"
        "from minisgl.models.checkpoints import ExpertChoice; from minisgl.models.converting import convert;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        f"convert(Path({str(source)!r}), Path({str(tmp_path / 'out')!r}), ExpertChoice('int8'), torch.device('cpu'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert result.returncode == 1 and "can't be written" in result.stderr
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        with pytest.raises(ValueError, match=rf"{out} can't be written .*give another --out"):
            convert(source, out, ExpertChoice("int8"), CPU)


def test_what_cannot_be_converted(source: Path, converted: Path, tmp_path: Path) -> None:
    cases = [
        (source, ExpertChoice("none"), "plain experts are read as fast"),
        (source, ExpertChoice("int4", 128), "int4 needs F=64 to be a multiple of its group size 128"),
        (converted, ExpertChoice("int8"), "is converted already"),
    ]
    for folder, choice, message in cases:
        with pytest.raises(ValueError, match=message):
            convert(folder, tmp_path / "new", choice, CPU)
    with pytest.raises(ValueError, match="exists: remove it"):
        convert(source, converted, ExpertChoice("int8"), CPU)
    make_model(tmp_path / "dense", "llama")
    with pytest.raises(ValueError, match="has no experts"):
        convert(tmp_path / "dense", tmp_path / "new", ExpertChoice("int8"), CPU)
    assert sorted(os.listdir(tmp_path)) == ["dense", "out"]


def test_a_damaged_source_leaves_nothing(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.5.mlp.experts.7.down_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="layer 5 lacks weights: expert 7: down"):
        convert(folder, tmp_path / "out", ExpertChoice("int8"), CPU)
    assert os.listdir(tmp_path) == ["source"]


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return {**os.environ, "PYTHONPATH": f"{root / 'python'}:{root}", "OMP_NUM_THREADS": "1"}
