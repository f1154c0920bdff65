"""The job doctor: rules from symptoms to causes and advice (StreamOps 5.3)."""
