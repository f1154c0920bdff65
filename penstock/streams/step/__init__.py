"""The exactly-once step: stateful and stateless, outbox, watermarks, state cache (MillWheel 6)."""
