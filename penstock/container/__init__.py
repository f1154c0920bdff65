"""A container: host, warden, engine, Task Manager and the runners of plain processes."""
