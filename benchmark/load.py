"""How fast weights load: quantized while they stream in, and converted, each against a plain read in the same run.

    python benchmark/load.py                              one tiny layer, on any machine
    python benchmark/load.py --shape qwen3-30b-a3b --layers 4 --formats int4,fp8 --offload

Bars on 16 cores: BF16 read and quantized at 1.5 GB/s or more, and 80 % of the plain read for a converted model.

Writes random BF16 weights of a real shape to --folder (tmpfs by default, so that no disk is measured), loads them with experts
quantized on the way, converts them, loads that, and checks that both loads hold the same records. Prints GB/s, of BF16 for the
first and of the converted files for the second, and seconds for all layers of the shape at these rates. "plain" is as many
threads as the loader has, reading the converted files into memory of the kind that the loader fills: pinned with --offload on
CUDA. Appends a JSON line to benchmark/results/load.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from engine import SHAPES
from minisgl.attention import make_attention
from minisgl.models.checkpoints import ExpertChoice
from minisgl.models.checkpoints.converted import Manifest
from minisgl.models.checkpoints.direct import CHUNK, MAX_THREADS
from minisgl.models.checkpoints.files import read_into
from minisgl.models.converting import convert
from minisgl.models.decoder import Decoder
from minisgl.models.experts import build_moe_layer, expert_shape
from minisgl.models.family import MoESpec
from minisgl.models.loader import load_weights
from minisgl.models.spec import ModelSpec
from minisgl.moe.formats import get_format
from minisgl.moe.registry import make_backend
from minisgl.moe.store import ResidentStore, StagedStore
from minisgl.moe.store.copies import CopyChannel, CudaCopies, DirectCopies
from minisgl.moe.store.pinned import CudaPinning, HostMemory
from record import append_record

STREAM_BAR, PLAIN_BAR = 1.5, 0.8  # GB/s of BF16; share of a plain read
SMALL: dict[str, Any] = {
    **SHAPES["qwen3-30b-a3b"], "hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 512,
    "num_experts": 32, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 1024, "num_hidden_layers": 2,
}  # fmt: skip


def write_source(folder: Path, config: dict[str, Any]) -> int:
    """A checkpoint of this shape, a file a layer, one tensor an expert. Returns its bytes.

    All experts of a layer hold the same random numbers: what is measured does not depend on them, and drawing them would take
    longer than everything else.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    dim, hidden, heads = config["hidden_size"], config["moe_intermediate_size"], config["num_attention_heads"]
    q, kv = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)

    top = {"model.norm.weight": draw(dim)}
    top |= {name: draw(config["vocab_size"], dim) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(top, folder / "top.safetensors")
    expert = {"gate": draw(hidden, dim), "up": draw(hidden, dim), "down": draw(dim, hidden)}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        tensors = {
            f"{base}.{name}.weight": draw(dim) for name in ("input_layernorm", "post_attention_layernorm")
        }
        for name, shape in {"q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q)}.items():
            tensors[f"{base}.self_attn.{name}_proj.weight"] = draw(*shape)
        tensors |= {f"{base}.self_attn.{name}_norm.weight": draw(config["head_dim"]) for name in "qk"}
        tensors[f"{base}.mlp.gate.weight"] = draw(config["num_experts"], dim)
        for number in range(config["num_experts"]):
            tensors |= {f"{base}.mlp.experts.{number}.{n}_proj.weight": w.clone() for n, w in expert.items()}
        save_file(tensors, folder / f"layer-{layer:03d}.safetensors")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class Loader:
    """Loads a folder as the engine would, experts resident or in pinned host memory."""

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.device, self.offload = device, offload
        self.seconds_pinning = 0.0

    def load(self, folder: Path, choice: ExpertChoice) -> tuple[float, list[torch.Tensor]]:
        """(seconds without pinning, records of every layer, which stay valid until `close`)."""
        spec, dtype = ModelSpec.from_folder(folder), torch.bfloat16
        weight_format = get_format(choice.name, dtype, choice.group_size)
        backend, shape = make_backend("torch", self.device), expert_shape(spec)
        record = weight_format.layout(shape).nbytes
        cuda = self.device.type == "cuda"
        self.memory = HostMemory(CudaPinning() if cuda else None, 2**50)
        channel = CopyChannel(self.device, self.memory, 0, record) if cuda and self.offload else None

        def build(layer: int, moe: MoESpec) -> Any:
            if self.offload:
                start = time.perf_counter()
                host = self.memory.allocate(moe.num_experts, record, moe.num_experts)
                self.seconds_pinning += time.perf_counter() - start
                copies: Any = DirectCopies if channel is None else partial(CudaCopies, channel)
                store: Any = StagedStore(host, shape, weight_format, 1, self.device, copies)
            else:
                store = ResidentStore(moe.num_experts, shape, weight_format, self.device)
            return build_moe_layer(spec, store, backend, device=self.device, dtype=dtype)

        decoder = Decoder(
            spec,
            lambda problem: make_attention("sdpa", problem, self.device),
            page_size=16,
            device=self.device,
            dtype=dtype,
            moe_factory=build,
        )
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        load_weights(decoder, folder)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds, [layer.store.records_EB for layer in decoder.moe_layers().values()]  # type: ignore[attr-defined]

    def close(self) -> None:
        self.memory.close()


def plain_read(folder: Path, manifest: Manifest, targets: list[torch.Tensor]) -> float:
    """Seconds to read every record file into memory that exists already, by the loader's number of threads."""
    jobs = []
    for name, target in zip(manifest.layers.values(), targets):
        flat, size = target.view(-1), (folder / name).stat().st_size
        start = size - flat.numel()
        jobs += [(folder / name, start + i, flat[i : i + CHUNK]) for i in range(0, flat.numel(), CHUNK)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: read_into(*job), jobs))
    return time.perf_counter() - begin


def measure(
    folder: Path, source: Path, size: int, choice: ExpertChoice, args: argparse.Namespace
) -> dict[str, Any]:
    device = torch.device(args.device)
    loader, row = Loader(device, args.offload), {"format": choice.name, "source_gb": size / 1e9}
    row["stream_s"], streamed = loader.load(source, choice)
    row["stream_gbps"] = size / 1e9 / row["stream_s"]
    sums = [_checksum(records) for records in streamed]
    del streamed
    loader.close()
    out = folder / choice.name
    begin = time.perf_counter()
    manifest = convert(source, out, choice, device)
    row["convert_s"] = time.perf_counter() - begin
    stored = sum(entry.num_bytes for entry in manifest.files.values())
    times, plain = [], []
    for _ in range(args.repeats):
        seconds, records = loader.load(out, choice)
        times.append(seconds)
        if [_checksum(layer) for layer in records] != sums:
            raise SystemExit(
                f"{choice.name}: the converted checkpoint holds other records than the load that quantized"
            )
        pinned = device.type == "cuda"
        targets = records
        if records[0].device.type != "cpu":
            targets = [torch.empty(layer.shape, dtype=torch.uint8, pin_memory=pinned) for layer in records]
        plain_read(out, manifest, targets)
        plain.append(plain_read(out, manifest, targets))
        del records, targets
        loader.close()
    row |= {"converted_gb": stored / 1e9, "converted_s": min(times), "pin_s": loader.seconds_pinning}
    row |= {
        "converted_gbps": stored / 1e9 / min(times),
        "plain_gbps": manifest.total_bytes / 1e9 / min(plain),
    }
    row["of_plain"] = row["converted_gbps"] / row["plain_gbps"]
    shutil.rmtree(out)
    return row


def _checksum(records_EB: torch.Tensor) -> int:
    """Order and value of every 8 bytes count."""
    words = records_EB.view(-1).view(torch.int64)
    weights = torch.arange(words.numel(), device=words.device).mul_(2).add_(1)
    return int((words * weights).sum())


def _table(row: dict[str, Any], config: dict[str, Any], args: argparse.Namespace) -> Table:
    """One format's numbers, what they are held against, and what they make of the whole shape."""
    whole = SHAPES[args.shape]["num_hidden_layers"] / config["num_hidden_layers"] if args.shape else 1.0
    table = Table("", "GB", "s", "GB/s", "bar", "all layers", title=row["format"], title_justify="left")
    stream, of_plain = row["stream_gbps"], row["of_plain"]
    met = {True: "met", False: "missed"}
    streamed, loaded = (
        f"{STREAM_BAR}: {met[stream >= STREAM_BAR]}",
        f"{PLAIN_BAR:.0%}: {met[of_plain >= PLAIN_BAR]}",
    )
    lines = (
        ("quantized on the way", "source_gb", "stream_s", stream, streamed),
        ("converted", "converted_gb", "converted_s", row["converted_gbps"], loaded),
    )
    for what, size, seconds, rate, verdict in lines:
        numbers = (f"{row[size]:.2f}", f"{row[seconds]:.2f}", f"{rate:.2f}")
        table.add_row(what, *numbers, verdict, f"{row[size] * whole / rate:.1f} s")
    table.add_row("records, plain read", "", "", f"{row['plain_gbps']:.2f}", f"{of_plain:.0%} reached", "")
    table.add_row("convert", "", f"{row['convert_s']:.2f}", "", "", "")
    if row["pin_s"]:
        table.add_row("pinning, all loads", "", f"{row['pin_s']:.2f}", "", "not counted above", "")
    return table


def run(args: argparse.Namespace) -> None:
    console, started = Console(stderr=args.json), time.perf_counter()
    config = dict(SHAPES[args.shape] if args.shape else SMALL)
    if args.layers:
        config["num_hidden_layers"] = args.layers
    folder = Path(tempfile.mkdtemp(prefix="minisgl-load-", dir=args.folder))
    try:
        begin = time.perf_counter()
        size = write_source(folder / "source", config)
        console.print(
            f"wrote {size / 1e9:.2f} GB to {folder} in {time.perf_counter() - begin:.1f} s", highlight=False
        )
        choices = [ExpertChoice(name, args.group_size) for name in args.formats.split(",")]
        rows = [measure(folder, folder / "source", size, choice, args) for choice in choices]
    finally:
        shutil.rmtree(folder)
    for row in rows:
        console.print(_table(row, config, args), highlight=False)
    console.print(f"{time.perf_counter() - started:.1f} s in all", highlight=False)
    record = {"case": {k: v for k, v in vars(args).items() if k != "json"}, "rows": rows}
    append_record("load", record)
    if args.json:
        print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    parser.add_argument("--shape", choices=SHAPES, help="a real shape instead of a tiny one")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--formats", default="int4,fp8", help="expert formats, comma separated")
    parser.add_argument("--group-size", type=int, default=128, help="of int4")
    parser.add_argument(
        "--offload", action="store_true", help="experts in pinned host memory, not on the device"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="loads of the converted checkpoint; the fastest counts"
    )
    parser.add_argument(
        "--folder", default=shm, help="where to write the checkpoints (default: tmpfs where there is one)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
