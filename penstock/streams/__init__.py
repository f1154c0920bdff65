"""The data plane: pipelines, computations, the bus and the exactly-once step (MillWheel, on Spark)."""
