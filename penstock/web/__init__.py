"""HTTP: the API and who may call it."""
