"""The control plane's database: SQLite or PostgreSQL through SQLAlchemy Core, migrations, shared tables."""
