"""Migrations of the control plane's database, run by Alembic."""
