"""What users write: pipelines in Python and SQL, computations, windows, injectors."""
