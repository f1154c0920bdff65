"""Orders: parsed, without tests and refunds, with one spelling of each customer."""

from __future__ import annotations

from penstock import Pipeline

p = Pipeline("clean", partitions=4)
(
    p.source("orders")
    .filter("country <> 'test' AND amount > 0")
    .select("id", "lower(trim(customer)) AS customer", "amount")
    .sink("clean_orders")
)
