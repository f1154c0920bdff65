"""Runs instead of the process that Spark starts for each query: has the planner host fork a warm one.

Started by its path with nothing but Python's own library (`python -I -S`): some 30 ms of processor time where
the imports of a cold one take 850. Without a host it becomes the cold one.

Arguments: the folder of the host's socket, the Python to fall back to, then what Spark had asked for.
"""

import array
import os
import socket
import sys

SOCKET = "planners.sock"


def main(folder: str, python: str, asked: list[str]) -> int:
    """Hand our streams and environment over; done when the host says that the planner is there."""
    here = os.getcwd()
    environment = b"\0".join(name + b"=" + value for name, value in os.environb.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
            os.chdir(folder)  # a socket's path may have some hundred characters, its name always fits
            host.connect(SOCKET)
            streams = array.array("i", [0, 1, 2])
            head = len(environment).to_bytes(8, "big")
            host.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
            host.sendall(environment)
            is_there = host.recv(1) == b"+"
    except OSError:
        is_there = False
    if not is_there:
        os.chdir(here)
        os.execv(python, [python, *asked])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
