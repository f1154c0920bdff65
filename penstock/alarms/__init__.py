"""Alarms: conditions that are checked, when notices are sent, and how they are delivered."""
