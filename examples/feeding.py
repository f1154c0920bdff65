"""Records that come in at a rate that can be changed while they come."""

from __future__ import annotations

import random
import threading
import time

from penstock import Injector

OUT_OF_ORDER_MS = 1000
SLICE_S = 0.2


class Feed:
    """Publishes records, out of order by up to a second, from a thread of its own."""

    def __init__(self, injector: Injector, *, seed: int) -> None:
        self._injector, self._random = injector, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self.rate = 0
        self.published = 0
        self.broken = 0  # records that cannot be read, on purpose
        self.error: BaseException | None = None

    def make(self, ts: int) -> bytes:
        """The next record; whoever makes it remembers what must come of it."""
        raise NotImplementedError

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
            values.append(self.make(ts))
        self._injector.publish(keys, stamps, values)
        self.published += count
        self._injector.report_low(now_ms - OUT_OF_ORDER_MS, now_ms=now_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
