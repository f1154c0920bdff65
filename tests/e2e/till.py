"""Somebody outside who writes to `sales` and reads `shop_totals`, on request: a line of JSON in, a line out.

`python -m tests.e2e.till BUS`. It has opened the bus before it is asked for anything, as a program that goes on for
long has.
"""

from __future__ import annotations

import json
import sys

from penstock import Injector, open_log


def main(bus: str) -> None:
    log = open_log(bus)
    till = Injector(log, "sales", "till-1", epoch=1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "sell":
            sale = json.dumps({"shop": asked["shop"], "amount": asked["amount"], "ts": asked["ts"]})
            till.publish(keys=[asked["shop"]], stamps=[asked["ts"]], values=[sale.encode()])
            answer: object = "sold"
        else:
            ends = enumerate(log.end_offsets("shop_totals"))
            batches = [batch for n, end in ends for batch in log.read("shop_totals", n, 0, end)]
            answer = [row["total"] for batch in batches for row in batch.to_pylist()]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
