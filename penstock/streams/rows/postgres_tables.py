"""The tables of rows on PostgreSQL: one schema for all intervals, each a number in its rows.

Keys and tags are bytes (UTF-8): any text may be one, and bytes sort as text does in Python.
"""

from __future__ import annotations

# Rises when the tables change: another format is refused, never guessed at.
FORMAT = 1

SCHEMA = "penstock_rows"
PLACE = f"{SCHEMA}.place"
INTERVALS, STATES = f"{SCHEMA}.intervals", f"{SCHEMA}.states"
TIMERS, OUTBOX = f"{SCHEMA}.timers", f"{SCHEMA}.outbox"

# Rows that every step writes find room on their own page, so that no index changes with them.
TABLES = (
    f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}",
    f"CREATE TABLE {PLACE} (format INTEGER NOT NULL, identity TEXT NOT NULL)",
    f"""CREATE TABLE {INTERVALS} (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_birth TEXT NOT NULL,
        partition BIGINT NOT NULL, birth TEXT NOT NULL, generation BIGINT NOT NULL,
        shard_epoch BIGINT NOT NULL, token BIGINT NOT NULL, version BIGINT NOT NULL, offsets TEXT NOT NULL,
        input_low BIGINT NOT NULL, output_low BIGINT NOT NULL, event_time_max TEXT NOT NULL,
        next_seq TEXT NOT NULL, intent TEXT NOT NULL, counters TEXT NOT NULL, crc BIGINT NOT NULL,
        UNIQUE (job_birth, partition, birth)) WITH (fillfactor = 40)""",
    f"""CREATE TABLE {STATES} (
        interval BIGINT NOT NULL, key BYTEA NOT NULL, value BYTEA NOT NULL, crc BIGINT NOT NULL,
        PRIMARY KEY (interval, key)) WITH (fillfactor = 70)""",
    f"""CREATE TABLE {TIMERS} (
        interval BIGINT NOT NULL, key BYTEA NOT NULL, tag BYTEA NOT NULL, at_ms BIGINT NOT NULL,
        hold_ms BIGINT NOT NULL, late BIGINT NOT NULL, wall BIGINT NOT NULL, crc BIGINT NOT NULL,
        PRIMARY KEY (interval, key, tag))""",
    f"CREATE INDEX timers_due ON {TIMERS} (interval, at_ms, key, tag) WHERE wall = 0",
    f"CREATE INDEX timers_wall ON {TIMERS} (interval, at_ms, key, tag) WHERE wall = 1",
    f"CREATE INDEX timers_hold ON {TIMERS} (interval, hold_ms) WHERE late = 0 AND wall = 0",
    # One counter for all intervals: an id that came twice would let a slow twin mark the wrong row as
    # delivered. A row's lock keeps the ids of one interval in order.
    f"""CREATE TABLE {OUTBOX} (
        interval BIGINT NOT NULL, id BIGINT GENERATED ALWAYS AS IDENTITY, category TEXT NOT NULL,
        category_birth TEXT NOT NULL, partition BIGINT NOT NULL, first_seq BIGINT NOT NULL,
        count BIGINT NOT NULL, ts_min BIGINT NOT NULL, payload BYTEA NOT NULL, crc BIGINT NOT NULL,
        PRIMARY KEY (interval, id))""",
)

_ROW = (
    "birth, generation, shard_epoch, token, version, offsets, input_low, output_low, event_time_max, "
    "next_seq, intent, counters, crc"
)
_WHICH = "job_birth = %s AND partition = %s AND birth = %s"
_ID = f"(SELECT id FROM {INTERVALS} WHERE {_WHICH})"

READ_ROW = f"SELECT id, {_ROW} FROM {INTERVALS} WHERE {_WHICH}"
# A plain SELECT would let a zombie commit: its successor's write would come between the look and the write.
LOCK_ROW = f"{READ_ROW} FOR UPDATE"
NEW_ROW = (
    f"INSERT INTO {INTERVALS} (job_birth, partition, {_ROW}) "
    "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) "
    "ON CONFLICT (job_birth, partition, birth) DO NOTHING RETURNING id"
)
WRITE_ROW = (
    f"UPDATE {INTERVALS} SET birth = %s, generation = %s, shard_epoch = %s, token = %s, version = %s, "
    "offsets = %s, input_low = %s, output_low = %s, event_time_max = %s, next_seq = %s, intent = %s, "
    "counters = %s, crc = %s WHERE id = %s"
)

_DUE = f"FROM {TIMERS} WHERE interval = {_ID} AND wall = {{wall}} AND at_ms <= %s"
READ_TIMERS = tuple(
    f"SELECT key, tag, at_ms, hold_ms, late, wall, crc {_DUE.format(wall=wall)} ORDER BY at_ms, key, tag"
    for wall in (0, 1)
)
READ_STATES_OF_TIMERS = tuple(
    f"SELECT key, value, crc FROM (SELECT DISTINCT interval, key {_DUE.format(wall=wall)}) AS due "
    f"JOIN {STATES} USING (interval, key)"
    for wall in (0, 1)
)
READ_STATES = f"SELECT key, value, crc FROM {STATES} WHERE interval = {_ID} AND key = ANY(%b::bytea[])"
READ_OUTBOX = (
    "SELECT id, category, category_birth, partition, first_seq, count, ts_min, payload, crc "
    f"FROM {OUTBOX} WHERE interval = {_ID} ORDER BY id"
)

# No more of the values than a page may have, however many rows were asked for; the first one always.
SCAN_STATES = (
    "SELECT key, value, crc FROM (SELECT key, value, crc, octet_length(value) AS size, "
    "sum(octet_length(value)) OVER (ORDER BY key) AS total FROM "
    f"(SELECT key, value, crc FROM {STATES} WHERE interval = {_ID} AND key >= %b ORDER BY key LIMIT %s) "
    "AS page) AS counted WHERE total - size < %s ORDER BY key"
)
SCAN_TIMERS = (
    f"SELECT key, tag, at_ms, hold_ms, late, wall, crc FROM {TIMERS} WHERE interval = {_ID} "
    "AND (key, tag) >= (%b, %b) ORDER BY key, tag LIMIT %s"
)

_SIZE = "count(*), coalesce(sum(octet_length(key) + octet_length(value)), 0)::int8"
SIZE_STATES = f"SELECT {_SIZE} FROM {STATES} WHERE interval = %s AND key = ANY(%b::bytea[])"
# All of them, page by page; rows about ids of records left out.
PAGE_END = f"SELECT key FROM {STATES} WHERE interval = %s AND key >= %b ORDER BY key OFFSET %s LIMIT 1"
COUNT_PAGE = (
    f"SELECT {_SIZE} FROM {STATES} WHERE interval = %s AND key >= %b AND (%b::bytea IS NULL OR key < %b) "
    "AND (key < %b OR key >= %b)"
)

WRITE_STATES = (
    f"INSERT INTO {STATES} (interval, key, value, crc) "
    "SELECT %s, new.* FROM unnest(%b::bytea[], %b::bytea[], %b::int8[]) AS new "
    "ON CONFLICT (interval, key) DO UPDATE SET value = excluded.value, crc = excluded.crc"
)
DELETE_STATES = f"DELETE FROM {STATES} WHERE interval = %s AND key = ANY(%b::bytea[])"
# A timer set again as it was costs no write.
WRITE_TIMERS = (
    f"INSERT INTO {TIMERS} AS old (interval, key, tag, at_ms, hold_ms, late, wall, crc) "
    "SELECT %s, new.* FROM unnest(%b::bytea[], %b::bytea[], %b::int8[], %b::int8[], %b::int8[], %b::int8[], "
    "%b::int8[]) AS new ON CONFLICT (interval, key, tag) DO UPDATE "
    "SET at_ms = excluded.at_ms, hold_ms = excluded.hold_ms, late = excluded.late, wall = excluded.wall, "
    "crc = excluded.crc WHERE (old.at_ms, old.hold_ms, old.late, old.wall) <> "
    "(excluded.at_ms, excluded.hold_ms, excluded.late, excluded.wall)"
)
DELETE_TIMERS = (
    f"DELETE FROM {TIMERS} AS old USING unnest(%b::bytea[], %b::bytea[]) AS gone (key, tag) "
    "WHERE old.interval = %s AND old.key = gone.key AND old.tag = gone.tag"
)
WRITE_OUTBOX = (
    f"INSERT INTO {OUTBOX} (interval, category, category_birth, partition, first_seq, count, ts_min, "
    "payload, crc) VALUES (%s, %s, %s, %s, %s, %s, %s, %b, %s)"
)
DELETE_OUTBOX = f"DELETE FROM {OUTBOX} WHERE interval = %s AND id = ANY(%b::int8[])"
OLDEST_WORK = (
    f"SELECT (SELECT min(hold_ms) FROM {TIMERS} WHERE interval = %s AND late = 0 AND wall = 0), "
    f"(SELECT min(ts_min) FROM {OUTBOX} WHERE interval = %s)"
)
