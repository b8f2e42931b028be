"""Makes, checks and revokes tokens: ``abt_`` and 32 random bytes, of which the database has only the hash."""

from __future__ import annotations

import hashlib
import secrets
import time
from enum import IntEnum

from sqlalchemy import select, update

from autobatch.errors import InvalidArgument
from autobatch.records import Record
from autobatch.service.database import Database
from autobatch.service.tables import TokenRow

PREFIX = "abt_"
_LONGEST_TOKEN = 100
_USE_NOTED_EVERY_S = 60.0


class Role(IntEnum):
    """Each role may do what the ones below it may."""

    reader = 1
    writer = 2
    admin = 3


class Token(Record):
    """A token without its text."""

    name: str
    role: str
    made_at: float
    used_at: float
    revoked_at: float
    hash: str

    @property
    def level(self) -> Role:
        return Role[self.role]


ANYONE = Token(name="anyone here", role="admin", made_at=0, used_at=0, revoked_at=0, hash="")
"""Whoever asks a server that was started with ``--open``."""


class Tokens:
    """The tokens in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, role: str) -> str:
        """Make a token and return its text, which nothing can show a second time."""
        text = PREFIX + secrets.token_urlsafe(32)
        row = {"hash": _hash(text), "name": name, "role": Role[role].name, "made_at": time.time()}
        if any(token.name == name and not token.revoked_at for token in self.list()):
            raise InvalidArgument(f"there is a token with the name {name!r}: revoke it first, or take another name")
        self._database.write(lambda c: c.execute(self._database.insert(TokenRow).values(row)).rowcount)
        return text

    def find(self, text: str) -> Token | None:
        """Return the valid token with this text."""
        if not text.startswith(PREFIX) or len(text) > _LONGEST_TOKEN:
            return None
        is_it = TokenRow.hash == _hash(text)
        with self._database.read() as connection:
            row = connection.execute(select(TokenRow.__table__).where(is_it)).mappings().first()
        if row is None or row["revoked_at"]:
            return None
        now = time.time()
        if now - row["used_at"] > _USE_NOTED_EVERY_S:
            self._database.write_later(lambda c: c.execute(update(TokenRow).where(is_it).values(used_at=now)))
        return Token.model_validate(dict(row))

    def list(self) -> list[Token]:
        with self._database.read() as connection:
            rows = connection.execute(select(TokenRow.__table__).order_by(TokenRow.made_at)).mappings()
            return [Token.model_validate(dict(row)) for row in rows]

    def revoke(self, name: str) -> None:
        is_it = (TokenRow.name == name) & (TokenRow.revoked_at == 0)
        revoked = update(TokenRow).where(is_it).values(revoked_at=time.time())
        if not self._database.write(lambda connection: connection.execute(revoked).rowcount):
            raise InvalidArgument(f"no valid token has the name {name!r}; autobatch serve token list shows them")


def _hash(text: str) -> str:
    """Hash a token. It has 256 random bits, so no salt and no slow hash are needed, and each request hashes one."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
