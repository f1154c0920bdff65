"""The Python client of the API."""

from __future__ import annotations

from penstock.client.client import Client, new_key

__all__ = ["Client", "new_key"]
