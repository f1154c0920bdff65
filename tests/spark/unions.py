"""Two sources, taken apart into words, put together, and counted per language."""

from __future__ import annotations

from penstock import Computation, Context, Pipeline, Record, Value


class CountPerKey(Computation):
    """How many records of a key there were so far."""

    outputs = {"out": {"key": "string", "count": "bigint"}}
    late = "process"
    seen = Value(int)

    def process_record(self, record: Record, ctx: Context) -> None:
        """Count, and tell."""
        ctx.state.seen = (ctx.state.seen or 0) + 1
        ctx.produce({"key": ctx.key, "count": ctx.state.seen})


p = Pipeline("unions", partitions=3)
queries = p.source("queries").select("query AS text", "lang", "ts", "tags")
notes = (
    p.source("notes").filter("body IS NOT NULL").select("body AS text", "lang", "at AS ts", "labels AS tags")
)
both = queries.union(notes)
words = both.flat_map("posexplode(split(lower(text), ' ')) AS (place, word)").filter("word <> ''")
words.key_by("word").select("place", "ts", "tags").sink("words")
both.key_by("lang").process(CountPerKey).sink("langs")
# A source next to itself: each record comes twice, changed the second time.
queries.select("text").union(queries.select("upper(text) AS text").filter("text IS NOT NULL")).sink("twice")
