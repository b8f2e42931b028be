"""Measures on a real CUDA card what the stand-in cannot show, and writes one JSON file with card, driver and versions.

    python benchmarks/on_gpu.py --output FOLDER [--sections searches steps convolutions memory context tests]

1. ``searches``: ``fit`` on four kinds of training; then the plan's size and the next one in a plain loop, same limit.
2. ``steps``: ``Runner.step`` beside a loop by hand, in pairs, on steps of about 5, 20 and 60 ms.
3. ``convolutions``: bytes that ten convolutions take as workspace, beside what cuDNN answers without running them.
4. ``memory``: bytes that a plain training reserves, beside the prediction.
5. ``context``: bytes of this process outside torch's allocator, beside the table that ``predict`` uses.
6. ``tests``: how the tests of ``tests/gpu`` ended.

Each section runs in a process of its own. A section that fails or takes too long leaves its error in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import child
import torch
from card_models import TRAININGS, Training
from card_search import measure_search, runs_undisturbed
from runner import Comparison, pair_up
from torch import nn
from torch.nn import functional as F

import autobatch

_HERE = Path(__file__).resolve()
_SECONDS = 240.0  # for a section
_SEARCHES = (("gpt2", 8), ("transformer_amp", 8), ("mlp_amp_adamw", 3), ("convnet", 8))
_MEMORY = ("gpt2", "transformer_amp", "mlp_sgd", "llama_bf16")
_SIZES = (2, 32, 100)
_MICRO_BATCHES = 4
_PAIRS = {5: 300, 20: 100, 60: 50}  # by milliseconds of a step
_WARM_PAIRS = 6

# Dimensions, channels, size, kernel, stride, groups, channels first or last, dtype: of 32 samples.
_CONVOLUTIONS = (
    (2, 64, 56, 3, 1, 1, "first", "float32"),
    (2, 64, 56, 3, 2, 1, "last", "float32"),
    (2, 3, 224, 7, 2, 1, "first", "float32"),
    (2, 256, 14, 1, 1, 1, "first", "float32"),
    (2, 256, 14, 3, 1, 256, "first", "float32"),
    (2, 64, 56, 3, 1, 1, "last", "bfloat16"),
    (2, 512, 7, 3, 1, 1, "first", "float16"),
    (2, 128, 28, 5, 1, 4, "first", "float16"),
    (1, 64, 4000, 9, 1, 1, "first", "float32"),
    (3, 32, 16, 3, 1, 1, "first", "float32"),
)


class _Convnet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.GELU()]
        for stage in range(3):
            channels = width * 2**stage
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.GELU()]
            layers += [nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GroupNorm(8, 2 * channels), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits


def _classify(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


TRAININGS["convnet"] = Training(
    _Convnet, lambda samples: (torch.randn(samples, 3, 112, 112), torch.randint(1000, (samples,))), _classify
)


def _describe_machine() -> dict[str, Any]:
    import pynvml  # noqa: PLC0415 - only where there is a driver

    pynvml.nvmlInit()
    card = torch.cuda.get_device_properties(0)
    return {
        "card": card.name,
        "total_bytes": card.total_memory,
        "multiprocessors": card.multi_processor_count,
        "capability": f"{card.major}.{card.minor}",
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
        "autobatch": autobatch.__version__,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _search(name: str, gibibytes: int) -> dict[str, Any]:
    """One search, and the plain loop at its size and the next, each in a process of its own."""
    began = time.perf_counter()
    found = json.loads(child.read_lines(str(_HERE), "--search", name, gibibytes, AUTOBATCH_LEDGER="off")[-1])
    loops = {}
    for key in ("size", "next_size"):
        line = child.read_lines(str(_HERE), "--loop", name, found[key], found["limit"]) if found[key] else ["none"]
        loops[f"{key}_runs_in_a_plain_loop"] = line[-1]
    return {**found, **loops, "seconds": round(time.perf_counter() - began, 1)}


def measure_searches() -> list[dict[str, Any]]:
    """Each kind of training with a budget of a few GiB."""
    return [_search(name, gibibytes) for name, gibibytes in _SEARCHES]


def measure_steps() -> list[dict[str, Any]]:
    """The Runner's step beside a loop by hand, by milliseconds of a step."""
    return [_compare_steps(milliseconds, pairs) for milliseconds, pairs in _PAIRS.items()]


def _compare_steps(milliseconds: int, pairs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TRAININGS["mlp_sgd"].make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    samples = _MICRO_BATCHES * 64

    def loop() -> None:
        size = len(batch[1]) // _MICRO_BATCHES
        for part in zip(batch[0].split(size), batch[1].split(size), strict=True):
            (_classify(model, part) * (len(part[1]) / len(batch[1]))).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    for _ in range(12):  # as many samples as make the loop's step that long
        batch = torch.randn(samples, 512, device="cuda"), torch.randint(1000, (samples,), device="cuda")
        took = 1000 * statistics.median(_seconds_of(loop) for _ in range(20))
        if took >= milliseconds:
            break
        samples = _MICRO_BATCHES * max(samples // _MICRO_BATCHES + 1, int(1.05 * samples / took * milliseconds) // 4)
    plan = autobatch.fit(
        model,
        samples,
        batch=batch,
        step=_classify,
        optimizer=optimizer,
        max_micro_batch=samples // _MICRO_BATCHES,
        reuse=False,
        progress=False,
    )
    runner = autobatch.Runner(plan, model, step=_classify, optimizer=optimizer)

    def step() -> None:
        runner.step(batch)
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    loop()
    peak_by_hand = torch.cuda.max_memory_allocated()
    compared = Comparison(pair_up(loop, step, pairs + _WARM_PAIRS)[_WARM_PAIRS:])
    last = runner.step(batch)
    low, median, high = compared.quartiles()
    return {
        "samples": samples,
        "micro_batch_sizes": last.micro_batch_sizes,
        "pairs": pairs,
        "by_hand_ms": round(compared.hand_ms, 3),
        "ratio_median": round(median, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "peak_by_hand": peak_by_hand,
        "peak": last.peak_bytes,
    }


def _seconds_of(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure_convolutions() -> list[dict[str, Any]]:
    """Bytes of each pass beyond its results: as measured on the card, and as cuDNN answers."""
    return [entry for case in _CONVOLUTIONS for entry in _compare_convolution(*case)]


def _compare_convolution(  # noqa: PLR0917 - one row of the table above
    space: int, channels: int, size: int, kernel: int, stride: int, groups: int, layout: str, dtype: str
) -> list[dict[str, Any]]:
    from autobatch.prediction.tracing.kernels import find_calls  # noqa: PLC0415 - as above
    from autobatch.prediction.workspaces import ask_cudnn  # noqa: PLC0415 - fails where cuDNN is missing

    card = torch.cuda.get_device_properties(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
    inputs = torch.randn(32, channels, *[size] * space, **options)
    weight = torch.randn(2 * channels, channels // groups, *[kernel] * space, **options)
    if layout == "last":
        inputs, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (inputs, weight))
    rest = ([stride] * space, [kernel // 2] * space, [1] * space, False, [0] * space, groups)
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    result = forward(inputs, weight, None, *rest)
    passes = {"forward": (forward, (inputs, weight, None, *rest))}
    for name, mask in (("input", [True, False, False]), ("weight", [False, True, False])):
        passes[name] = backward, (torch.randn_like(result), inputs, weight, None, *rest, mask)
    entries = []
    for name, (operator, given) in passes.items():
        taken = _measure_beyond_results(operator, given)
        calls = find_calls(operator, given, result if name == "forward" else None)
        if not calls:  # torch's own kernels, not cuDNN
            entries.append({"pass": name, "taken": taken, "cudnn": False})
            continue
        asked = ask_cudnn([calls[0].convolution], f"sm_{card.major}{card.minor}", card.multi_processor_count)
        workspace = asked.workspaces[calls[0].convolution]
        entries.append({"pass": name, "taken": taken, "workspace": workspace, "copies": [*calls[0].copied_bytes]})
    case = {"input": [*inputs.shape], "weight": [*weight.shape], "stride": stride, "groups": groups, "dtype": dtype}
    return [{**case, "channels": layout, **entry} for entry in entries]


def _measure_beyond_results(operator: Any, given: tuple[Any, ...]) -> int:
    """Most bytes while an operator runs, without those of its results; warm, so that libraries are loaded."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = operator(*given)
        peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        del results
    return peak - before - (after - before)


def measure_memory() -> list[dict[str, Any]]:
    """Each model at each size, in the segments that torch has by default."""
    from card_memory import measure_cells  # noqa: PLC0415 - predicts in a child, before this process used the card

    return [{**cell._asdict(), "error": round(cell.error, 5)} for cell in measure_cells(_MEMORY, _SIZES)]


def measure_context() -> dict[str, Any]:
    """What the driver counts for this process after a training step, without what torch's allocator holds."""
    import os  # noqa: PLC0415

    import pynvml  # noqa: PLC0415

    from autobatch.prediction.prior import read_card  # noqa: PLC0415

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    idle = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    training = TRAININGS["convnet"]
    model = training.make_model().cuda()
    optimizer = training.make_optimizer(model)
    training.step(model, [part.cuda() for part in training.make_batch(8)]).backward()
    optimizer.step()
    torch.cuda.synchronize()
    used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    own = [one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == os.getpid()]
    free, total = torch.cuda.mem_get_info()
    return {
        "context_by_card": used - idle - torch.cuda.memory_reserved(),
        "context_by_process": own[0] - torch.cuda.memory_reserved() if own and own[0] else None,
        "driver_free": free,
        "driver_total": total,
        "card_of_the_table": read_card().model_dump(mode="json"),
    }


def run_tests() -> dict[str, Any]:
    """Counts of the tests that need a card, and the failures' first lines."""
    report = Path("/tmp/autobatch-gpu-tests.xml")  # noqa: S108 - read and gone
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=_HERE.parent.parent, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S603
    if not report.exists():
        return {"rc": done.returncode, "output": done.stdout[-4000:]}
    suite = ET.parse(report).getroot()[0]  # noqa: S314 - pytest wrote it
    failures = [
        {"test": case.get("name"), "file": case.get("classname"), "text": (failure.text or "")[-3000:]}
        for case in suite
        for failure in case
        if failure.tag in {"failure", "error"}
    ]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {"rc": done.returncode, **counts, "seconds": suite.get("time"), "failed": failures}


SECTIONS: dict[str, Callable[[], Any]] = {
    "context": measure_context,
    "convolutions": measure_convolutions,
    "steps": measure_steps,
    "searches": measure_searches,
    "memory": measure_memory,
    "tests": run_tests,
}
"""By name, in the order in which they run."""


def _run_section(name: str) -> Any:
    """In a process of its own, so that one that fails leaves the others."""
    command = [sys.executable, str(_HERE), "--section", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return {"error": f"took over {_SECONDS:.0f} s"}
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": (done.stdout + done.stderr)[-6000:]}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the JSON file")
    parser.add_argument("--sections", nargs="+", choices=[*SECTIONS], default=[*SECTIONS])
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": _describe_machine()}
    name = str(results["machine"]["card"]).lower().replace(" ", "-")
    for section in arguments.sections:
        began = time.perf_counter()
        results[section] = _run_section(section)
        print(section, f"{time.perf_counter() - began:.1f} s", json.dumps(results[section])[:1500], flush=True)
        (arguments.output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--search"]:
        print(json.dumps(measure_search(sys.argv[2], int(sys.argv[3]))._asdict()))
        child.end()
    elif sys.argv[1:2] == ["--loop"]:
        print("yes" if runs_undisturbed(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) else "no")
        child.end()
    elif sys.argv[1:2] == ["--section"]:
        print(json.dumps(SECTIONS[sys.argv[2]]()))
        child.end()
    else:
        _main()
