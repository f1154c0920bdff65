"""What jobs did, minute by minute: recorded, kept for 14 days, retrieved."""
