"""The package as it is shipped and imported: contents of the wheel, cost of an import, version."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import autobatch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autobatch"


def _modules_under(*patterns: str) -> list[str]:
    """The modules in these files and folders of the package, by their dotted names."""
    files = [file for pattern in patterns for file in sorted(PACKAGE.glob(pattern))]
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


# What decides, records and reports must work without torch.
TORCH_FREE = ["autobatch", *_modules_under("events/*.py", "planning/*.py", "report/*.py")]
TORCH_FREE += [f"autobatch.{name}" for name in ("errors", "records", "_version", "_arguments", "_formatting")]
TORCH_FREE += [
    f"autobatch.prediction.{name}"
    for name in (
        "allocator",
        "cards",
        "estimate",
        "prediction",
        "workspaces",
        "text",
        "timeline",
    )
]


def test_what_an_import_brings_along() -> None:
    """No torch where no tensor is needed, nothing of other frameworks; ``dir()`` has all public names at once."""
    lines = ["import sys, autobatch", "assert set(autobatch.__all__) <= set(dir(autobatch))"]
    lines += [f"import {module}; assert 'torch' not in sys.modules, '{module}'" for module in TORCH_FREE]
    others = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers")
    lines += ["import autobatch._wrappers", f"assert not {set(others)!r} & set(sys.modules)"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True, timeout=200)


def test_every_module_says_what_it_does() -> None:
    """Each module has a docstring; where it has an ``__all__``, every name of it is there."""
    for module in _modules_under("**/*.py"):
        loaded = importlib.import_module(module)
        assert loaded.__doc__, module
        missing = [name for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)]
        assert missing == [], module


def test_changelog_begins_with_the_version() -> None:
    """The newest entry of the changelog is about the version that is here."""
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == autobatch.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(PACKAGE, copy / "autobatch", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    program = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", program], cwd=copy, check=True, timeout=200, capture_output=True)
    (built,) = copy.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every file of the package is shipped, templates and ``py.typed`` too; the licence too, and no test."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    here = {file.relative_to(ROOT).as_posix() for file in files}
    metadata = {name for name in names if ".dist-info/" in name}
    assert set(names) - metadata == here
    assert {
        "autobatch/py.typed",
        "autobatch/prediction/cards.csv",
        "autobatch/report/templates/notebook.html",
        "autobatch/report/templates/style.css",
    } <= here
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    """It is called torch-autobatch, is of the version that is here, and asks for the five libraries it is built on."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = importlib.metadata.PathDistribution(zipfile.Path(archive, str(Path(path).parent) + "/")).metadata
    needs = {need for need in metadata.get_all("Requires-Dist") or [] if "extra ==" not in need}
    assert metadata["Name"] == "torch-autobatch"
    assert metadata["Version"] == autobatch.__version__
    assert {re.split(r"[<>=!~]", need)[0] for need in needs} == {
        "torch",
        "nvidia-ml-py",
        "rich",
        "typer",
        "pydantic",
        "platformdirs",
        "jinja2",
    }
