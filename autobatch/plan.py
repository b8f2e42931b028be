"""Defines ``Plan``, which ``fit`` returns and ``Runner`` applies.

Loops of other frameworks take one fixed size and cannot run ragged micro-batches, so their settings have the largest
exact divisor of the share.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from autobatch._arguments import check_count, check_path
from autobatch._formatting import format_bytes, plural, show_value
from autobatch.errors import InvalidArgument
from autobatch.planning.division import divide_evenly
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import spell_invalid
from autobatch.report.breakdown import memory_parts
from autobatch.report.pictures import draw_peaks, part_chart, plan_peaks, plot
from autobatch.report.sections import Chart
from autobatch.report.text import explain_plan, summarise_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger("autobatch")

# Names of the target batch, the micro-batch size and the accumulation steps in each framework; None if the framework
# computes that from the others.
_SETTINGS: dict[str, tuple[str | None, str, str | None]] = {
    "huggingface": (None, "per_device_train_batch_size", "gradient_accumulation_steps"),
    "lightning": (None, "batch_size", "accumulate_grad_batches"),
    "accelerate": (None, "batch_size", "gradient_accumulation_steps"),
    "deepspeed": ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "torchtitan": ("global_batch_size", "local_batch_size", None),  # of [training], up to torchtitan 0.3
    "megatron": ("global_batch_size", "micro_batch_size", None),  # --global-batch-size, --micro-batch-size
}
_TORCHTITAN_TOKENS = ("num_tokens_per_train_step", "num_tokens_per_microbatch_per_dp_rank")
"""Names of its two sizes in torchtitan 0.4, which packs samples into rows of tokens."""
_LARGEST_FILE = 64 * 2**20  # four times what the most micro-batches take


class Plan(PlanRecord):
    """Division of one optimizer step that fits, and the measurements behind it; frozen, and compared by content.

    Example:
        >>> plan = autobatch.fit(model, target_batch=256)  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
        autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 18.7 of 21.6 GiB; 3 trials, 0 out of memory, 1.2 s
    """

    def __str__(self) -> str:
        """Return the plan in one line."""
        return summarise_plan(self)

    def __repr__(self) -> str:
        """Return the same line in a REPL."""
        return str(self)

    def explain(self) -> str:
        """Return the plan as text: trials, curve, use of memory, what would help, warnings."""
        return explain_plan(self)

    def plot(self, kind: str = "peak", ax: Axes | None = None) -> Axes:
        """Draw the plan with matplotlib, which ``torch-autobatch[plot]`` installs.

        Args:
            kind: ``"peak"`` for the memory curve with trials, budget and limit, ``"memory"`` for where the memory goes.
            ax: Axes to draw on; default: those of a new figure. A figure without a layout gets the constrained one, in
                which the legend has a place.

        Raises:
            InvalidArgument: The kind is unknown, ``ax`` is something else, or matplotlib is not installed.
        """
        charts = {"peak": Chart(partial(draw_peaks, plan_peaks(self))), "memory": part_chart(memory_parts(self))}
        return plot(charts, kind, ax)

    def _repr_html_(self) -> str:
        """Return the report's pictures and tables, for a notebook."""
        from autobatch.report.html import render_fragment  # noqa: PLC0415 - a tenth of the time of `autobatch plans`

        return render_fragment(self)

    def settings(self, framework: str, *, sequence_length: int | None = None) -> dict[str, int]:
        """Return the plan as settings of another framework; size x accumulation x world size is the target exactly.

        Args:
            framework: ``"huggingface"``, ``"lightning"``, ``"accelerate"``, ``"deepspeed"``, ``"torchtitan"`` (its
                section ``training``) or ``"megatron"``. The last two compute the accumulation steps from the ranks that
                share the data, which have to be as many as the plan's ranks.
            sequence_length: Tokens in one sample, for torchtitan 0.4 and later, which counts tokens:
                ``num_tokens_per_train_step`` and ``num_tokens_per_microbatch_per_dp_rank``. Without it the settings are
                those of torchtitan up to 0.3, ``global_batch_size`` and ``local_batch_size``, in samples.

        Raises:
            InvalidArgument: The framework is unknown or does not count tokens, or the ranks have unequal shares. Or a
                share cannot be divided into equal micro-batches that the model can run.
        """
        if not isinstance(framework, str) or framework not in _SETTINGS:
            known = ", ".join(map(repr, _SETTINGS))
            raise InvalidArgument(f"settings({show_value(framework)}): not known; one of {known}")
        tokens = 1 if sequence_length is None else check_count("sequence_length", sequence_length, "tokens")
        if sequence_length is not None and framework != "torchtitan":
            raise InvalidArgument(
                f"settings({framework!r}) are in samples: leave out sequence_length=, which is for 'torchtitan'"
            )
        if self.target_batch % self.world_size:
            raise InvalidArgument(
                f"settings({framework!r}): a target batch of {self.target_batch} cannot be shared equally by "
                f"{self.world_size} ranks; take a multiple of {self.world_size}"
            )
        if len(set(self.shares)) > 1:
            raise InvalidArgument(
                f"settings({show_value(framework)}): the ranks have different shares, {list(self.shares)}, and each "
                f"rank of such a framework runs the same number of samples; plan with share='equal'"
            )
        found = self.checkpointing
        for verb, blocks, how in (
            ("recomputes", found.recomputed if found else (), "checkpoint them"),
            ("offloads", found.offloaded if found else (), "run them under torch.autograd.graph.save_on_cpu()"),
        ):
            if blocks:
                _log.warning(
                    "the plan %s %s, and without that its size does not fit: %s in %s, too (%s)",
                    *(verb, plural(len(blocks), "block"), how, framework, ", ".join(blocks)),
                )
        if self.chunked_loss is not None:
            _log.warning(
                "the plan computes the loss of %s in chunks, and without that its size does not fit: use a cross "
                "entropy in chunks in %s, too, such as torch.nn.functional.linear_cross_entropy",
                *(self.chunked_loss.head, framework),
            )
        share, smallest = self.target_batch // self.world_size, self.smallest_micro_batch
        size, steps = divide_evenly(share, self.micro_batch_size)
        if size < smallest:
            raise InvalidArgument(
                f"settings({framework!r}): {share} samples have no divisor from {smallest} to {self.micro_batch_size}, "
                f"and the model cannot run micro-batches of fewer than {smallest}: take another target_batch, such as "
                f"{share + 1} a rank"
            )
        if sequence_length is not None:
            return dict(zip(_TORCHTITAN_TOKENS, (self.target_batch * tokens, size * tokens), strict=True))
        named = zip(_SETTINGS[framework], (self.target_batch, size, steps), strict=True)
        return {name: value for name, value in named if name is not None}

    def loader(
        self, dataset: Any, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> Any:
        """Make a DataLoader whose batches have the samples of one step of this rank.

        Args:
            dataset: A dataset. With several ranks it must be map-style: a ``ShareSampler`` gives each rank its share.
            shuffle: Whether each epoch has another order. An iterable dataset sets the order itself.
            seed: Seed of these orders with several ranks. On one rank pass ``generator=``.
            drop_last: Whether to leave out a last batch that is smaller than the target.
            **options: More arguments of ``DataLoader``, such as ``num_workers``, ``collate_fn``, or on one rank
                ``sampler`` in place of ``shuffle``.

        Raises:
            InvalidArgument: The plan sets an option itself, or the dataset has no samples or cannot be shared.
        """
        from autobatch.distributed.share_sampler import make_loader  # noqa: PLC0415 - plans are read without torch

        return make_loader(self, dataset, options, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Args:
            path: A file, or a link to one. It is replaced as a whole, so a reader never sees half a plan. A device such
                as ``/dev/null`` is written to.

        Raises:
            InvalidArgument: The argument is not a path.
            OSError: The file cannot be written; an earlier file stays.
        """
        content = self.model_dump_json(indent=2) + "\n"
        target = check_path("Plan.save", path).resolve()
        if target.exists() and not target.is_file():
            target.write_text(content, encoding="utf-8")
            return
        draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
        try:
            draft.write_text(content, encoding="utf-8")
            draft.replace(target)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None  # not the draft's
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that ``save`` wrote.

        Any plan that is returned can be printed, explained, shown, translated and saved.

        Raises:
            InvalidArgument: The argument is not a path, or the file is larger than 64 MiB or does not hold a plan that
                this version reads.
            OSError: The file cannot be read.
        """
        with check_path("Plan.load", path).open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise InvalidArgument(f"{path} is not a plan: it is larger than {format_bytes(_LARGEST_FILE)}")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise InvalidArgument(
                f"{path} is not a plan that this version reads ({spell_invalid(error)}); run fit() again and save it"
            ) from None
