"""Looking at streams from outside: watermarks, kept state, records as lines."""
