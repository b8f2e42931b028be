"""What convolutions take as workspace: cuDNN's answers beside the rule without it, and the multiple that was used once.

    python benchmarks/card_workspaces.py [--models resnet50] [--samples 32]

Networks of timm with random weights in float32 (TF32 allowed, as torch has it), channels first, on cards that are
described and not there, with the cuDNN of this environment; and seconds of its answers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torchvision_stub  # noqa: F401 - timm imports torchvision
from tables import Table

from autobatch.batch.samples import describe
from autobatch.prediction.cards import find_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.cudnn import Convolution
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.prediction.workspaces import Workspaces, estimate_workspace
from autobatch.step.workload import Workload

__all__ = ["measure"]

_MODELS = ("resnet18", "resnet50", "vgg16", "efficientnet_b0", "mobilenetv2_100", "regnety_080", "convnext_tiny")
_CARDS = ("A100-40GB", "H100-80GB", "L4", "T4")
_SAMPLES = 32
_COPIES = 2.4
"""Of input and result: what the largest workspace was taken for before cuDNN was asked."""


class _Network(NamedTuple):
    model: str
    estimate: Estimate
    runs: frozenset[Convolution]  # its convolutions at the samples in question


class _Compared(NamedTuple):
    """One network on one card; largest workspaces in bytes."""

    asked: int
    ruled: int
    multiple: int
    error: float  # of what is reserved by the rule
    seconds: float
    version: int  # cuDNN's

    def __str__(self) -> str:
        """One cell of the table."""
        return f"{self.asked >> 20} / {self.ruled >> 20} / {self.multiple >> 20}; {self.error:+.1%}"


def measure(models: Sequence[str] = _MODELS, samples: int = _SAMPLES) -> Table:
    """Largest workspace and reserved bytes of each network on each card, by each of the three."""
    networks = [_trace(model, samples) for model in models]
    rows, answered = [], []
    for network in networks:
        compared = [_compare(network, card, samples) for card in _CARDS]
        rows.append((network.model, str(len(network.runs)), *[str(one) for one in compared]))
        answered += compared
    seconds = median(one.seconds for one in answered)
    version = answered[-1].version
    counts = median(len(network.runs) for network in networks)
    explanation = (
        f"Of one step of two micro-batches of {samples} samples: MiB of the largest workspace as cuDNN says, by the "
        f"rule where it is not installed, and as {_COPIES} times the largest convolution's tensors, used before; "
        "then the error of what is reserved by the rule, against cuDNN's answers. "
        f"cuDNN {version}; asked about a network ({counts:.0f} convolutions in the median) it takes {seconds:.2f} s."
    )
    # cuDNN answers on the host, for cards that are described to it: none of them computes anything.
    cards = (f"simulated {card}" for card in _CARDS)
    return Table("Workspaces of cuDNN, for simulated cards", explanation, ("model", "convolutions", *cards), rows)


def _compare(network: _Network, card: str, samples: int) -> _Compared:
    gpu = find_gpu(card)
    began = time.perf_counter()
    asked = Workspaces.of_card(gpu.architecture, gpu.multiprocessors).ask(network.runs)
    answered = time.perf_counter()
    by_answers = network.estimate.on_card(gpu, asked).reserved(samples)
    by_rule = network.estimate.on_card(gpu, Workspaces(gpu.architecture, gpu.multiprocessors)).reserved(samples)
    return _Compared(
        asked=max(asked.find(run) for run in network.runs),
        ruled=max(estimate_workspace(run, gpu.architecture) for run in network.runs),
        multiple=max(int(_COPIES * sum(run.byte_counts()[:2])) for run in network.runs),
        error=by_rule / by_answers - 1,
        seconds=answered - began,
        version=asked.version,
    )


def _trace(name: str, samples: int) -> _Network:
    import timm  # noqa: PLC0415 - after the stub

    model = timm.create_model(name)
    workload = Workload(model, _step, None, torch.optim.SGD(model.parameters(), momentum=0.9))
    layout = describe((torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long)))
    timeline = run_apart(lambda: trace_timeline(workload, layout, Circumstances()))
    return _Network(name, Estimate(timeline), frozenset(timeline.at(samples).convolutions.values()))


def _step(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=[*_MODELS])
    parser.add_argument("--samples", type=int, default=_SAMPLES)
    arguments = parser.parse_args()
    print(measure(arguments.models, arguments.samples))


if __name__ == "__main__":
    _main()
