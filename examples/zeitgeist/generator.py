"""Search queries as they might come in: out of order by up to a second, in several spellings, some from
robots, a few broken.

Also the independent reference: what must come out of the pipeline for what went in, computed with a plain
loop.
"""

from __future__ import annotations

import json
from collections import Counter

from feeding import Feed

from penstock import Injector

# Two of each partition: with one task twice as busy as the others, three tasks would not carry the load.
POPULAR = (
    "cat videos",
    "coffee",
    "flights",
    "football",
    "maps",
    "news",
    "poems",
    "recipes",
    "spark",
    "television listings",
    "train times",
    "weather",
)


class QueryGenerator(Feed):
    """Publishes queries, and remembers every one of them."""

    def __init__(self, injector: Injector, *, seed: int) -> None:
        super().__init__(injector, seed=seed)
        self.expected: Counter[tuple[str, int]] = Counter()

    def make(self, ts: int) -> bytes:
        """A query."""
        pick = self._random.random()
        if pick < 0.0005:
            self.broken += 1
            return b'{"query": "cut off in the mid'
        query = self._random.choice(POPULAR) if pick < 0.7 else f"rare {self._random.randrange(2000)}"
        lang = "robot" if pick > 0.97 else "en"
        if lang != "robot":
            self.expected[query, ts // 1000] += 1
        written = self._random.choice((query, query.upper(), f"  {query} "))
        return json.dumps({"query": written, "lang": lang, "ts": ts}).encode()
