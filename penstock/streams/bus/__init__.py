"""The message bus that stands for Scribe: categories of partitions."""
