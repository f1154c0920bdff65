"""The HTTP API: server workers, what routes use, and who may call them."""
