"""Alarms: when somebody is told of a trouble, what is checked, and how notices are delivered."""
