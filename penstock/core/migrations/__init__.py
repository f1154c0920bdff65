"""The steps from each version's tables to the next's, run by `migrate_store`."""
