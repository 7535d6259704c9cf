"""One MoE layer, from router logits and hidden states to output: is it right, how long does it take, what bounds it.

    python benchmark/moe.py --token-counts 1,4,16,64,256,1024,4096 --include-fp8 --include-int8 --include-int4
    python benchmark/moe.py --shape gpt-oss-20b --include-mxfp4 --routing skewed --include-autotune

Synthetic weights, no model needed. Every case is compared with the plain definition before it is timed. Timing
is CUDA-graph replay over several sets of weights, rows and logits that together exceed the L2 cache several
times. Each line also says what the case must move and compute at least, and how near to the measured bandwidth
it comes. A JSON record is appended to benchmark/results/moe.jsonl ($MINISGL_RESULTS names another folder).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import moe_cases
import moe_offload
from minisgl.moe.autotune import Tuner, TuningCase
from minisgl.moe.base import Placement
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from minisgl.moe.kernels.precompile import CompilePool
from minisgl.moe.records import Records
from minisgl.moe.select import DeviceLimits
from record import append_record, environment

HERE = Path(__file__).parent
ROTATION_BYTES = 260e6  # what the sets of a case must exceed together; the largest L2 here is 60 MB
MAX_WEIGHT_BYTES = 60e9
MODEL_LAYERS = 48  # of the model whose allocations are counted
GROUPS = {"int4": 128, "mxfp4": 32, "fp8_block": 128}


@dataclass(frozen=True)
class Result:
    """One line of the table, and of the record."""

    format: str
    num_tokens: int
    us: float
    us_p10: float
    us_p90: float
    error: float
    tolerance: float
    tb_per_s: float
    bandwidth_share: float
    tflop_per_s: float
    choice: dict[str, object]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--token-counts", default="1,4,16,64,256,1024,4096", help="numbers of tokens, by comma"
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b", help=f"{', '.join(moe_cases.SHAPES)}, or E,K,D,F")
    parser.add_argument("--routing", default="random", choices=["random", "local", "skewed"])
    for name in ("fp8", "int8", "int4", "fp8_block", "mxfp4"):
        parser.add_argument(f"--include-{name.replace('_', '-')}", action="store_true", help=f"also {name}")
    parser.add_argument("--int4-group", type=int, default=128, choices=[32, 64, 128])
    parser.add_argument("--moe-small-m-threshold", default="auto", help="tokens up to which direct is forced")
    parser.add_argument("--include-autotune", action="store_true", help="measure tiles first, and keep them")
    parser.add_argument("--most-candidates", type=int, default=32, help="tiles measured a GEMM")
    parser.add_argument(
        "--compile-workers", type=int, default=0, help="processes that compile ahead (0: none)"
    )
    parser.add_argument(
        "--include-offload", action="store_true", help="also each layer with its experts in host memory"
    )
    parser.add_argument(
        "--offload-slots", type=int, default=0, help="experts of it on the device (0: half of them)"
    )
    parser.add_argument("--plot", type=Path, help="draw latency over tokens, with the floor")
    parser.add_argument("--records", type=Path, default=Records.default_folder(), help="where tuned tiles go")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device; the kernels' correctness is tested on CPU by `make test`")
    threshold = options.moe_small_m_threshold
    options.moe_small_m_threshold = threshold if threshold == "auto" else int(threshold)
    return options


def model_shape(text: str) -> moe_cases.ModelShape:
    if text in moe_cases.SHAPES:
        return moe_cases.SHAPES[text]
    try:
        return moe_cases.ModelShape(*(int(number) for number in text.split(",")))
    except (ValueError, TypeError) as error:
        raise SystemExit(f"--shape {text}: one of {', '.join(moe_cases.SHAPES)}, or E,K,D,F") from error


def make_tuner(options: argparse.Namespace, records: Records, limits: DeviceLimits) -> Tuner:
    """A tuner; with --compile-workers other processes compile what it is about to measure."""
    if not options.compile_workers:
        return Tuner(limits, records, most=options.most_candidates)
    pool = CompilePool(limits.capability[0] * 10 + limits.capability[1], options.compile_workers)
    return Tuner(limits, records, most=options.most_candidates, compile_ahead=pool.ahead)


def tune(tuner: Tuner, case: moe_cases.LayerCase) -> None:
    routing = FusedMoeBackend().route(case.logits[0], case.rule)
    placement = Placement(case.slabs[0], routing.ids_TK)
    tuner.tune(TuningCase(case.problem, case.x[0], placement, routing.weights_TK))


def measure(
    options: argparse.Namespace, records: Records, case: moe_cases.LayerCase, bandwidth: float
) -> Result:
    backend = FusedMoeBackend(small_m_threshold=options.moe_small_m_threshold, records=records.lookup)
    tolerance = get_format(case.problem.format).tolerance
    error = moe_cases.layer_error(backend, case)
    if not error < tolerance:
        raise SystemExit(f"{case.problem}: error {error:.2e} exceeds {tolerance}; nothing was timed")
    timing = moe_cases.time_graph(lambda i: moe_cases.run_layer(backend, case, i), len(case.slabs))
    tb_per_s = case.touched_bytes() / timing.median / 1e6
    return Result(
        format=case.problem.format,
        num_tokens=case.problem.num_tokens,
        us=round(timing.median, 2),
        us_p10=round(timing.p10, 2),
        us_p90=round(timing.p90, 2),
        error=error,
        tolerance=tolerance,
        tb_per_s=round(tb_per_s, 3),
        bandwidth_share=round(tb_per_s * 1e12 / bandwidth, 3),
        tflop_per_s=round(case.flops() / timing.median / 1e6, 1),
        choice=asdict(backend.choose(case.problem, case.x[0].device)),
    )


def rotating_slabs(
    first: moe_cases.Slab, slabs: list[moe_cases.Slab], touched: float
) -> list[moe_cases.Slab]:
    """As many copies as a case needs so that nothing it reads is still in the L2; grows the list it is given."""
    wanted = min(max(3, int(ROTATION_BYTES // touched) + 1), 24)
    wanted = min(wanted, max(2, int(MAX_WEIGHT_BYTES // first.records_SB.numel())))
    while len(slabs) < wanted:
        slabs.append(moe_cases.other_slab(first, len(slabs)))
    return slabs[:wanted]


def count_allocations(
    shape: moe_cases.ModelShape, slab: moe_cases.Slab, group: int, counts: list[int]
) -> dict[str, int]:
    """Device allocations of the workspace over one step a token count of a model with MODEL_LAYERS such layers, with its
    cache and without."""
    found = {}
    for name, cached in (("cached", True), ("uncached", False)):
        backend = FusedMoeBackend(workspace_cache=cached)
        for num_tokens in counts:
            case = moe_cases.make_case(shape, num_tokens, [slab], "random", group, 0)
            for _ in range(MODEL_LAYERS):
                moe_cases.run_layer(backend, case, 0)
        found[name] = backend.workspace(slab.records_SB.device).num_allocations
    return found


def run(options: argparse.Namespace) -> list[Result]:
    device = torch.device("cuda")
    shape, limits = model_shape(options.shape), DeviceLimits.of(device)
    counts = [int(count) for count in options.token_counts.split(",")]
    names = ["none"] + [
        n for n in ("fp8", "int8", "int4", "fp8_block", "mxfp4") if getattr(options, f"include_{n}")
    ]
    groups = {**GROUPS, "int4": options.int4_group}
    bandwidth = moe_cases.measured_bandwidth(device)
    print(f"{limits.name}, reads {bandwidth / 1e12:.2f} TB/s; {options.shape}, {options.routing} routing")
    records, results, offload, allocations = Records(options.records), [], [], {}
    tuner = make_tuner(options, records, limits) if options.include_autotune else None
    print(
        f"{'format':10}{'T':>6}{'us':>10}{'error':>10}{'TB/s':>7}{'of meas.':>9}{'TFLOP/s':>9}  peers  kernel"
    )
    for name in names:
        group = groups.get(name, 0)
        first = moe_cases.make_slab(shape, name, group or 128, True, device, seed=0)
        slabs = [first]
        for num_tokens in counts:
            case = moe_cases.make_case(shape, num_tokens, [first], options.routing, group, num_tokens)
            if tuner is not None:
                tune(tuner, case)
            rotating = rotating_slabs(first, slabs, case.touched_bytes())
            case = moe_cases.make_case(shape, num_tokens, rotating, options.routing, group, num_tokens + 1)
            results.append(measure(options, records, case, bandwidth))
            print(line(results[-1], options), flush=True)
        allocations[name] = count_allocations(shape, first, group, counts)
        print(f"{name}: allocations over {counts}, {MODEL_LAYERS} layers each: {allocations[name]}")
        if options.include_offload:
            resident = {r.num_tokens: r.us for r in results if r.format == first.format}
            offload += measure_offload(options, records, first, resident)
        del first, slabs, case, rotating
        torch.cuda.empty_cache()
    save(options, limits, bandwidth, results, {"allocations": allocations, "offload": offload})
    return results


def measure_offload(
    options: argparse.Namespace, records: Records, slab: moe_cases.Slab, resident_us: dict[int, float]
) -> list[dict[str, object]]:
    """The same layer with its experts in host memory, for every number of tokens that was measured."""
    shape = model_shape(options.shape)
    num_slots = options.offload_slots or shape.num_experts // 2
    group = {**GROUPS, "int4": options.int4_group}.get(slab.format, 0)
    weight_format = get_format(slab.format, torch.bfloat16, group or 128, True)
    backend = FusedMoeBackend(small_m_threshold=options.moe_small_m_threshold, records=records.lookup)
    found = []
    with moe_offload.offloaded(slab, weight_format, shape.top_k, num_slots) as store:
        for num_tokens, us in resident_us.items():
            case = moe_cases.make_case(shape, num_tokens, [slab] * 3, options.routing, group, num_tokens + 1)
            result = moe_offload.measure_offloaded(backend, case, store, us)
            print("in host memory: " + moe_offload.line(result), flush=True)
            found.append(asdict(result))
    return found


def line(result: Result, options: argparse.Namespace) -> str:
    peer = ""
    if (options.shape, options.routing) == ("qwen3-30b-a3b", "random"):
        peers = json.loads((HERE / "peers" / "moe_h200.json").read_text())["us"]
        found = peers.get(result.format, {}).get(str(result.num_tokens))
        peer = f"{found:g}" if found else ""
    choice = result.choice
    return (
        f"{result.format:10}{result.num_tokens:>6}{result.us:>10.1f}{result.error:>10.1e}{result.tb_per_s:>7.2f}"
        f"{result.bandwidth_share:>9.0%}{result.tflop_per_s:>9.1f}{peer:>7}  {choice['kernel']} BM{choice['block_m']}"
    )


def save(
    options: argparse.Namespace,
    limits: DeviceLimits,
    bandwidth: float,
    results: list[Result],
    more: dict[str, object],
) -> None:
    record = {
        "case": f"moe layer, {options.shape}, {options.routing}",
        "gpu": limits.name,
        "measured_tb_per_s": round(bandwidth / 1e12, 3),
        "results": [asdict(result) for result in results],
        **more,
    }
    append_record("moe", record)
    print("MOE_BENCHMARK_RESULT=" + json.dumps({**environment(), **record}))
    if options.plot:
        draw(options.plot, options.shape, bandwidth, results)


def draw(path: Path, title: str, bandwidth: float, results: list[Result]) -> None:
    """Latency over tokens, one line a format, and below each the floor that the measured bandwidth sets."""
    import matplotlib.pyplot as plt  # an optional extra: pip install minisgl[plot]

    figure, axes = plt.subplots(figsize=(7, 5))
    for name in dict.fromkeys(result.format for result in results):
        mine = [result for result in results if result.format == name]
        tokens = [result.num_tokens for result in mine]
        drawn = axes.plot(tokens, [result.us for result in mine], "o-", label=name)
        floor = [result.us * result.bandwidth_share for result in mine]
        axes.plot(tokens, floor, ":", color=drawn[0].get_color())
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="us a layer",
        title=f"{title} (dotted: bandwidth floor)",
    )
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    run(parse_arguments())
