"""Orders as they might come in, and the independent reference: what must be delivered of them."""

from __future__ import annotations

import json
from collections import Counter

from feeding import Feed

from penstock import Injector


class OrderGenerator(Feed):
    """Publishes orders with running numbers, and remembers which of them must arrive."""

    def __init__(self, injector: Injector, *, seed: int) -> None:
        super().__init__(injector, seed=seed)
        self._number = 0
        self.expected: Counter[tuple[int, str, float, bool]] = Counter()

    def make(self, ts: int) -> bytes:
        """An order."""
        self._number += 1
        number, pick = self._number, self._random.random()
        if pick < 0.0005:
            self.broken += 1
            return b'{"id": "not a number"}'
        customer, amount = f"customer {self._random.randrange(500)}", float(self._random.randrange(-50, 1000))
        country = "test" if pick > 0.95 else "de"
        if country != "test" and amount > 0:
            self.expected[number, customer, amount, amount >= 500] += 1
        written = self._random.choice((customer, customer.upper(), f" {customer}  "))
        return json.dumps(
            {"id": number, "customer": written, "country": country, "amount": amount, "ts": ts}
        ).encode()
