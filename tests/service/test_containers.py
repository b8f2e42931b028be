"""The Dockerfile and compose file of examples/team, as far as they can be tried without Docker."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
import yaml

from autobatch.cli.main import app

ROOT = Path(__file__).parents[2]
TEAM = ROOT / "examples" / "team"
COMPOSE = yaml.safe_load((TEAM / "compose.yaml").read_text())["services"]
DOCKERFILE = (TEAM / "Dockerfile").read_text()

pytestmark = pytest.mark.quick


def accepts(words):
    """Whether the command line reads these words of autobatch and would run them."""
    return callable(typer.main.get_command(app).main(words, prog_name="autobatch", standalone_mode=False))


def test_the_dockerfile_names_files_that_are_there():
    """At most twenty lines; each file that it copies is in the context, each extra and option exists."""
    lines = DOCKERFILE.splitlines()
    assert len(lines) <= 20
    words = {line.split()[0] for line in lines if not line.startswith("#")}
    assert words <= {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "CMD"}
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
    [command] = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    program, *arguments = yaml.safe_load(command)
    assert program == "autobatch"
    assert accepts(arguments)
    assert "serve = [" in (ROOT / "pyproject.toml").read_text()
    assert "'.[serve]'" in DOCKERFILE


def test_the_compose_file_starts_what_is_there():
    """The service waits for a database that is healthy; its command and its URL are ones that autobatch takes."""
    service, database = COMPOSE["autobatch"], COMPOSE["database"]
    context = (TEAM / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).samefile(TEAM / "Dockerfile")
    assert service["depends_on"] == {"database": {"condition": "service_healthy"}}
    assert service["command"][0] == "autobatch"
    assert accepts(service["command"][1:])
    [port] = service["ports"]
    assert port.split(":")[1] in re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)
    names = database["environment"]
    url = service["environment"]["AUTOBATCH_DATABASE"]
    assert url == f"postgresql+psycopg://{names['POSTGRES_USER']}:{names['POSTGRES_PASSWORD']}@database/autobatch"
    assert names["POSTGRES_DB"] == "autobatch"
    assert database["healthcheck"]["test"][1:] == ["pg_isready", "-U", names["POSTGRES_USER"]]


def test_the_page_uses_them():
    """With the variables that they need, and commands that exist."""
    page = (ROOT / "docs" / "howto" / "team.md").read_text()
    block = page[page.index("$ cd examples/team") :].partition("```")[0]
    needed = set(re.findall(r"\$\{(\w+)", (TEAM / "compose.yaml").read_text()))
    assert needed == set(re.findall(r"([A-Z_]+)=", block))
    [inside] = re.findall(r"docker compose exec autobatch (autobatch .*)", block)
    assert accepts(shlex.split(inside)[1:])
