"""The storm's join: every click beside what was asked within half a second before it, or alone."""

from penstock import Pipeline

p = Pipeline("pairs", partitions=6)
clicks = p.source("clicks").select("query", "click", "ts AS clicked").key_by("query", name="clicks_by_query")
asked = p.source("queries").select("query", "ts AS asked").key_by("query", name="asked_by_query")
clicks.join(asked, within=("500ms", "0ms"), how="left", name="paired").sink("query_clicks")
