"""Runs the migrations on the connection that the service has opened; Alembic imports this file."""

from alembic import context

from autobatch.service.tables import Base

if hasattr(context, "config"):  # only while Alembic migrates
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
