"""Tasks as Spark queries. pyspark lives here and in `bus/spark_source.py`."""
