"""Defines ``Plan``: what ``fit`` returns and ``Runner`` applies.

Covers what a user does with a plan: print, explain, save, load, translate. The data is ``planning.plan_record``, the
texts are ``report``.
"""

from __future__ import annotations

import os

from pydantic import ValidationError

from autobatch._arguments import check_path
from autobatch._formatting import format_bytes
from autobatch.errors import InvalidArgument
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.settings import settings_for
from autobatch.records import spell_invalid
from autobatch.report.text import explain_plan, summarise_plan

__all__ = ["Plan"]

_LARGEST_FILE = 64 * 2**20
"""Four times what the most micro-batches take."""


class Plan(PlanRecord):
    """How one optimizer step is divided so that it fits, and the measurements behind it; frozen, and equal by content.

    Example:
        >>> plan = autobatch.fit(model, target_batch=256)  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
        autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 18.7 of 21.6 GiB; 3 trials, 0 out of memory, 1.2 s
    """

    def __str__(self) -> str:
        """The plan in one line."""
        return summarise_plan(self)

    def explain(self) -> str:
        """All that is known as text: trials, curve, where the memory goes, what would help, warnings."""
        return explain_plan(self)

    def _repr_html_(self) -> str:
        """What a notebook shows for a plan: the report's pictures and tables."""
        from autobatch.report.html import render_fragment  # noqa: PLC0415 - a tenth of the time of `autobatch plans`

        return render_fragment(self)

    def settings(self, framework: str) -> dict[str, int]:
        """The same plan as settings of another framework, with an exact divisor of the target as the size.

        Args:
            framework: ``"huggingface"``, ``"lightning"``, ``"accelerate"`` or ``"deepspeed"``.

        Raises:
            InvalidArgument: The framework is not known, or the ranks cannot share the target equally.
        """
        return settings_for(self, framework)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Args:
            path: A file; it is replaced as a whole, so a reader never sees half a plan. Through a link its target is;
                what is no file, such as ``/dev/null``, is written to.

        Raises:
            InvalidArgument: It is no path.
            OSError: It cannot be written; the file that was there stays.
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
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that ``save`` wrote.

        Whatever the file holds, what comes back can be printed, explained, shown, translated and saved.

        Raises:
            InvalidArgument: It is no path, or the file holds no plan, or one of a version that this one cannot read, or
                more than 64 MiB.
            OSError: The file cannot be read.
        """
        with check_path("Plan.load", path).open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise InvalidArgument(f"{path} is no plan: it is larger than {format_bytes(_LARGEST_FILE)}")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise InvalidArgument(
                f"{path} is no plan that this version reads ({spell_invalid(error)}); run fit() again and save it"
            ) from None
