"""How Alembic runs a step: inside the transaction it is given, so that all of it happens, or nothing."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
