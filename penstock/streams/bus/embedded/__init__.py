"""The bus on one machine's disk: Arrow segments and a SQLite index per category."""
