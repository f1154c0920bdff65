"""Search queries as they might come in: out of order by up to a second, in several spellings, some from
robots, a few broken.

Also the independent reference: what must come out of the pipeline for what went in, computed with a plain
loop.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter

from penstock.streams.injector import Injector

POPULAR = (
    "cat videos",
    "weather",
    "news",
    "spark",
    "football",
    "recipes",
    "train times",
    "television listings",
)
OUT_OF_ORDER_MS = 1000
SLICE_S = 0.2


class QueryGenerator:
    """Publishes queries at a rate that can be changed while it runs, and remembers every one of them."""

    def __init__(self, injector: Injector, *, seed: int) -> None:
        self._injector, self._random = injector, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self.rate = 0
        self.published = 0
        self.broken = 0
        self.expected: Counter[tuple[str, int]] = Counter()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """Stop, and promise that nothing more comes."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        self._injector.close(now_ms=_now_ms())

    def _run(self) -> None:
        owed, last = 0.0, time.monotonic()
        try:
            while not self._stop.wait(SLICE_S):
                now = time.monotonic()
                owed += self.rate * (now - last)
                last = now
                count, owed = int(owed), owed - int(owed)
                if count:
                    self._publish(count)
        except BaseException as error:
            self.error = error
            raise

    def _publish(self, count: int) -> None:
        now_ms = _now_ms()
        keys, stamps, values = [], [], []
        for _ in range(count):
            ts = now_ms - self._random.randrange(OUT_OF_ORDER_MS)
            keys.append(str(self._random.randrange(10**9)))
            stamps.append(ts)
            values.append(self._query(ts))
        self._injector.publish(keys, stamps, values)
        self.published += count
        self._injector.report_low(now_ms - OUT_OF_ORDER_MS, now_ms=now_ms)

    def _query(self, ts: int) -> bytes:
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


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
