"""What several benches use."""
