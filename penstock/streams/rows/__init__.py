"""Per-key state, timers, outbox and offsets of intervals."""
