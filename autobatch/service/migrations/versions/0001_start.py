"""Begins with the tables of ``autobatch.service.tables``. A change of them adds the next file here."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: a new database gets all tables as they are now."""
