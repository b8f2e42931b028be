"""Bugs planted on purpose: each must turn a fast test red, or the tests prove less than they say.

A script (``make mutants``). Covers the promises of a training step: what is undone, weighed, kept, and done once; how a
batch is read; predictions and remembered plans; the process, which two threads and an interrupt leave as it was. Does
not cover planning, whose tests are tables and properties of their own.
"""
# ruff: noqa: T201 - a script: it talks to a person

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant"]

ROOT = Path(__file__).parent.parent

ACCUMULATION = "autobatch/training/accumulation.py"
BACKWARD = "autobatch/torch_internals/backward.py"
MICRO_BATCHES = "autobatch/training/micro_batches.py"
ACCUMULATION_STATE = "autobatch/training/accumulation_state.py"
DENOMINATORS = "autobatch/training/loss_denominators.py"
GIVEN_BACKWARD = "autobatch/training/given_backward.py"
RUNNER_STATE = "autobatch/training/runner_state.py"
UPDATE = "autobatch/training/optimizer_step.py"
GRADIENTS = "autobatch/undo/gradients.py"
UNDO = "autobatch/undo/undo.py"
RANDOM = "autobatch/undo/random_state.py"
STEP = "autobatch/step/workload.py"
EXACTNESS = "autobatch/exactness/"
LOOP_GUARD = "autobatch/step/loop_guard.py"

REUSE = "autobatch/planning/reuse.py"
SEARCH = "autobatch/fitting/search.py"
PACING = "autobatch/planning/pacing.py"
RUN_RECORDER = "autobatch/ledger/run_recorder.py"
WRAPPERS = "autobatch/_wrappers.py"
PREDICTION = "autobatch/prediction/"
BATCH = "autobatch/batch/"
INFERENCE = "autobatch/inference/"

CPU = "autobatch/memory/cpu.py"
DISPATCH = "autobatch/torch_internals/dispatch_mode.py"

DISTRIBUTED = "autobatch/distributed/"
RANK_TESTS = ("tests/distributed/test_runner_on_ranks.py",)
RANK_FAILURE_TESTS = ("tests/distributed/test_failures_on_ranks.py",)
SHARDED_TESTS = ("tests/distributed/test_sharded_runner.py",)
SHARDED_FAILURE_TESTS = ("tests/distributed/test_sharded_failures.py",)
SHARDED_FIT_TESTS = ("tests/distributed/test_sharded_fit.py",)
INTERRUPT_TESTS = ("tests/distributed/test_interrupts_on_ranks.py",)
SHARDED_LOSS_TESTS = ("tests/distributed/test_sharded_losses.py",)
SHARDED_PASS_TESTS = ("tests/distributed/test_sharded_passes.py",)
RANK_FIT_TESTS = ("tests/distributed/test_fit_on_ranks.py",)
RANK_WRAPPER_TESTS = ("tests/distributed/test_wrapper_on_ranks.py",)

ACCUMULATION_TESTS = ("tests/training/test_accumulation.py",)
BACKWARD_TESTS = ("tests/torch_internals/test_backward.py",)
DENOMINATOR_TESTS = ("tests/training/test_loss_denominators.py",)
SEVERAL_OPTIMIZERS_TESTS = ("tests/training/test_several_optimizers.py",)
RUNNER_STATE_TESTS = ("tests/training/test_runner_state.py",)
KERNEL_MEMORY_TESTS = ("tests/prediction/test_kernel_memory.py",)
STATED_COUNTS_TESTS = ("tests/training/test_stated_counts.py",)
UPDATE_CHECK_TESTS = ("tests/exactness/test_updates.py",)
GIVEN_BACKWARD_TESTS = ("tests/training/test_given_backward.py",)
RUNNER_TESTS = ("tests/training/test_runner.py",)
FAULT_TESTS = ("tests/training/test_faults.py",)
WATCHED_TESTS = ("tests/training/test_batch_mutation.py",)
FULL_SIZE_TESTS = ("tests/exactness/test_full_size.py",)
VERIFICATION_TESTS = ("tests/exactness/test_verification.py",)
LOOP_GUARD_TESTS = ("tests/step/test_loop_guard.py",)
BATCH_TESTS = ("tests/batch/test_layout_rules.py", "tests/batch/test_batch_types.py")
MOVING_TESTS = ("tests/undo/test_moving_state.py",)
IN_PLACE_TESTS = ("tests/undo/test_changed_in_place.py",)
LIFETIME_TESTS = ("tests/training/test_step_lifetimes.py",)


MAP_TESTS = ("tests/inference/test_map.py",)
MAP_FAILURE_TESTS = ("tests/inference/test_failures.py",)
LOADER_STEPS = "autobatch/training/loader_steps.py"
RUN_TESTS = ("tests/training/test_run.py",)
JOINING_TESTS = ("tests/batch/test_joining.py",)
CUT_OF_ONES_OWN_TESTS = ("tests/training/test_given_cut.py",)
LENGTH_TESTS = ("tests/training/test_sample_lengths.py",)
TRIMMING_TESTS = ("tests/batch/test_lengths.py",)
SMALLEST_TESTS = ("tests/training/test_smallest_piece.py",)
PACING_TESTS = ("tests/planning/test_pacing.py", "tests/training/test_size_over_time.py")


TRAINER = "autobatch/integrations/transformers/"
CUT_TESTS = ("tests/integrations/test_cuts.py",)
TRAINER_TESTS = ("tests/integrations/test_shortages.py",)
RULE_TESTS = ("tests/integrations/test_loss_rule.py",)
UNLIKE_TESTS = ("tests/integrations/test_unlike_batches.py",)
TRAINER_LOG_TESTS = ("tests/integrations/test_trainer_logs.py",)
LIGHTNING = "autobatch/integrations/lightning/"
LIGHTNING_TESTS = ("tests/integrations/test_lightning_shortages.py",)


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: What is wrong with it.
        file: Where, from the root of the repository.
        old: Text that occurs exactly once in it.
        new: What stands there instead.
        tests: The files of which one test must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ACCUMULATION_TESTS


MUTANTS = (
    Mutant(
        "generators are not restored",
        UNDO,
        "            parts.callback(self._generators.restore)",
        "            parts.callback(self.gradients.restore)",
    ),
    Mutant(
        "copies of memory that a step wrote into are not restored",
        UNDO,
        "            put_storage(memory, value)\n\n    def restore_outside",
        "            value.copy_(memory)\n\n    def restore_outside",
        MOVING_TESTS,
    ),
    Mutant(
        "attributes stay as a failed attempt left them",
        "autobatch/undo/module_state.py",
        "            _put_entries(vars(module), attributes)\n        copied",
        "            _is_equal(vars(module), attributes)\n        copied",
        MOVING_TESTS,
    ),
    Mutant(
        "gradients of a failed attempt stay",
        UNDO,
        "        self.restore()\n        self.gradients.set_aside()",
        "        kept = [p.grad for p in self.gradients.parameters]\n        self.restore()\n"
        "        for p, g in zip(self.gradients.parameters, kept, strict=True):\n            p.grad = g",
        FAULT_TESTS,
    ),
    Mutant(
        "float32 sums of a failed attempt stay",
        ACCUMULATION,
        "        self._sums.clear()  # of an attempt that failed\n",
        "",
        FAULT_TESTS,
    ),
    Mutant(
        "earlier gradients are lost",
        ACCUMULATION,
        "        undo.gradients.add()\n",
        "",
    ),
    Mutant(
        "a step that wrote into memory of which there is no copy is run again",
        ACCUMULATION,
        "        if lost:\n            self.written.add(lost)\n            shape",
        "        if lost and not reason:\n            self.written.add(lost)\n            shape",
        MOVING_TESTS,
    ),
    Mutant(
        "a batch may be written into",
        "autobatch/training/misuse.py",
        "        if moved or is_recorded or written:",
        "        if not keys and moved and is_recorded:",
        WATCHED_TESTS,
    ),
    Mutant(
        "weights need not add up",
        ACCUMULATION,
        "            check_additive(self._cut_wholes(batches), micro_batches)\n",
        "",
    ),
    Mutant(
        "state made for an undone update stays",
        UPDATE,
        "        forget_state(self._inner, self._made)\n",
        "",
        ("tests/training/test_optimizer_step.py",),
    ),
    Mutant(
        "an update's gradients come back after it",
        "autobatch/training/runner.py",
        "                self._accumulation.drop_gradients()\n",
        "                self._stepped.forget()\n",
        RUNNER_TESTS,
    ),
    Mutant(
        "activations of the step before are held between steps",
        UNDO,
        "        self.modules.release()\n",
        "",
        LIFETIME_TESTS,
    ),
    Mutant(
        "sparse gradients grow with every micro-batch",
        ACCUMULATION,
        "        coalesce_gradients(self._parameters)\n",
        "",
        ("tests/undo/test_sparse_gradients.py",),
    ),
    Mutant(
        "accelerate: batches are summed that nothing divides",
        "autobatch/training/runner.py",
        "        if is_accumulating():",
        "        if not is_accumulating:",
        ("tests/api/test_messages.py",),
    ),
    Mutant(
        "the samples of a piece in which memory ended are passed over",
        INFERENCE + "piece.py",
        "            return None, reason\n",
        "            waiting.drop(len(indices))\n            return None, reason\n",
        MAP_FAILURE_TESTS,
    ),
    Mutant(
        "a piece that is run again draws on",
        INFERENCE + "piece.py",
        "            if random is not None:\n                random.restore()\n",
        "",
        MAP_FAILURE_TESTS,
    ),
    Mutant(
        "a function that writes into its batch is mapped",
        INFERENCE + "piece.py",
        "        if wrote or any(tensor._version != version",
        "        if wrote or any(False and tensor._version != version",
        MAP_FAILURE_TESTS,
    ),
    Mutant(
        "a piece may pass the budget",
        INFERENCE + "piece.py",
        "            self.device.limit(self.allowance.budget_bytes),\n",
        "",
        ("tests/inference/test_budgets.py",),
    ),
    Mutant(
        "modules are mapped in train mode",
        INFERENCE + "piece.py",
        "            eval_mode(self.modules),\n",
        "",
        MAP_TESTS,
    ),
    Mutant(
        "a frozen layer of a module is in train mode after map",
        INFERENCE + "guards.py",
        "        layer.training = mode\n",
        "        pass\n",
        MAP_TESTS,
    ),
    Mutant(
        "results of sorted samples are joined in another order",
        INFERENCE + "results.py",
        "column[torch.tensor(indices, device=column.device)] = leaf",
        "column[torch.tensor(sorted(indices), device=column.device)] = leaf",
        MAP_TESTS,
    ),
    Mutant(
        "results are yielded as pieces end",
        INFERENCE + "mapping.py",
        "                while following in early:\n                    yield early.pop(following)\n",
        "                while early:\n                    yield early.pop(next(iter(early)))\n",
        MAP_TESTS,
    ),
    Mutant(
        "what was done before an error is lost",
        INFERENCE + "mapping.py",
        "_attach(error, [*early], [*early.values()])",
        "_attach(error, [], [])",
        MAP_FAILURE_TESTS,
    ),
    Mutant(
        "batches are joined whose numbers may count their samples",
        BATCH + "cut.py",
        "_SHARED = (type(None), bool, str)",
        "_SHARED = (type(None), bool, str, int)",
        JOINING_TESTS,
    ),
    Mutant(
        "a part of joined batches begins with the first sample of a batch",
        BATCH + "cut.py",
        "range(start - begin, stop - begin)",
        "range(stop - start)",
        JOINING_TESTS,
    ),
    Mutant(
        "joined batches are copied whole to be counted",
        ACCUMULATION,
        "self._cut(cut_apart(batches),",
        "self._cut(self.division(batches, 0),",
        ("tests/training/test_step_over.py",),
    ),
    Mutant(
        "what is left of a loader's batch is dropped",
        LOADER_STEPS,
        "self._rest = _cut(layout, most, layout.count)",
        "self._rest = None",
        RUN_TESTS,
    ),
    Mutant(
        "a resumed run draws what the skipped part has drawn",
        LOADER_STEPS,
        "            generators.restore()\n",
        "            generators.is_current()\n",
        RUN_TESTS,
    ),
    Mutant(
        "a resumed share sampler is skipped twice",
        LOADER_STEPS,
        "self._to_skip, progress.samples = 0, sampler.first_batch * share",
        "progress.samples = sampler.first_batch * share",
        RUN_TESTS,
    ),
    Mutant(
        "a rank whose loader ends first ends the pass for itself",
        "autobatch/training/runner.py",
        "layouts, samples = read_together(self._ranks, self.steps, reading)",
        "layouts, samples = read_together(self._ranks, self.steps, reading)[:1] * 2; samples = count_samples(layouts)",
        ("tests/distributed/test_run_on_ranks.py",),
    ),
    Mutant(
        "a left-over step of a scheduler is not noticed",
        "autobatch/training/loop_watch.py",
        "before[0] < now[0]",
        "before[0] + 1 < now[0]",
        ("tests/training/test_loop_watch.py",),
    ),
    Mutant(
        "a cut that gives a sample twice is run",
        BATCH + "cut.py",
        "        if row in seen:\n",
        "        if False:\n",
        CUT_OF_ONES_OWN_TESTS,
    ),
    Mutant(
        "a cut that loses samples is run",
        BATCH + "cut.py",
        "    if len(seen) < count:\n",
        "    if False:\n",
        CUT_OF_ONES_OWN_TESTS,
    ),
    Mutant(
        "a divided group has its first samples twice",
        BATCH + "cut.py",
        "part = _as_range(rows[start:stop])",
        "part = _as_range(rows[: stop - start])",
        CUT_OF_ONES_OWN_TESTS,
    ),
    Mutant(
        "a micro-batch has as many samples as ran at a shorter length",
        "autobatch/planning/lengths.py",
        "edge_above(sizes, lengths[done]).micro_batch_size * scale // sizes[0].micro_batch_size",
        "sizes[0].micro_batch_size * scale // sizes[0].micro_batch_size",
        ("tests/planning/test_lengths.py", *LENGTH_TESTS),
    ),
    Mutant(
        "the limit is that of the shortest sample of a micro-batch",
        "autobatch/planning/lengths.py",
        "edge_above(sizes, lengths[done])",
        "edge_above(sizes, lengths[-1])",
        ("tests/planning/test_lengths.py", *LENGTH_TESTS),
    ),
    Mutant(
        "a part is trimmed to its shortest sample",
        BATCH + "cut.py",
        "trim, scale = lengths.trim(start),",
        "trim, scale = lengths.trim(stop - 1),",
        LENGTH_TESTS,
    ),
    Mutant(
        "padding on the left is trimmed on the right",
        BATCH + "layout.py",
        "slice(length) if is_right else slice(max(value.shape[dim] - length, 0), None)",
        "slice(length)",
        (*TRIMMING_TESTS, *LENGTH_TESTS),
    ),
    Mutant(
        "what is no padding passes for it",
        BATCH + "lengths.py",
        "if size and bool((beyond != beyond.flatten()[0]).any()):",
        "if False:",
        TRIMMING_TESTS,
    ),
    Mutant(
        "a longer sample than was tried is run",
        BATCH + "lengths.py",
        "            if max(values) > longest:\n",
        "            if False:\n",
        LENGTH_TESTS,
    ),
    Mutant(
        "a sample that trimming has cut off is run",
        BATCH + "lengths.py",
        "        if max(other, 1) != one:\n",
        "        if False:\n",
        (*TRIMMING_TESTS, *LENGTH_TESTS),
    ),
    Mutant(
        "trimmed samples are asked for their lengths only where they are weighed",
        MICRO_BATCHES,
        "if workload.weigh is not None or group.lengths is not None:",
        "if workload.weigh is not None:",
        LENGTH_TESTS,
    ),
    Mutant(
        "many samples are compared in the batch's order, where steps take them by length",
        EXACTNESS + "verification.py",
        "order=None if samples is None else samples.order)",
        "order=None)",
        FULL_SIZE_TESTS,
    ),
    Mutant(
        "rows of a second batch are those of the first",
        MICRO_BATCHES,
        "tuple(part.first + row for row",
        "tuple(row for row",
        LENGTH_TESTS,
    ),
    Mutant(
        "trimming is not checked",
        EXACTNESS + "verification.py",
        "    if verdict.exact and samples is not None and lengths is not None and samples.padding.dims:\n",
        "    if False:\n",
        ("tests/fitting/test_length_search.py",),
    ),
    Mutant(
        "a plan of other padding is remembered",
        "autobatch/fitting/fingerprint.py",
        "**({} if lengths is None else",
        "**({} if True else",
        ("tests/fitting/test_length_search.py",),
    ),
    Mutant(
        "the state made for the first of several optimizers stays where that of the second cannot be made",
        "autobatch/undo/optimizer_state.py",
        "    except BaseException:\n        forget_state(optimizer, made)\n        raise\n    return made\n",
        "    except BaseException:\n        raise\n    return made\n",
        SEVERAL_OPTIMIZERS_TESTS,
    ),
    Mutant(
        "each of several optimizers is clipped by itself",
        UPDATE,
        "for group in self._inner.param_groups for parameter",
        "for group in self.optimizers[0].param_groups for parameter",
        SEVERAL_OPTIMIZERS_TESTS,
    ),
    Mutant(
        "a resumed Runner begins with the plan's size",
        RUNNER_STATE,
        "            size=self.size,\n            reason=self.reason,\n",
        "",
        RUNNER_STATE_TESTS,
    ),
    Mutant(
        "a resumed Runner forgets what failed",
        RUNNER_STATE,
        "            ceiling=self.ceiling,\n",
        "",
        RUNNER_STATE_TESTS,
    ),
    Mutant(
        "columns that only labels use are taken for padding",
        TRAINER + "cuts.py",
        'if name.endswith("labels") and value.ndim == 2]',
        'if name.endswith("nothing") and value.ndim == 2]',
        CUT_TESTS,
    ),
    Mutant(
        "floats that are as many as the text is wide are cut off with its padding",
        TRAINER + "cuts.py",
        "        if not any(value.is_floating_point() and name != mask for name, value in group.items()):\n"
        "            groups.append(group)",
        "        groups.append(group)",
        CUT_TESTS,
    ),
    Mutant(
        "samples are collated anew where the collate function draws",
        TRAINER + "cuts.py",
        "return samples is not None and _are_equal(self._collate(copy_samples(samples)), inputs)",
        "return samples is not None",
        CUT_TESTS,
    ),
    Mutant(
        "what a Trainer has counted stays counted when a micro-batch is undone",
        TRAINER + "trainer_state.py",
        "        attributes.update(taken.data)\n        taken.found.put_back()\n",
        "",
        TRAINER_TESTS,
    ),
    Mutant(
        "what a Trainer's step logs is logged again when a micro-batch is undone",
        TRAINER + "trainer_logs.py",
        "        self.micro_batches[:] = taken\n",
        "        pass\n",
        TRAINER_LOG_TESTS,
    ),
    Mutant(
        "what a Trainer's step logs is always a mean over samples",
        TRAINER + "trainer_logs.py",
        "        self.ways[name] = found[0] if found else _SAMPLES\n",
        "        self.ways[name] = _SAMPLES\n",
        TRAINER_LOG_TESTS,
    ),
    Mutant(
        "the first batch's trials count in the objects that a Trainer's user has named",
        TRAINER + "training.py",
        "            before.restore()\n",
        "",
        TRAINER_LOG_TESTS,
    ),
    Mutant(
        "the first batch's trials draw from the generators of the training",
        TRAINER + "training.py",
        "            attributes.put(taken)\n            random.restore()",
        "            attributes.put(taken)",
        TRAINER_TESTS,
    ),
    Mutant(
        "a resumed Trainer begins with the plan's size",
        TRAINER + "training.py",
        "        runner.load_state_dict(state)\n",
        "",
        TRAINER_TESTS,
    ),
    Mutant(
        "what Lightning has logged stays logged when a step is undone",
        LIGHTNING + "logs.py",
        "            vars(metric).update(attributes)\n",
        "",
        LIGHTNING_TESTS,
    ),
    Mutant(
        "a step of Lightning's cannot be undone any more when its gradient is clipped",
        LIGHTNING + "training.py",
        "            after_closure(*arguments)\n            begin()",
        "            begin()\n            after_closure(*arguments)",
        LIGHTNING_TESTS,
    ),
    Mutant(
        "what micro-batches log in Lightning counts alike, however large they are",
        LIGHTNING + "logs.py",
        "    return [weight / total if total else 1 / len(weights) for weight in weights]",
        "    return [1 / len(weights) for weight in weights]",
        LIGHTNING_TESTS,
    ),
    Mutant(
        "a metric's value of a step is that of its last micro-batch",
        LIGHTNING + "training.py",
        "            self._metrics.begin()\n",
        "",
        LIGHTNING_TESTS,
    ),
    Mutant(
        "the parts of an evaluation count alike",
        TRAINER + "evaluation_loss.py",
        "        return _combine((known or possible)[0], parts)",
        "        return _combine((known or possible)[0], [(loss, dict.fromkeys(way, 1.0)) for loss, way in parts])",
        ("tests/integrations/test_evaluation_loss.py",),
    ),
    Mutant(
        "what is known of one evaluation dataset's loss is used for all",
        TRAINER + "evaluation_loss.py",
        "self._known.setdefault(kind, ",
        'self._known.setdefault("", ',
        ("tests/integrations/test_evaluation_loss.py",),
    ),
    Mutant(
        "what a failed part of an evaluation has changed stays",
        TRAINER + "evaluation.py",
        "        self._state.put_back()\n",
        "",
        ("tests/integrations/test_evaluation_state.py",),
    ),
    Mutant(
        "a Part is divided once more",
        DENOMINATORS,
        "return term.multiply(1.0)  # in float32",
        "return term.multiply(self._average_part(weights))  # in float32",
        DENOMINATOR_TESTS,
    ),
    Mutant(
        "the loss of a single micro-batch is the step's own tensor",
        ACCUMULATION_STATE,
        "self.loss, self.unit = loss.detach() * factor, unit",
        "self.loss, self.unit = loss.detach() if factor == 1 else loss.detach() * factor, unit",
    ),
    Mutant(
        "a narrow Part is corrected with the other terms",
        DENOMINATORS,
        'return term.multiply(self.weights[""] / unit)',
        "return term.multiply(1.0)",
        DENOMINATOR_TESTS,
    ),
    Mutant(
        "a given backward may skip a later micro-batch",
        GIVEN_BACKWARD,
        "if len(arrived) != 1:",
        "if len(arrived) != 1 and not self._factor_is_known:",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant(
        "a given backward may divide the loss once more",
        GIVEN_BACKWARD,
        "self._check_factor(float(arrived[0]))",
        "self._check_factor(1.0)",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant(
        "an interrupt in a given backward leaves hooks",
        GIVEN_BACKWARD,
        "self._remove_hooks()  # of all: an interrupt may have come at any of them",
        "pass",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant(
        "a given backward may add to narrow gradients itself",
        GIVEN_BACKWARD,
        "if leaf.dtype in NARROW:",
        "if not by_torch and leaf.dtype in ():",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant("buffers are not restored", UNDO, "            buffer.copy_(value)\n", "            pass\n"),
    Mutant(
        "NumPy's generator is forgotten",
        RANDOM,
        '            sys.modules["numpy.random"].set_state(self.numpy)\n',
        "            pass\n",
        ("tests/undo/test_random_state.py", *ACCUMULATION_TESTS),
    ),
    Mutant(
        "weigh is ignored",
        STEP,
        '        if self.weigh is None:\n            return {""',
        '        if True:\n            return {""',
    ),
    Mutant(
        "the loss of a failed attempt is kept",
        ACCUMULATION_STATE,
        "        self.loss, self.counted, self.unit = None, 0.0, None\n",
        "        self.unit = None\n",
        (*RUNNER_TESTS, *FAULT_TESTS),
    ),
    Mutant(
        "counts that a step states are compared in the first step alone",
        "autobatch/training/stated_counts.py",
        "self._begun.bit_count() == 1",
        "self._begun == 1",
        STATED_COUNTS_TESTS,
    ),
    Mutant(
        "a count that is drawn at random is refused",
        "autobatch/training/stated_counts.py",
        "            if not _are_same(found, count_again(samples, limit), nothing):\n",
        "            if False:\n",
        STATED_COUNTS_TESTS,
    ),
    Mutant(
        "a mean over samples counts the skipped ones too",
        ACCUMULATION_STATE,
        "            self._has_stated_none |= self.todo[0].counts\n",
        "            pass\n",
        STATED_COUNTS_TESTS,
    ),
    Mutant(
        "an update that is another each time is blamed on the parts",
        EXACTNESS + "updates.py",
        "            if _distance(divided, once) <= _REPEATS * _distance(again, once):",
        "            if False:",
        UPDATE_CHECK_TESTS,
    ),
    Mutant(
        "nothing moves in a compared update at a rate of 0",
        EXACTNESS + "updates.py",
        '                    group["lr"] = group["lr"] + _RATE\n',
        "                    pass\n",
        UPDATE_CHECK_TESTS,
    ),
    Mutant(
        "earlier gradients are not put back",
        GRADIENTS,
        "            parameter.grad = gradient\n",
        "            pass\n",
    ),
    Mutant(
        "predict does not see a write into the batch",
        PREDICTION + "tracing/fake_step.py",
        "if is_placed and ",
        "if False and ",
        WATCHED_TESTS,
    ),
    Mutant(
        "kernel memory: a norm on the host takes memory of the card",
        PREDICTION + "tracing/recording.py",
        "if args and is_on_device(args[0]) else ([], [])",
        "",
        KERNEL_MEMORY_TESTS,
    ),
    Mutant(
        "kernel memory: wide heads of flash attention are rounded as narrow ones",
        PREDICTION + "tracing/kernel_memory.py",
        "_FLASH_COLUMNS if width <= 4 * _FLASH_COLUMNS else 2 * _FLASH_COLUMNS",
        "_FLASH_COLUMNS",
        KERNEL_MEMORY_TESTS,
    ),
    Mutant(
        "kernel memory: flash attention copies nothing",
        PREDICTION + "tracing/kernel_memory.py",
        "copied = [part.nbytes for part in (gradient, result) if not part.transpose(1, 2).is_contiguous()]",
        "copied = []",
        KERNEL_MEMORY_TESTS,
    ),
    Mutant(
        "kernel memory: an expanded gradient is not copied",
        PREDICTION + "tracing/kernel_memory.py",
        "order if gradient.transpose(1, 2).is_contiguous() else [copy, *order, -copy]",
        "order",
        KERNEL_MEMORY_TESTS,
    ),
    Mutant(
        "kernel memory: a norm's gradient is not copied",
        PREDICTION + "tracing/kernel_memory.py",
        "return _norm_buffers(args[1], args[0])",
        "return _norm_buffers(args[1])",
        KERNEL_MEMORY_TESTS,
    ),
    Mutant(
        "autocast: inputs are cast before weights",
        PREDICTION + "tracing/autocast.py",
        "values = [cast(value, dtype) for value in reversed(args)]",
        "values = [cast(value, dtype) for value in args][::-1]",
        KERNEL_MEMORY_TESTS,
    ),
    Mutant(
        "a hook stays in a copy of the table",
        "autobatch/step/gradient_hooks.py",
        "        present.pop(key, None)\n",
        "",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant(
        "a hook stays in a table that was replaced",
        "autobatch/step/gradient_hooks.py",
        "    hooks.pop(key, None)\n",
        "",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant(
        "the split of many samples is not looked at",
        EXACTNESS + "verification.py",
        "            verdict = compare_many(comparison, verdict, planned, samples)\n",
        "            pass\n",
        FULL_SIZE_TESTS,
    ),
    Mutant(
        "the whole target is compared in parts that no plan runs",
        EXACTNESS + "partitions.py",
        "return balance(target, size, smallest) if whole == target > size else halvings(whole, smallest)",
        "return halvings(whole, smallest)",
        FULL_SIZE_TESTS,
    ),
    Mutant(
        "memory that ends among many samples ends the check",
        EXACTNESS + "comparison.py",
        "            if is_oom(error, handled=handled):\n                return None, reason\n",
        "            if is_oom(error, handled=handled):\n                raise\n",
        FULL_SIZE_TESTS,
    ),
    Mutant(
        "a model that does not fit is tried again with fewer samples",
        EXACTNESS + "comparison.py",
        "isinstance(shortage, _ModelDoesNotFit) and not self.exact_at",
        "False",
        ("tests/exactness/test_check_in_fit.py",),
    ),
    Mutant(
        "weights that come from the losses are taken for class weights",
        EXACTNESS + "loss_weights.py",
        "    if _depend_on_losses(measured, partitions, weights):\n",
        "    if False:\n",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "a module that the step has made stays for the next comparison",
        EXACTNESS + "comparison.py",
        "        stack.callback(measured.start.restore)\n",
        "",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "zero_grad in the step is let through",
        LOOP_GUARD,
        "            refused.append(message)\n",
        "            pass\n",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "each micro-batch weighs the same",
        DENOMINATORS,
        'loss, micro_batch.weights[""] / total, 0.0',
        "loss, 1 / -(-self.samples // micro_batch.size), 0.0",
    ),
    Mutant(
        "the last piece is dropped",
        MICRO_BATCHES,
        "    return micro_batches\n",
        "    return micro_batches[:-1] or micro_batches\n",
    ),
    Mutant(
        "the scaler is updated twice",
        UPDATE,
        "            self.scaler.update()\n",
        "            self.scaler.update()\n            self.scaler.update()\n",
        RUNNER_TESTS,
    ),
    Mutant(
        "the optimizer steps twice",
        UPDATE,
        "                optimizer.step() if self.scaler is None",
        "                (optimizer.step(), optimizer.step()) if self.scaler is None",
        RUNNER_TESTS,
    ),
    Mutant(
        "gradients are clipped before they are unscaled",
        UPDATE,
        "self.scaler.unscale_(optimizer)",
        "nn.utils.clip_grad_norm_(optimizer.param_groups[0]['params'], self.max_grad_norm or 1e9)",
        RUNNER_TESTS,
    ),
    Mutant(
        "a term of the step counts by the first term",
        DENOMINATORS,
        "term.multiply(self._average_part(weights))",
        "term.multiply(next(iter(weights.values())) / max(self.weights.values()))",
        ("tests/training/test_loss_denominators.py",),
    ),
    Mutant(
        "a buffer stays where it was put",
        "autobatch/undo/tensor_header.py",
        "    if not _refer_to_the_same(tensor, alias):\n        tensor.data = alias\n",
        "",
        ("tests/undo/test_undo.py", *ACCUMULATION_TESTS),
    ),
    Mutant(
        "parameters that nobody knows are trained",
        ACCUMULATION,
        "                self.workload.check_leaves(loss, self.stand_ins())\n",
        "",
    ),
    Mutant(
        "a batch's graph is cut in silence", ACCUMULATION, "            refuse_graphs(tensors)\n", "            pass\n"
    ),
    Mutant(
        "autocast keeps old weights",
        UPDATE,
        "            torch.clear_autocast_cache()\n",
        "            pass\n",
        RUNNER_TESTS,
    ),
    Mutant(
        "memory that is known to move is copied once",
        "autobatch/undo/written_memory.py",
        "            self._known.add([tensor])\n",
        "            pass\n",
        MOVING_TESTS,
    ),
    Mutant(
        "containers in attributes stay as a failed attempt left them",
        "autobatch/undo/containers.py",
        "        for content in self.contents:\n            content.put_back()\n",
        "",
        MOVING_TESTS,
    ),
    Mutant(
        "a micro-batch's graph lives while the next one runs",
        ACCUMULATION,
        "            loss, factor = divided[:2]\n",
        "            loss, factor = self.held = divided[:2]\n",
        LIFETIME_TESTS,
    ),
    Mutant(
        "a backward pass begins with 1 whatever the loss is divided by",
        ACCUMULATION,
        "torch.full_like(loss, factor)",
        "torch.full_like(loss, 1.0)",
    ),
    Mutant(
        "a scaled loss is not divided",
        ACCUMULATION,
        "self.scale(loss * factor)",
        "self.scale(loss)",
        RUNNER_TESTS,
    ),
    Mutant(
        "backward= gets the step's own tensor in a single micro-batch",
        ACCUMULATION,
        "loss = loss * factor if self.scale is None",
        "loss = (loss if factor == 1 else loss * factor) if self.scale is None",
        GIVEN_BACKWARD_TESTS,
    ),
    Mutant(
        "the running loss is not divided",
        ACCUMULATION_STATE,
        "self.loss.add_(loss.detach(), alpha=factor)",
        "self.loss.add_(loss.detach())",
    ),
    Mutant(
        "the first micro-batch's loss is not divided",
        ACCUMULATION_STATE,
        "self.loss, self.unit = loss.detach() * factor",
        "self.loss, self.unit = loss.detach() * 1",
    ),
    Mutant(
        "a running loss in another dtype is not divided",
        ACCUMULATION_STATE,
        "                self.loss = self.loss + loss.detach() * factor\n",
        "                self.loss = self.loss + loss.detach()\n",
    ),
    Mutant(
        "a function in front of Tensor.backward is passed by",
        BACKWARD,
        "        and torch.Tensor.backward is TENSOR_BACKWARD\n",
        "",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a function in front of autograd.backward is passed by",
        BACKWARD,
        "        and torch.autograd.backward is _BACKWARD\n",
        "",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a tool in front of the engine is passed by",
        BACKWARD,
        "torch.autograd._engine_run_backward is graph._engine_run_backward is _ENGINE",
        "graph._engine_run_backward is _ENGINE",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a tool that was there before the import is passed by",
        BACKWARD,
        "    and _is_written_in(TENSOR_BACKWARD, torch._tensor.__file__)",
        "    and True",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a function mode does not intercept backward",
        BACKWARD,
        "        and not torch._C._is_torch_function_mode_enabled()",
        "        and True",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a step inside a functorch transform leaves no gradient and says nothing",
        BACKWARD,
        "        and not torch._C._are_functorch_transforms_active()",
        "        and True",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a private function is used in an untested release",
        BACKWARD,
        "        IS_TRIED\n        and torch",
        "        torch",
        BACKWARD_TESTS,
    ),
    Mutant(
        "a backward pass keeps its graph",
        BACKWARD,
        "(gradient,), False, False, ()",
        "(gradient,), True, False, ()",
        BACKWARD_TESTS,
    ),
    Mutant(
        "finished samples are held until the update",
        BATCH + "cut.py",
        "            self.parts.clear()  # the step",
        "            pass  # the step",
        LIFETIME_TESTS,
    ),
    Mutant(
        "gradient hooks of a failed micro-batch stay",
        "autobatch/undo/tensor_header.py",
        "                if table is not None and table != hooks:\n",
        "                if False:\n",
        ("tests/undo/test_gradient_hooks.py",),
    ),
    Mutant(
        "an optimizer's state is counted instead of looked at",
        "autobatch/undo/optimizer_state.py",
        "    if len(held) == len(state) and all(map(is_, held, state)):",
        "    if len(held) == len(state):",
        ("tests/undo/test_optimizer_state.py",),
    ),
    Mutant(
        "a tensor without rows has as many as the others",
        BATCH + "layout.py",
        "    if len(counts) != 1 or 0 in counts:\n",
        "    if len(counts - {0}) != 1:\n",
        ("tests/batch/test_tree_spec.py",),
    ),
    Mutant(
        "a guard removes another thread's",
        LOOP_GUARD,
        "        if table.get(name) is call:",
        "        if True:",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "another thread's refusal refuses after its step has ended",
        LOOP_GUARD,
        "return method(*arguments, **options) if is_closed else refuse()",
        "return refuse()",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "after an error the next step is not watched",
        LOOP_GUARD,
        "            self._to_watch = max(self._to_watch, 1)\n",
        "            pass\n",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a batch of another kind is taken for the last one's",
        BATCH + "layout.py",
        "return [*batch.values()] if [*batch] == spec.keys else None",
        "return [*batch.values()]",
        ("tests/batch/test_tree_spec.py",),
    ),
    Mutant(
        "a lazy parameter stays what it became",
        "autobatch/undo/tensor_header.py",
        "                    tensor.__class__ = cls\n",
        "",
        MOVING_TESTS,
    ),
    Mutant(
        "objects that the user named are not put back",
        UNDO,
        "            parts.callback(self._objects.put_back)\n",
        "",
        MOVING_TESTS,
    ),
    Mutant(
        "a step whose counts are no whole numbers keeps its first total",
        DENOMINATORS,
        "all(count.is_integer() and count <= _EXACT_IN_FLOAT32 for count in counts)",
        "True",
        MOVING_TESTS,
    ),
    Mutant(
        "a retry divides by the total of other pieces",
        ACCUMULATION_STATE,
        "            self.denominators = Denominators.of(micro_batches, weighed=self._weighed)\n",
        "            pass\n",
        MOVING_TESTS,
    ),
    Mutant(
        "a remembered plan may need more than there is",
        REUSE,
        "    if plan.peak_bytes > limit:",
        "    if False:",
        ("tests/planning/test_reuse.py",),
    ),
    Mutant(
        "a remembered plan may answer another question",
        REUSE,
        "[plan for plan in measured if not _describe_question(plan, wanted)]",
        "measured",
        ("tests/planning/test_reuse.py",),
    ),
    Mutant(
        "a trial that differs confirms a plan",
        SEARCH,
        "        return None\n    return plan\n",
        "    return plan\n",
        ("tests/fitting/test_reuse.py",),
    ),
    Mutant(
        "a forked child writes its parent's run",
        RUN_RECORDER,
        "if self._over or os.getpid() != self._pid or self._run is None:",
        "if self._over or self._run is None:",
        ("tests/ledger/test_run_recorder.py",),
    ),
    Mutant(
        "what is written is not committed",
        "autobatch/ledger/database.py",
        '        connection.execute("COMMIT")\n',
        '        connection.execute("ROLLBACK")\n',
        ("tests/ledger/test_store.py",),
    ),
    Mutant(
        "a prediction forgets the margin",
        f"{PREDICTION}sizing.py",
        "int(gpu.total_bytes / (1 + margin))",
        "gpu.total_bytes",
        ("tests/prediction/test_sizing.py", "tests/prediction/test_predict.py"),
    ),
    Mutant(
        "freed neighbours are not merged",
        f"{PREDICTION}block_pool.py",
        "        before = self._ending.pop(start, 0)\n",
        "        before = 0\n",
        ("tests/prediction/test_allocator.py",),
    ),
    Mutant(
        "one cuBLAS workspace instead of two",
        f"{PREDICTION}kernel_blocks.py",
        "_HANDLES = 2\n",
        "_HANDLES = 1\n",
        ("tests/prediction/test_estimate.py",),
    ),
    Mutant(
        "sizes grow from another sample on",
        f"{PREDICTION}timeline.py",
        "size - slope * first.samples for",
        "size - slope * (first.samples - 1) for",
        ("tests/prediction/test_timeline.py",),
    ),
    Mutant(
        "what lies beyond the largest trace is judged",
        f"{PREDICTION}estimate.py",
        "return self.timeline.traced[-1].samples if self.timeline.interpolated else None",
        "return None",
        ("tests/prediction/test_sizing.py", "tests/prediction/test_estimate.py"),
    ),
    Mutant(
        "a trial begins with the values that the one before has left",
        "autobatch/fitting/probe.py",
        "        self.state.rewind()\n        self.device.reclaim()\n        return reason\n",
        "        self.device.reclaim()\n        return reason\n",
        ("tests/fitting/test_probe.py", "tests/fitting/test_fitting.py"),
    ),
    Mutant(
        "fit leaves the user's objects frozen",
        "autobatch/memory/device.py",
        "        gc.unfreeze()\n",
        "        pass\n",
        ("tests/fitting/test_fit_cost.py",),
    ),
    Mutant(
        "fit unfreezes what the user has frozen",
        "autobatch/memory/device.py",
        "    if gc.get_freeze_count():\n",
        "    if False:\n",
        ("tests/fitting/test_fit_cost.py",),
    ),
    Mutant(
        "half an optimizer's state is left to the next trial",
        "autobatch/fitting/probe.py",
        "            self.state.reset_optimizer()\n",
        "",
        ("tests/fitting/test_fitting.py",),
    ),
    Mutant(
        "a list of samples of one length is read as fields",
        BATCH + "list_rules.py",
        'equal and is_tuple and may_be_arguments else "samples"',
        'equal and is_tuple and may_be_arguments else "fields"',
        BATCH_TESTS,
    ),
    Mutant(
        "two tensors of one shape are guessed to be fields",
        BATCH + "list_rules.py",
        'None for entry in entries}) == 1:\n        return "unclear"\n',
        'None for entry in entries}) == 0:\n        return "unclear"\n',
        BATCH_TESTS,
    ),
    Mutant(
        "the number of samples that a loader collates is not used",
        BATCH + "largest.py",
        "        return describe(batch, like=Layout(None, len(entries), lists))\n",
        "        return describe(batch)\n",
        BATCH_TESTS,
    ),
    Mutant(
        "where lengths are known no shorter samples are taken out of a dataset",
        BATCH + "largest.py",
        "            largest += shorter[: -_MOST_SHORTER - 1 : -1]\n",
        "",
        BATCH_TESTS,
    ),
    Mutant(
        "a number that is not the batch's is believed",
        BATCH + "largest.py",
        "layout.lists if layout.count == samples else None",
        "layout.lists",
        BATCH_TESTS,
    ),
    Mutant(
        "samples that a user's take leaves out are not missed",
        BATCH + "registry.py",
        "        if count != len(indices):\n",
        "        if False:\n",
        BATCH_TESTS,
    ),
    Mutant(
        "a part of a registered type hands its gradient to the user's batch",
        BATCH + "layout.py",
        "        return map_tensors(part, as_leaf)\n",
        "        return part\n",
        BATCH_TESTS,
    ),
    Mutant(
        "a trial's copy of the batch carries a graph",
        "autobatch/fitting/probe.py",
        "return self.device.move_tensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)",
        "return self.device.move_tensor(tensor.clone()).requires_grad_(tensor.requires_grad)",
        BATCH_TESTS,
    ),
    Mutant(
        "a trial's copy of the batch requires no gradient",
        "autobatch/fitting/probe.py",
        "return self.device.move_tensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)",
        "return self.device.move_tensor(tensor.detach().clone())",
        BATCH_TESTS,
    ),
    Mutant(
        "an object with samples in it is shared by all micro-batches",
        BATCH + "layout_rules.py",
        "    _refuse_undivided(batch, ROOT, count, lists)\n",
        "",
        BATCH_TESTS,
    ),
    Mutant(
        "a plan that runs is deleted",
        "autobatch/ledger/retention.py",
        "ORDER BY rowid DESC LIMIT -1 OFFSET ?)\n    AND NOT EXISTS (SELECT 1 FROM runs WHERE plan_id IN (plans.id, "
        "plans.whole))",
        "ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
        ("tests/ledger/test_retention.py",),
    ),
    Mutant(
        "the plan of each rank is in the list",
        "autobatch/ledger/store.py",
        "FROM plans WHERE whole = '' ORDER BY",
        "FROM plans ORDER BY",
        ("tests/ledger/test_rank_rows.py",),
    ),
    Mutant(
        "a rank's time is read before its device has passed the mark",
        "autobatch/distributed/own_time.py",
        "while self._pending and self._pending[0][1].query():",
        "while self._pending:",
        ("tests/distributed/test_own_time.py",),
    ),
    Mutant(
        "the first rank is called the slowest",
        "autobatch/planning/rank_plan.py",
        "return max(range(len(seconds)), key=seconds.__getitem__)",
        "return min(range(len(seconds)), key=seconds.__getitem__)",
        ("tests/planning/test_rank_plan.py",),
    ),
    Mutant(
        "a smaller plan hides a better one",
        REUSE,
        "plan.micro_batch_size if fewest_steps else 0",
        "0",
        ("tests/planning/test_reuse.py",),
    ),
    Mutant(
        "one norm over all parameters judges a split",
        f"{EXACTNESS}gradients.py",
        "        return max(self.sizes[index], self.floor(index), before) or apart\n",
        "        return max(*self.sizes, self.floor(index), before) or apart\n",
        ("tests/exactness/test_rounding.py",),
    ),
    Mutant(
        "rounding is no excuse",
        f"{EXACTNESS}gradients.py",
        "return _NOISES / TOLERANCE * self.noise[index] if self.noise else 0.0",
        "return 0.0",
        ("tests/exactness/test_rounding.py",),
    ),
    Mutant(
        "all samples draw alike",
        f"{EXACTNESS}sample_numbers.py",
        """        if self._kinds.get(site) != "alike":\n            if not""",
        "        if False:\n            if not",
        ("tests/exactness/test_per_sample_random.py",),
    ),
    Mutant(
        "a part draws as if it were the first",
        f"{EXACTNESS}sample_numbers.py",
        "rows = torch.tensor(self._rows, device=numbers.device)",
        "rows = torch.arange(len(self._rows), device=numbers.device)",
        ("tests/exactness/test_per_sample_random.py",),
    ),
    Mutant(
        "a recomputation draws anew",
        f"{EXACTNESS}sample_numbers.py",
        "        known = self._replays.get(token)\n",
        "        known = None\n",
        ("tests/exactness/test_per_sample_random.py",),
    ),
    Mutant(
        "the samples of a list are counted by the first one's place",
        f"{EXACTNESS}loss_weights.py",
        """        if not any(path.startswith(f"{of_samples}[") for of_samples in lists):\n""",
        "        if True:\n",
        ("tests/fitting/test_advice.py", "tests/exactness/test_diagnosis.py"),
    ),
    Mutant(
        "a check that could not be done is no warning",
        "autobatch/fitting/fit.py",
        "return verdict, (*known, str(verdict)) if verdict.unchecked else known",
        "return verdict, known",
        ("tests/exactness/test_check_in_fit.py",),
    ),
    Mutant(
        "what could not be checked does not raise",
        "autobatch/fitting/fit.py",
        '    if splits and check == "raise":\n',
        '    if known and check == "raise":\n',
        ("tests/exactness/test_check_in_fit.py",),
    ),
    Mutant(
        "the first count that is near is advised",
        f"{EXACTNESS}loss_weights.py",
        "        if error < min(best[1], max(best[1] / _BETTER, _NO_ERROR)):\n",
        "        if error < best[1] and best[1] > EXPLAINS:\n",
        ("tests/fitting/test_advice.py",),
    ),
    Mutant(
        "a backward pass inside the step is not noticed",
        LOOP_GUARD,
        "                table[refuse_backward] = refuse_backward\n",
        "",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a step may step an optimizer that it holds",
        LOOP_GUARD,
        "_can_step(v) and _holds_any(v, known)",
        "False",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "an optimizer inside a wrapper may be stepped",
        "autobatch/step/reachable.py",
        "    yield from own_attributes(value)\n",
        "    yield from ()\n",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a refusal that the step caught is forgotten",
        LOOP_GUARD,
        "        if refused:  #",
        "        if False:  #",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a batch is cut into pieces that the model cannot run",
        BATCH + "cut.py",
        "    return balance(total, max(largest, least_size(total, smallest)), min(total, smallest))\n",
        "    return balance(total, largest)\n",
        SMALLEST_TESTS,
    ),
    Mutant(
        "fit does not ask whether one sample runs",
        SEARCH,
        "smallest = trials.probe.find_smallest() if is_doubtful else 1",
        "smallest = 1",
        SMALLEST_TESTS,
    ),
    Mutant(
        "a plan without trials never finds out",
        "autobatch/training/runner.py",
        "if self._is_sharded or self._accumulation.smallest > 1 or not refuses_one_sample(error):",
        "if True:",
        SMALLEST_TESTS,
    ),
    Mutant(
        "a size that fails again waits no longer",
        PACING,
        "min(max(2 * old.wait, next_wait), LONGEST_WAIT)",
        "next_wait",
        PACING_TESTS,
    ),
    Mutant(
        "a wait is never short again",
        PACING,
        '{"wait": ceiling.wait // 2}',
        "{}",
        PACING_TESTS,
    ),
    Mutant(
        "a prediction that knows no larger size ends a search",
        "autobatch/planning/next_trial.py",
        "    if question.expects_no_more and 0 <",
        "    if 0 <",
        ("tests/prediction/test_prior.py",),
    ),
    Mutant(
        "a prediction spares the trial of a size whatever was measured",
        "autobatch/planning/next_trial.py",
        "    if line.reach(question.limit_bytes) >= following:\n        return False\n",
        "",
        ("tests/prediction/test_prior.py",),
    ),
    Mutant(
        "a forecast is believed that a trial has refuted",
        "autobatch/planning/evidence.py",
        "        is_refuted = self.failing or not question.forecast.agrees(self.held)\n",
        "        is_refuted = False\n",
        ("tests/planning/test_forecast.py",),
    ),
    Mutant(
        "a trial that held less than predicted lowers what is feared of the next",
        "autobatch/planning/forecast.py",
        "max(likely, then) + more",
        "likely + more",
        ("tests/planning/test_forecast.py",),
    ),
    Mutant(
        "a trial's replay keeps the caches of the first step",
        "autobatch/prediction/trial_replay.py",
        ", released_at=self._second_step)",
        ")",
        ("tests/prediction/test_trial_replay.py",),
    ),
    Mutant(
        "Python code runs when a tensor is freed",
        CPU,
        "_StorageReference(storage, self._dead.add)",
        "_StorageReference(storage, lambda dead: self._dead.add(dead))",
        ("tests/memory/test_live_storage.py",),
    ),
    Mutant(
        "an interrupt may come between the total and a storage's part in it",
        CPU,
        "            self._total, reference.byte_count = self._total - reference.byte_count, 0\n",
        "            self._total -= reference.byte_count\n            reference.byte_count = 0\n",
        ("tests/memory/test_live_storage.py",),
    ),
    Mutant(
        "what another storage has at the address of a dead one is forgotten",
        CPU,
        "reference.key if known.get(reference.key) is reference else 0",
        "reference.key",
        ("tests/memory/test_live_storage.py",),
    ),
    Mutant(
        "two threads leave torch's globals in a dispatch mode",
        DISPATCH,
        "        try:\n            _push_mode(self)\n        except BaseException:\n"
        "            self.remove()  # interrupted once it was active: nobody would leave it\n            raise\n"
        "        return self\n\n"
        "    def __exit__(self, *error: object) -> None:\n"
        '        """End what ``__enter__`` began."""\n'
        "        _pop_mode()\n",
        "        return super().__enter__()\n",
        ("tests/api/test_threads.py",),
    ),
    Mutant(
        "compiled code is met under a mode",
        DISPATCH,
        '        if "torch._dynamo" in sys.modules:\n            _set_up_compiler()\n',
        "",
        ("tests/memory/test_cpu.py",),
    ),
    Mutant(
        "nothing is compiled in any thread",
        DISPATCH,
        "        if any(isinstance(mode, DispatchMode) for mode in _get_current_dispatch_mode_stack()):\n"
        "            return None  # frames are run as they are\n"
        "        return choose(callback)\n",
        "        return None\n",
        ("tests/api/test_threads.py",),
    ),
    Mutant(
        "a thread that leaves a CUDA limit puts another thread's in place",
        "autobatch/memory/cuda.py",
        "                if not limits.entered:\n",
        "                if True:\n",
        ("tests/memory/test_cuda.py",),
    ),
    Mutant(
        "two fits measure at once",
        "autobatch/fitting/fit.py",
        """    with several_blocks(ranks, "fit()"), one_at_a_time():\n""",
        """    with several_blocks(ranks, "fit()"):\n""",
        ("tests/api/test_threads.py",),
    ),
    Mutant(
        "two forks change the warning filters at once",
        PREDICTION + "child_process.py",
        "        with _FILTERS, warnings.catch_warnings():\n",
        "        with warnings.catch_warnings():\n",
        ("tests/api/test_threads.py",),
    ),
    Mutant(
        "a trial steps a trainer's own optimizer",
        "autobatch/fitting/fit.py",
        "take_module(model, ranks), unwrap_optimizer(optimizer)",
        "take_module(model, ranks), optimizer",
        ("tests/api/test_wrappers.py",),
    ),
    Mutant(
        "accelerate's scaler unscales a second time",
        WRAPPERS,
        "        scaler, optimizer = own if scaler is None else scaler, optimizer.optimizer\n",
        "        return optimizer, own if scaler is None else scaler\n",
        ("tests/api/test_wrappers.py",),
    ),
    Mutant(
        "a clock that was ahead once counts in full",
        "autobatch/ledger/retention.py",
        "min(max(now - latest, 0.0), retention.days * _DAY_S / _GAPS)",
        "max(now - latest, 0.0)",
        ("tests/ledger/test_retention.py",),
    ),
    Mutant(
        "a damaged plan stays among the others",
        "autobatch/ledger/reader.py",
        '            _set_aside(connection, "plan", (rowid, *row), str(error))\n',
        "",
        ("tests/ledger/test_reader.py",),
    ),
    Mutant(
        "a text from a file may steer a terminal",
        "autobatch/_bounds.py",
        "    if len(text) <= LONGEST_TEXT and is_one_line(text):\n",
        "    if len(text) <= LONGEST_TEXT:\n",
        ("tests/planning/test_hostile_plans.py",),
    ),
    Mutant(
        "state of an earlier run is not counted",
        "autobatch/fitting/probe.py",
        "self.state_bytes = resumed + max(made, 0)",
        "self.state_bytes = max(made, 0)",
        ("tests/training/test_phases.py",),
    ),
    Mutant(
        "what a trial writes into outside the model is not copied",
        "autobatch/fitting/probe.py",
        "self.state.record(self.shared.gathered_tensors()) if records else nullcontext()",
        "nullcontext()",
        ("tests/step/test_outside_tensors.py",),
    ),
    Mutant(
        "gradients from before the trials do not come back",
        "autobatch/undo/training_state.py",
        "            self.tensor.grad = self._gradient\n",
        "            pass\n",
        ("tests/undo/test_training_state.py",),
    ),
    Mutant(
        "an out-of-memory error after a fatal one is retried",
        "autobatch/memory/oom.py",
        "    if any(_is_fatal(link) for link in chain):\n        return False\n",
        "",
        ("tests/memory/test_oom.py",),
    ),
    Mutant(
        "a check leaves a teacher as its last run had it",
        EXACTNESS + "measurement.py",
        "        self.start.restore_outside()\n",
        "",
        ("tests/step/test_outside_tensors.py",),
    ),
    Mutant(
        "a check leaves a teacher's data where its last run had assigned it",
        EXACTNESS + "measurement.py",
        "        self.outside.restore()\n",
        "",
        ("tests/step/test_outside_tensors.py",),
    ),
    Mutant(
        "a trial begins without what the step before holds",
        "autobatch/fitting/probe.py",
        "        if self._holds_activations:\n",
        "        if False:\n",
        ("tests/training/test_held_activations.py",),
    ),
    Mutant(
        "a put() that raises leaves the other named objects out",
        "autobatch/undo/user_objects.py",
        "                parts.callback(item.put, taken)\n",
        "                item.put(taken)\n",
        ("tests/undo/test_state_corners.py",),
    ),
    Mutant(
        "ranks: each divides by its own total",
        DISTRIBUTED + "shared_step.py",
        "math.fsum(one[name] for one in named) for name",
        "float(weights.get(name, 1.0)) for name",
        RANK_TESTS,
    ),
    Mutant(
        "ranks: a stated count is that of each rank",
        DISTRIBUTED + "shared_step.py",
        "1.0 if unit is None else unit / total)",
        "1.0)",
        RANK_TESTS,
    ),
    Mutant(
        "ranks: a rank without a gradient leaves what was in the bucket",
        DISTRIBUTED + "reduction.py",
        "            bucket[begin:end].zero_()\n",
        "            pass\n",
        RANK_TESTS,
    ),
    Mutant(
        "ranks: gradients are summed in the order of their shape",
        DISTRIBUTED + "reduction.py",
        "    return value.as_strided((value.numel(),), (1,), value.storage_offset())\n",
        "    return value.reshape(-1)\n",
        RANK_TESTS,
    ),
    Mutant(
        "ranks: the reducer of the wrapper stays armed",
        DISTRIBUTED + "data_parallel.py",
        "    _reset(model)\n    handle",
        "    handle",
        RANK_WRAPPER_TESTS,
    ),
    Mutant(
        "ranks: the wrapper remembers what the step used",
        DISTRIBUTED + "data_parallel.py",
        "        handle.remove()\n        _reset(model)",
        "        handle.remove()\n        pass",
        RANK_WRAPPER_TESTS,
    ),
    Mutant(
        "ranks: buffers stay each rank's own",
        DISTRIBUTED + "shared_step.py",
        "            buffers.take_first(self._ranks.wrapper.process_group, self._ranks.channel)\n",
        "",
        RANK_WRAPPER_TESTS,
    ),
    Mutant(
        "ranks: trials have no bucket beside them",
        DISTRIBUTED + "division.py",
        "        return self._ranks.reduction.reserve([p for p in workload.parameters() if p.requires_grad])\n",
        "        return []\n",
        RANK_WRAPPER_TESTS,
    ),
    Mutant(
        "ranks: gradients from before may differ",
        DISTRIBUTED + "shared_step.py",
        "        return digest_values(earlier)\n",
        '        return ""\n',
        RANK_FAILURE_TESTS,
    ),
    Mutant(
        "ranks: learning rates may differ",
        DISTRIBUTED + "shared_step.py",
        """        if not all(_are_close(one["rates"], heard[0]["rates"]) for one in heard):\n""",
        "        if False:\n",
        RANK_FAILURE_TESTS,
    ),
    Mutant(
        "ranks: what an optimizer holds may differ",
        "autobatch/training/binding.py",
        """        "what the optimizer holds": _describe_state(workload.optimizer),\n""",
        """        "what the optimizer holds": "",\n""",
        ("tests/distributed/test_fit_on_ranks.py",),
    ),
    Mutant(
        "ranks: numbers are equal wherever they lie",
        DISTRIBUTED + "value_digest.py",
        "int(places.mul_(part).sum())",
        "int(part.sum(dtype=torch.int64))",
        ("tests/distributed/test_value_digest.py",),
    ),
    Mutant(
        "a running value in Lightning is the mean of its values",
        LIGHTNING + "logs.py",
        """        rule = replace(rule, ways=("last",))\n""",
        "        pass\n",
        ("tests/integrations/test_lightning.py",),
    ),
    Mutant(
        "an evaluation in parts logs each part",
        TRAINER + "evaluation.py",
        "        self._logs.write(sizes)\n        return (kind.loss",
        "        for one in sizes:\n            self._logs.write([one])\n        return (kind.loss",
        TRAINER_LOG_TESTS,
    ),
    Mutant(
        "ranks: an error that was reported once is reported never again",
        DISTRIBUTED + "channel.py",
        "        self._blocks += 1\n",
        "        pass\n",
        ("tests/distributed/test_fit_on_ranks.py",),
    ),
    Mutant(
        "ranks: a size that only others ran is promised",
        SEARCH,
        "    if size in {trial.micro_batch_size for trial in found.trials}:\n",
        "    if True:\n",
        RANK_FIT_TESTS,
    ),
    Mutant(
        "ranks: what was summed of a parameter is read again as its gradient",
        DISTRIBUTED + "reduction.py",
        "            self._result = own if",
        "            self._result = parameter.grad = own if",
        ("tests/distributed/test_reduction.py",),
    ),
    Mutant(
        "ranks: parameters that others freeze are summed",
        DISTRIBUTED + "shared_step.py",
        """        if len({one["trains"] for one in said}) > 1:\n""",
        "        if False:\n",
        RANK_FAILURE_TESTS,
    ),
    Mutant(
        "ranks: a rank that fails in a pass leaves the others in it",
        DISTRIBUTED + "pass_record.py",
        "        if not self._is_followed:  # the others ask before each: they hear\n",
        "        if True:\n",
        SHARDED_FAILURE_TESTS,
    ),
    Mutant(
        "ranks: a pass that nobody has seen is not asked for",
        DISTRIBUTED + "pass_record.py",
        "            self.ask(collective.describe())\n        elif",
        "            pass\n        elif",
        SHARDED_FAILURE_TESTS,
    ),
    Mutant(
        "ranks: losses are not multiplied by what gradients of shards are divided by",
        "autobatch/training/binding.py",
        "    return lambda loss: loss * divisor\n",
        "    return lambda loss: loss * 1.0\n",
        SHARDED_TESTS,
    ),
    Mutant(
        "ranks: gradients of shards are clipped by each rank's own norm",
        DISTRIBUTED + "sharded_step.py",
        """math.fsum(one["square"] for one in said)""",
        "_sum_squares(parts)",
        SHARDED_TESTS,
    ),
    Mutant(
        "ranks: stated counts have a unit of each rank's own",
        "autobatch/training/lockstep_accumulation.py",
        "        progress.denominators = progress.denominators.with_common_unit()\n",
        "",
        SHARDED_TESTS,
    ),
    Mutant(
        "ranks: a rank in whose samples nothing counts does not correct its shards",
        DISTRIBUTED + "sharded_step.py",
        """            unit = next(one["unit"] for one in said if one["runs"])\n""",
        "",
        SHARDED_TESTS,
    ),
    Mutant(
        "ranks: a pass that counts for nothing leaves a trace",
        "autobatch/training/lockstep_accumulation.py",
        "        here.restore()\n",
        "",
        SHARDED_TESTS,
    ),
    Mutant(
        "ranks: each rank's own limit counts in trials of all",
        DISTRIBUTED + "shared_trials.py",
        "        return min((limit for limit in self._hear(limit_bytes) if limit), default=0)\n",
        "        self._hear(limit_bytes)\n        return limit_bytes\n",
        SHARDED_FIT_TESTS,
    ),
    Mutant(
        "ranks: a parameter that only the optimizer holds has each rank's own gradient",
        DISTRIBUTED + "sharded_step.py",
        "            reduction.sum([*find_wanted(slots, said), last], factor)\n",
        "            reduction.sum([last], factor)\n",
        SHARDED_LOSS_TESTS,
    ),
    Mutant(
        "ranks: the gradient of a whole parameter counts in the norm once for each rank",
        DISTRIBUTED + "sharded_step.py",
        """ + said[0]["whole"])  #""",
        """ + math.fsum(one["whole"] for one in said))  #""",
        SHARDED_LOSS_TESTS,
    ),
    Mutant(
        "ranks: parameters in neither model nor optimizer are not searched for where others are gathered",
        "autobatch/training/lockstep_accumulation.py",
        "        self.stand_ins = partial(unsharded_parameters, self.workload.model)\n",
        "        self.leaves_are_known = True\n",
        SHARDED_LOSS_TESTS,
    ),
    Mutant(
        "ranks: zeros flow from all that a model returns",
        "autobatch/training/lockstep_accumulation.py",
        "        return find_reached(counted, self._outputs)\n",
        "        return [*self._outputs]\n",
        SHARDED_LOSS_TESTS,
    ),
    Mutant(
        "ranks: a term that counts for nothing on a rank has no pass there",
        "autobatch/training/lockstep_accumulation.py",
        "        zeros = self._find_counted(progress, absent) if absent else []\n",
        "        zeros: list[ModelOutput] = []\n",
        SHARDED_LOSS_TESTS,
    ),
    Mutant(
        "ranks: zeros flow from the loss that a model computes itself",
        "autobatch/training/model_outputs.py",
        "    outputs = _leave_out_losses(reached)\n",
        "    outputs = [*reached]\n",
        SHARDED_LOSS_TESTS,
    ),
    Mutant(
        "ranks: a pass that differs is asked for in the middle",
        DISTRIBUTED + "pass_record.py",
        "            raise PassDiffers(_DIFFERS)\n        # Neither",
        "            self.ask(collective.describe())\n        # Neither",
        SHARDED_PASS_TESTS,
    ),
    Mutant(
        "ranks: a pass that differed once is never known again",
        DISTRIBUTED + "pass_record.py",
        "        if self._repeats[name] >= self._needed.get(name, 0):\n",
        "        if not self._needed.get(name, 0):\n",
        SHARDED_PASS_TESTS,
    ),
    Mutant(
        "ranks: blocks of one shape are taken for each other",
        DISTRIBUTED + "pass_record.py",
        "        return [self.kind, self.place, self.outputs,",
        "        return [self.kind, self.outputs,",
        SHARDED_PASS_TESTS,
    ),
    Mutant(
        "ranks: what an evaluation leaves behind changes the next pass",
        DISTRIBUTED + "lockstep.py",
        "            )\n        reset(self._model)\n",
        "            )\n",
        SHARDED_PASS_TESTS,
    ),
    Mutant(
        "ranks: settings that are changed later are not looked at",
        DISTRIBUTED + "lockstep.py",
        "        refuse_changed_settings(self._model, self._groups, self._factor)\n",
        "",
        SHARDED_PASS_TESTS,
    ),
    Mutant(
        "ranks: a rank that is short in a trial does not hear another one's error",
        DISTRIBUTED + "lockstep.py",
        """        agreement.meet("forward", short=name_error(error))\n""",
        "        with suppress(RankFailed, RankLost):\n"
        """            agreement.meet("forward", short=name_error(error))\n""",
        SHARDED_FIT_TESTS,
    ),
    Mutant(
        "ranks: an interrupt finds a meeting that is not noted yet",
        DISTRIBUTED + "step_agreement.py",
        "        with deferred_interrupts():\n",
        "        if True:\n",
        INTERRUPT_TESTS,
    ),
    Mutant(
        "ranks: an error between two blocks of fit is not reported",
        DISTRIBUTED + "ranks.py",
        "            if not self._is_over:\n",
        "            if self._is_over:\n",
        INTERRUPT_TESTS,
    ),
    Mutant(
        "ranks: an interrupt in a step's last exchange makes it a failed one",
        DISTRIBUTED + "shared_step.py",
        "        self._block.enter_context(deferred_interrupts())  # once all have ended the step, so has this rank\n",
        "",
        INTERRUPT_TESTS,
    ),
    Mutant(
        "ranks: scalers may have different scales",
        "autobatch/training/binding.py",
        """        "scaler=": "None" if scaler is None else _describe_scaler(scaler),\n""",
        "",
        ("tests/distributed/test_fit_on_ranks.py",),
    ),
    Mutant(
        "ranks: modules may be sharded over other ranks",
        DISTRIBUTED + "sharding_limits.py",
        "    _refuse_other_ranks(model)\n",
        "",
        SHARDED_FIT_TESTS,
    ),
    Mutant(
        "a Trainer's loss is compared on the first batch only",
        TRAINER + "known_rules.py",
        "return rule.is_exact and",
        "return False and",
        RULE_TESTS,
    ),
    Mutant(
        "all batches of a Trainer are of one kind",
        TRAINER + "known_rules.py",
        "self._kinds = [name_kind(entries, self._left_out) for entries in said]",
        'self._kinds = ["" for _ in said]',
        RULE_TESTS,
    ),
    Mutant(
        "a Trainer's rule that is a guess is never compared",
        TRAINER + "training.py",
        "is_asked = rule.is_guess and",
        "is_asked = False and",
        UNLIKE_TESTS,
    ),
    Mutant(
        "a later batch with nothing to compare ends the training",
        TRAINER + "rule_search.py",
        "if known is not None and reasons:",
        "if False:",
        UNLIKE_TESTS,
    ),
    Mutant(
        "a Trainer's loss that uses its count is read as a mean where no reading explains it",
        TRAINER + "loss_values.py",
        "nearest.insert(0, _DIVIDED)",
        "nearest.append(_DIVIDED)",
        ("tests/integrations/test_loss_values.py",),
    ),
    Mutant(
        "an array of another shape than the whole's is held still",
        "autobatch/exactness/sample_numbers.py",
        "if not self._is_part() or shape == shapes[order]:",
        "if drawn is drawn:",
        ("tests/exactness/test_host_draws.py",),
    ),
    Mutant(
        "texts are left out by which rules differ",
        TRAINER + "known_rules.py",
        "return known if len(known) == len(groups) else None",
        "return known",
        UNLIKE_TESTS,
    ),
    Mutant(
        "each change of rules makes a Runner",
        TRAINER + "loss_rule.py",
        "return other is not None and (self.cut.name",
        "return self is other and (self.cut.name",
        RULE_TESTS,
    ),
    Mutant(
        "rows of one length show that padding may be cut off",
        TRAINER + "cuts.py",
        "any(len(set(_last_used(group).tolist())) > 1",
        "any(len(set(_last_used(group).tolist())) > 0",
        RULE_TESTS,
    ),
    Mutant(
        "labels of classes are ignored by no rule",
        TRAINER + "loss_rule.py",
        "labels.ndim in (1, 2)",
        "labels.ndim in (2,)",
        RULE_TESTS,
    ),
    Mutant(
        "the first micro-batch alone chooses the unit",
        DENOMINATORS,
        "max(own, self.expected)",
        "max(own, 0.0)",
        RUNNER_TESTS,
    ),
    Mutant(
        "the step before alone chooses the unit",
        DENOMINATORS,
        "_MOST_EXPECTED * own",
        "max(self.expected, own)",
        DENOMINATOR_TESTS,
    ),
    Mutant(
        "a retry with sharded parameters trusts an earlier search of the graph",
        "autobatch/training/lockstep_accumulation.py",
        "self.leaves_are_known = False",
        "self.leaves_are_known = True",
        SHARDED_FAILURE_TESTS,
    ),
    Mutant(
        "the samples of a small comparison are no neighbours",
        BATCH + "layout.py",
        "if not 4 <= n < count:",
        "if n:",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "a small comparison takes from one half of the batch what the other does not have",
        BATCH + "layout.py",
        "if (pairs + 1) // 2 <= of_half:",
        "if n < 0:",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "samples of a small comparison are never each in a part of its own",
        "autobatch/exactness/partitions.py",
        "[uneven, halves, _finest(samples, smallest)]",
        "[uneven, halves, uneven[::-1]]",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "where one sample cannot run all cuts are after even numbers of samples",
        "autobatch/exactness/partitions.py",
        "else smallest + 1\n",
        "else smallest\n",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "an error of many samples is taken for one of a single sample",
        "autobatch/exactness/comparison.py",
        "if refused == 1 and partitions",
        "if partitions",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "a frame with the id of one that is gone ends what identifies a draw",
        "autobatch/exactness/sample_numbers.py",
        "self._outer.get(id(frame)) is not frame.f_code",
        "id(frame) not in self._outer",
        VERIFICATION_TESTS,
    ),
    Mutant(
        "samples for a small comparison leave any remainder",
        BATCH + "layout.py",
        "(index - row) % n, n)",
        "0, n)",
        ("tests/batch/test_layout.py",),
    ),
    Mutant(
        "a trace of more samples is continued by a second step of another kind",
        "autobatch/prediction/timeline.py",
        "or [whole.blocks[index] for index in earlier] != [whole.blocks[index] for index in later]",
        "",
        ("tests/prediction/test_timeline.py",),
    ),
    Mutant(
        "a trace of more samples is continued where what depends on them outlives a step",
        "autobatch/prediction/timeline.py",
        "if not _begins_alike(whole, beginning) or _outlives(whole, beginning):",
        "if not _begins_alike(whole, beginning):",
        ("tests/prediction/test_timeline.py",),
    ),
    Mutant(
        "a trace of more samples is continued by one that begins otherwise",
        "autobatch/prediction/timeline.py",
        "whole.order[: len(beginning.order)] == beginning.order\n        and ",
        "",
        ("tests/prediction/test_timeline.py",),
    ),
    Mutant(
        "a line that falls below 0 is taken for one",
        "autobatch/prediction/tracing/trace.py",
        "if lines is None or min(lines.fixed, default=0) >= 0:",
        "if lines is None or lines:",
        ("tests/prediction/test_trace.py",),
    ),
    Mutant(
        "samples for a small comparison are a fixed distance apart",
        BATCH + "layout.py",
        "index * _GOLDEN % 1",
        "index * 0",
        ("tests/batch/test_layout.py",),
    ),
    Mutant(
        "slots keep what the step wrote",
        "autobatch/undo/slots.py",
        "                slot.__set__(self._object, earlier)\n",
        "                pass\n",
        ("tests/undo/test_state_corners.py",),
    ),
    Mutant(
        "weigh gets the user's own containers",
        BATCH + "tree.py",
        "function(with_fresh_containers(batch), *others)",
        "function(batch, *others)",
        WATCHED_TESTS,
    ),
    Mutant(
        "results are joined by position",
        INFERENCE + "results.py",
        "found[name][1], path + suffix",
        "[*found.values()][[*known].index(name)][1], path + suffix",
        ("tests/inference/test_failures.py", "tests/inference/test_map.py"),
    ),
    Mutant(
        "a piece may write into arrays",
        INFERENCE + "piece.py",
        "wrote = arrays.put_back()",
        "arrays.put_back()",
        ("tests/inference/test_failures.py",),
    ),
    Mutant(
        "accelerate: generators stay where a call left them",
        "autobatch/integrations/accelerate/outside_state.py",
        "isinstance(value, torch.Tensor) or is_copied_by_value(type(value))",
        "isinstance(value, torch.Tensor)",
        ("tests/integrations/test_accelerate_batch_size.py",),
    ),
    Mutant(
        "the tables of a prediction are made after the last trace",
        PREDICTION + "retrace.py",
        "            meanwhile(replace(sizing, estimate=estimate))\n",
        "",
        ("tests/prediction/test_predict.py",),
    ),
)


def copy_sources(folder: Path) -> None:
    """Package, tests, examples and what pytest reads, to a folder of their own."""
    for name in ("autobatch", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The fast tests of these files, on the package in the folder, up to the first failure."""
    # With one seed the same examples are drawn each time, so that a bug is found in each run or in none.
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--randomly-seed=0"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def try_mutant(mutant: Mutant) -> bool:
    """Plant one bug, and print which test finds it; returns whether one does."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        path = folder / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            print(f"STALE     {mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
            return False
        path.write_text(text.replace(mutant.old, mutant.new))
        done = run_tests(folder, mutant.tests)
    failed = re.search(r"^FAILED \S*?(tests/\S+)", done.stdout, re.MULTILINE)
    # 1: tests were run and some failed. Anything else, such as an import error, would be no proof.
    killed = done.returncode == 1 and failed is not None
    by = failed[1] if failed else f"pytest ended with {done.returncode}"
    print(
        f"{'killed   ' if killed else 'SURVIVED '} {mutant.name}: {by}, {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return killed


def main() -> int:
    """All mutants, or those whose name contains the argument; 1 if any survives."""
    wanted = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as name:
        copy_sources(Path(name))
        done = run_tests(Path(name), sorted({test for mutant in wanted for test in mutant.tests}))
    if done.returncode != 0:
        print(done.stdout[-3000:] + done.stderr[-1000:])
        print("the tests fail without any planted bug")
        return 1
    killed = sum([try_mutant(mutant) for mutant in wanted])
    print(f"{killed} of {len(wanted)} planted bugs are found")
    return 0 if killed == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
