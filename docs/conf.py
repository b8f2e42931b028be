"""How Sphinx makes the site; ``make docs`` runs it.

Pages that are not written twice (CHANGELOG.md, CONTRIBUTING.md and the measurements) are read from their files. The
site loads nothing from a network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autobatch._version import __version__  # noqa: E402 - found only now

project = "autobatch"
author = "the authors of autobatch"
project_copyright = "the authors of autobatch, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
pygments_dark_style = "monokai"  # the default underlines what is imported, as if it led somewhere
html_title = f"autobatch {__version__}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute is documented once, in its class
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
add_module_names = False

# Where links of pages that also live outside this folder lead on the site.
_ELSEWHERE = {
    "../README.md": "index.md",
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "docs/": "",
}
# What a comment above a block tells the tests, as readers should see it.
_MARKS = {"not run": r"*Not run by the tests: \1.*\n", "shown": r"*\1*\n", "file": r"*\1*\n"}
_BORROWED = re.compile(r"^<!-- from (?P<file>[\w./]+) -->$", re.MULTILINE)


def _borrow(match: re.Match[str]) -> str:
    """Return the text of the file, with titles a level deeper, since the page has its own."""
    return re.sub(r"^#", "##", (ROOT / match["file"]).read_text(encoding="utf-8"), flags=re.MULTILINE)


def _read_page(app: Sphinx, name: str, content: list[str]) -> None:
    for match in _BORROWED.finditer(content[0]):  # else a page from an earlier build would stay as it was
        app.env.note_dependency(ROOT / match["file"], docname=name)
    text = _BORROWED.sub(_borrow, content[0])
    for mark, shown in _MARKS.items():
        text = re.sub(rf"^<!-- {mark}: (.+) -->$", shown, text, flags=re.MULTILINE)
    for there, here in _ELSEWHERE.items():
        text = text.replace(f"]({there}", f"]({here}")
    content[0] = text


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read_page)
