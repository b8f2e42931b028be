"""The choice of fit beside exhaustive search, on a model of blocks of unlike widths."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from text_blocks import Texts, make_texts, need_of, step

import autobatch
from autobatch.memory.cpu import CpuDevice
from autobatch.step.workload import Workload
from autobatch.strategies.blocks import find_blocks, measure_blocks
from autobatch.strategies.checkpointing import recompute
from autobatch.strategies.choice import TOO_LOW, cost_of, whole

WIDES = (2, 4, 8, 3, 6, 1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Texts(len(WIDES), wides=WIDES)


@pytest.fixture(scope="module")
def peaks(model):
    """Measured peak of every choice, as a trial measures it."""
    found = {}
    device, texts = CpuDevice(), make_texts(1)
    blocks = find_blocks(model)
    for taken in product((False, True), repeat=len(WIDES)):
        chosen = tuple(block for block, is_chosen in zip(blocks, taken, strict=True) if is_chosen)
        work = recompute(Workload(model, step), whole(chosen))
        model.zero_grad()
        with device.limit(2**40):
            device.watch([*model.parameters(), texts])
            work.step(model, texts).backward()
            device.reset_peak()
            base = device.usage().allocated
            work.step(model, texts).backward()
            found[chosen] = device.usage().peak_allocated - base
    model.zero_grad()
    return found


@pytest.fixture(scope="module")
def measured(model):
    with CpuDevice().limit(2**40):
        found = measure_blocks(
            Workload(model, step), CpuDevice(), find_blocks(model), make_texts(1), {}, allowed=["checkpoint"]
        )
    model.zero_grad()
    return found


def test_no_prediction_is_far_from_its_measurement(peaks, measured):
    """Over all choices; those that are too high by more would be passed over."""
    everything = max(peaks, key=len)
    rest = peaks[everything] - measured.peak(whole(everything))
    for chosen, peak in peaks.items():
        predicted = rest + measured.peak(whole(chosen))
        assert 0.95 * peak < predicted < TOO_LOW * peak


@pytest.mark.parametrize("part", [0.9, 0.75, 0.6])
def test_the_choice_is_the_best_of_all(part, model, peaks, measured):
    """At most 1 % more recomputation than the cheapest of all choices that fit."""
    need = need_of(model)
    budget = need - int((1 - part) * peaks[()])
    options = {"headroom": 0, "strategies": ["checkpoint"], "reuse": False, "check": None}
    plan = autobatch.fit(model, 4, batch=make_texts(), step=step, budget=budget, **options)
    rest = need - peaks[()]
    fitting = [chosen for chosen, peak in peaks.items() if rest + peak <= budget]
    best = min(cost_of(measured.runs, whole(chosen)) for chosen in fitting)
    assert cost_of(measured.runs, plan.checkpointing.ways) <= 1.01 * best


def test_predictions_of_blocks_in_unlike_ways_are_near_their_measurements(model):
    """All choices of a way for each of three blocks, beside the rest recomputed whole."""
    blocks, texts, device = find_blocks(model), make_texts(1), CpuDevice()
    with device.limit(2**40):
        found = measure_blocks(Workload(model, step), device, blocks, texts, {}, allowed=["checkpoint", "selective"])
    peaks = {}
    for ways in product((None, "checkpoint", "selective"), repeat=3):
        chosen = {**whole(blocks), **dict(zip(blocks[1:4], ways, strict=True))}
        chosen = {block: way for block, way in chosen.items() if way}
        work = recompute(Workload(model, step), chosen)
        model.zero_grad()
        with device.limit(2**40):
            device.watch([*model.parameters(), texts])
            work.step(model, texts).backward()
            device.reset_peak()
            base = device.usage().allocated
            work.step(model, texts).backward()
            peaks[tuple(chosen.items())] = device.usage().peak_allocated - base
    model.zero_grad()
    rest = peaks[tuple(whole(blocks).items())] - found.peak(whole(blocks))
    for chosen, peak in peaks.items():
        assert 0.95 * peak < rest + found.peak(dict(chosen)) < TOO_LOW * peak
