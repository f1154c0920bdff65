"""Windows, aggregates and joins over Arrow tables: per group, never per record in Python."""
