"""Stores plans and runs as files, finds and deletes them; raises ``OSError`` if the disk fails.

    plans/FINGERPRINT/ID.json              the plan of rank 0, or of the only rank
    plans/FINGERPRINT/WHOLE.RANK.ID.json   the plan of another rank; WHOLE is the id of rank 0's plan
    runs/WHOLE/RUN.jsonl                   one run of that plan; each line has what is new since the line before

A plan is written to a draft and renamed; a line of a run is one write. So a killed process loses nothing that these
methods have returned from, and writers need no lock. A line that may not be in the file whole is written again under
its number, and the last one counts. A power cut may lose the last writes. A damaged file costs itself and one log line.
The newest plans of a fingerprint are kept, by count: each one's time of change is later than the others', even if the
clock has gone back.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run, join_lines
from autobatch.plan import Plan
from autobatch.records import spell_invalid

Written = Literal["written", "not now", "forgotten"]
"""``"forgotten"`` if the plan was deleted with its runs, ``"not now"`` if a later attempt may succeed."""

_PLAN_FILE = re.compile(r"(?:([\w-]+)\.(\d+)\.)?([\w-]+)\.json")
_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1|\S*[/\\]\S*""")
_MOST_PLANS = 2000  # of one fingerprint: each start of a script adds one of some 3 kB
_MOST_READ = 200  # of them, by a start of a script: older ones would cost it time


_Found = TypeVar("_Found", bound=BaseModel)

logger = logging.getLogger("autobatch")
_warned: set[str] = set()


class _Device(BaseModel):
    name: str


class PlanHead(BaseModel):
    """The fields by which plans are listed: reading a whole plan takes ten times as long."""

    id: str
    model: str = ""
    confirms: str = ""
    device: _Device


class _PlanFile(NamedTuple):
    """A stored plan that is not read yet."""

    path: str
    order: int  # time of change, in nanoseconds; the largest is the newest
    whole: str  # id of rank 0's plan
    rank: int
    id: str


class Store:
    """The plans and runs in one folder, which need not exist."""

    def __init__(self, home: Path) -> None:
        self._home, self._plans, self._runs = home, home / "plans", home / "runs"

    def check_writable(self) -> None:
        self._make_folder(self._plans)
        with TemporaryFile(dir=self._plans) as file:
            file.write(b" ")

    def add_plan(self, plan: Plan) -> bool:
        """Store a plan as the newest of its fingerprint, and delete those that are too many.

        A plan without an id gets one that follows from its content, and one without a date gets today's.
        """
        plan = plan.model_copy(update={"id": plan_id(plan), "made_at": plan.made_at or time.time()})
        path = self.path_of(plan)
        folder = path.parent
        self._make_folder(folder)
        plan.save(path)
        files = _list_folder(folder)
        order = max(time.time_ns(), *(file.order + 1000 for file in files))
        os.utime(path, ns=(order, order))
        newest_first = dict.fromkeys([runs_id(plan), *(file.whole for file in files)])
        self._delete(files, set(islice(newest_first, _MOST_PLANS, None)))
        return True

    def path_of(self, plan: Plan) -> Path:
        name = f"{runs_id(plan)}.{plan.rank}.{plan_id(plan)}" if plan.rank else plan_id(plan)
        return self._plans / _file_name(plan.fingerprint) / f"{name}.json"

    def begin_run(self, plan: Plan) -> bool:
        self.add_plan(plan)
        self._make_folder(self._runs / runs_id(plan))
        return True

    def update_run(self, new: Run) -> Written:
        line = new.model_dump_json(exclude_defaults=True).encode() + b"\n"
        try:
            with (self._runs / new.plan_id / f"{new.id}.jsonl").open("ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):
                    file.truncate(end)  # else the next line would be damaged too
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except FileNotFoundError:
            return "forgotten"
        return "written"

    def plans(self, model: str | None = None, device: str | None = None, limit: int | None = None) -> list[Plan]:
        """Return rank 0's plans with these texts in the names of model and device, the last stored first."""
        wanted = (path for path, _ in self.heads(model, device))
        return list(islice(read_plans(wanted), limit))

    def heads(self, model: str | None = None, device: str | None = None) -> Iterator[tuple[str, PlanHead]]:
        """Yield the file and the head of each of these plans."""
        for path, head in _read((file.path for file in self._list_plans() if not file.rank), PlanHead):
            if (model or "").lower() in head.model.lower() and (device or "").lower() in head.device.name.lower():
                yield path, head

    def plans_like(self, fingerprint: str, rank: int = 0) -> list[Plan]:
        """Return a rank's newest plans of a fingerprint, the newest first; none for an empty fingerprint."""
        files = [file.path for file in _list_folder(self._plans / _file_name(fingerprint)) if file.rank == rank]
        return [plan for plan in read_plans(files[:_MOST_READ]) if plan.fingerprint == fingerprint != ""]

    def find_plan(self, id_or_prefix: str) -> Plan:
        """Return the plan of this id, or the only one whose id begins so; ``InvalidArgument`` if there is none."""
        return Plan.load(self._find_file(id_or_prefix, self._list_plans()).path)

    def runs_of(self, plan_id: str) -> list[Run]:
        """Return the runs of rank 0's plan of this id, the newest first, without those that cannot be read."""
        files = [Path(entry.path) for entry in _scan(self._runs / plan_id) if entry.name.endswith(".jsonl")]
        runs = [run for file in files if (run := join_lines(_read_lines(file))) is not None]
        return sorted(runs, key=lambda run: run.started_at, reverse=True)

    def forget(
        self, ids: Iterable[str] | None = None, *, older_than_seconds: float | None = None, everything: bool = False
    ) -> int:
        """Delete plans of all ranks with their runs, and return how many.

        Args:
            ids: Ids or their beginnings; if one of them names no plan, nothing is deleted.
            older_than_seconds: Deletes what was stored, or used by a run, before that.
            everything: Deletes all.
        """
        files = self._list_plans()
        if ids is not None:
            wholes = {self._find_file(wanted, files).whole for wanted in ids}
        else:
            before = time.time_ns() - (older_than_seconds or 0) * 1e9
            wholes = {file.whole for file in files if everything or file.order < before}
        self._delete(files, wholes)
        return len(wholes)

    def _make_folder(self, folder: Path) -> None:
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)  # nobody else may look in
        folder.mkdir(parents=True, exist_ok=True)

    def _list_plans(self) -> list[_PlanFile]:
        folders = [entry for entry in _scan(self._plans) if entry.is_dir()]
        files = [file for folder in folders for file in _list_folder(folder)]
        return sorted(files, key=lambda file: file.order, reverse=True)

    def _find_file(self, wanted: str, files: list[_PlanFile]) -> _PlanFile:
        found = [file for file in files if wanted and file.id.startswith(wanted)]
        exact = [file for file in found if file.id == wanted]
        if exact or len(found) == 1:
            return (exact or found)[0]
        if found:
            names = ", ".join(file.id for file in found[:3]) + (", ..." if len(found) > 3 else "")
            raise InvalidArgument(f"several plans begin with {wanted!r}: {names}; give more of the id")
        names = ", ".join(file.id for file in files[:3])
        known = f"the newest are {names}" if names else "no plan is stored yet: run fit()"
        raise InvalidArgument(f"no plan has the id {wanted!r}; {known}")

    def _delete(self, files: Iterable[_PlanFile], wholes: set[str]) -> None:
        for file in files:
            if file.whole in wholes:
                Path(file.path).unlink(missing_ok=True)
        for whole in wholes:
            shutil.rmtree(self._runs / whole, ignore_errors=True)


def runs_id(plan: Plan) -> str:
    return _file_name(plan.whole_id) if plan.whole_id else plan_id(plan)


def plan_id(plan: Plan) -> str:
    return _file_name(plan.id or plan.model_dump_json())


def _file_name(text: str) -> str:
    """Return a text that may be a file's name; another one is replaced by its hash."""
    is_name = re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text)
    return text if is_name else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _list_folder(folder: os.PathLike[str]) -> list[_PlanFile]:
    files = []
    for entry in _scan(folder):
        match = _PLAN_FILE.fullmatch(entry.name)
        with suppress(FileNotFoundError):  # another process has just deleted it
            if match is not None:
                whole, rank, name = match.groups()
                files.append(_PlanFile(entry.path, entry.stat().st_mtime_ns, whole or name, int(rank or 0), name))
    return sorted(files, key=lambda file: file.order, reverse=True)


def _scan(folder: os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def hide_paths(text: str) -> str:
    """Return a text with each path, in quotes or between spaces, replaced."""
    return _PATH.sub("<path>", text)


def warn_once(cause: str, message: str) -> None:
    if cause not in _warned:
        _warned.add(cause)
        logger.warning("%s", message)


def read_plans(paths: Iterable[str]) -> Iterator[Plan]:
    return (plan for _, plan in _read(paths, Plan))


def _read(paths: Iterable[str], kind: type[_Found]) -> Iterator[tuple[str, _Found]]:
    for path in paths:
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path costs as much as the reading
                content = file.read()
            yield path, kind.model_validate_json(content)
        except (OSError, ValidationError) as error:
            reason = spell_invalid(error) if isinstance(error, ValidationError) else error.strerror
            warn_once("plan", f"{path} is not one that this version reads ({reason}): such files are left out")


def _read_lines(path: Path) -> Iterator[Run]:
    """Yield the parts of a run; a damaged line is left out."""
    lines: list[bytes] = []
    with suppress(FileNotFoundError):  # another process has just deleted it
        lines = path.read_bytes().splitlines()
    for line in lines:
        try:
            yield Run.model_validate_json(line)
        except ValidationError as error:
            what = f"{path} has a line that this version does not read ({spell_invalid(error)}): it is left out"
            warn_once("run", what)
