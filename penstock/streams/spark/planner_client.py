"""Started by Spark for each query instead of a planner process: makes the planner host fork a warm one.

Started by path with only the standard library (`python -I -S`): 30 ms of CPU, where the imports of a cold
planner take 850 ms. Without a host it becomes a cold planner itself.

Arguments: the folder of the host's socket, the Python for a cold planner, then Spark's own arguments.
"""

import array
import os
import socket
import sys

SOCKET = "planners.sock"


def main(folder: str, python: str, arguments: list[str]) -> int:
    """Pass our streams and environment to the host; returns when it confirms that the planner runs."""
    here = os.getcwd()
    environment = b"\0".join(name + b"=" + value for name, value in os.environb.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
            os.chdir(
                folder
            )  # socket paths are limited to some hundred characters; the name alone always fits
            host.connect(SOCKET)
            streams = array.array("i", [0, 1, 2])
            head = len(environment).to_bytes(8, "big")
            host.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            host.sendall(environment)
            is_started = host.recv(1) == b"+"
    except OSError:
        is_started = False
    if not is_started:
        os.chdir(here)
        os.execv(python, [python, *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
