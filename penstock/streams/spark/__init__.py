"""Everything that needs Spark: the source, queries, tasks, Python workers, backfill."""
