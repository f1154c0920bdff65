"""Expressions that Arrow computes, and values at which it could differ from Spark: for tests with and without
a JVM.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.streams.bus.log import ARROW_TYPES

COLUMNS = (
    ("s", "string"),
    ("t", "string"),
    ("i", "int"),
    ("n", "bigint"),
    ("d", "double"),
    ("e", "double"),
    ("b", "boolean"),
)
ROWS = (
    ("view", "view", 1, 1, 1.0, 2.5, True),
    ("ping", "Ping", -1, -1, -1.0, 0.1, False),
    ("", " ", 0, 0, 0.0, -0.0, None),
    (None, None, None, None, None, None, None),
    ("a", "B", 2**31 - 1, 2**53, 1e308, 1e308, True),
    ("Zz~", "zz~", -(2**31) + 1, -(2**53), 5e-324, -5e-324, False),
    ("it is", "a", 7, 1000, float("inf"), 1.5, True),
    ("10", "9", 10, 9, 0.30000000000000004, 0.3, None),
    (None, "x", 3, None, None, 1.0, True),
)
EXPRESSIONS = (
    *("s", "`t`", "i", "n", "d", "b", "'text'", "3", "3000000000", "-7", "true", "d", "(((n)))"),
    *(
        "s = t",
        "s <> 'ping'",
        "s < t",
        "s >= 'a'",
        "t <= s",
        "i = 1",
        "i > n",
        "n <= 9",
        "n = i",
        "d > 1",
        "d <= 1.5",
    ),
    *(
        "d = e",
        "d <> e",
        "d < e",
        "n > d",
        "i >= e",
        "d = 0",
        "e = 0",
        "d > 0.3",
        "1 = 1",
        "i > 2147483647",
        "n <> -1",
    ),
    *("b", "NOT b", "b AND s = 'view'", "b OR i > 1", "NOT (b AND n > 5) OR s IS NULL", "b AND NOT b"),
    *("s IS NULL", "s IS NOT NULL", "NOT (d IS NULL)", "isnull(n)", "isnotnull(b)"),
    *(
        "s IN ('view', 'a')",
        "s NOT IN ('view')",
        "i IN (1, 7, 3000000000)",
        "n NOT IN (9)",
        "n BETWEEN 1 AND 1000",
    ),
    *("s BETWEEN 'a' AND 'w'", "d NOT BETWEEN 0 AND 1.5", "i IN (1, n)"),
    *("i - 1", "n + i", "n * 2", "d * 2", "d + e", "d - e", "e * 1.5", "-e", "-d", "d * n"),
    *(
        "upper(s)",
        "lower(t)",
        "UCASE(t)",
        "lcase(s)",
        "length(s)",
        "char_length(t) > 1",
        "upper(lower(s)) = 'PING'",
    ),
    *("coalesce(s, t, 'none')", "nvl(d, e)", "ifnull(n, 0L)", "coalesce(b, false)"),
    *(
        "CAST(i AS bigint)",
        "CAST(n AS string)",
        "CAST(i AS double)",
        "CAST(b AS string)",
        "CAST(n AS double)",
        "CAST(s AS string)",
    ),
)
# Arrow has no form of these, or none that gives the same for every value.
SPARKS_OWN = (
    *(
        "trim(s)",
        "n % 2",
        "d / 2",
        "i div 2",
        "s LIKE 'a%'",
        "CAST(d AS string)",
        "CAST(s AS bigint)",
        "CAST(d AS bigint)",
    ),
    *(
        "n > 1.5",
        "i + 1.5",
        "s = 'it\\'s'",
        "s = 'é'",
        "CASE WHEN b THEN s END",
        "abs(i)",
        "concat(s, t)",
        "b = true",
    ),
    *("i + -2147483648", "substring(s, 1, 2)", "s <=> t", "round(d)", "n IS TRUE", "1.5", "i IN (1.5)"),
)


def batch(rows: tuple[tuple[object, ...], ...] = ROWS) -> pa.RecordBatch:
    """The values as columns."""
    arrays = [
        pa.array([row[place] for row in rows], ARROW_TYPES[kind]) for place, (_, kind) in enumerate(COLUMNS)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[name for name, _ in COLUMNS])
