#!/usr/bin/env python3
"""Holds the sandbox awake while a command runs.

    python3 hold.py make test

A hold ends with its connection, however the program ends. `AWAKE_SOCKET` names another socket.
"""

import os
import socket
import subprocess
import sys
import threading


class Awake:
    """with Awake(): ... holds the sandbox awake. What it is sent before a sleep goes to `on_sleep(ms, cap)`."""

    def __init__(self, on_sleep=None):
        self.on_sleep = on_sleep

    def __enter__(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ.get("AWAKE_SOCKET", "/run/sbx/awake"))
        self.lines = self.socket.makefile("r")
        self.socket.sendall(b"+")
        line = self.lines.readline()  # `held 1 1`: from here on it counts
        if not line.startswith("held "):  # `error <why>`
            raise OSError(line.strip() or "the awake socket ended")
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def listen(self):
        for line in self.lines:
            word, *rest = line.split()
            if word == "sleep" and self.on_sleep:
                self.on_sleep(int(rest[0]), "cap" in rest)

    def __exit__(self, *_):
        self.socket.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: hold.py COMMAND [ARGUMENT…]")
    told = lambda ms, cap: print(f"sleeps in {ms} ms" + (" whatever is held" if cap else ""), file=sys.stderr)
    try:
        with Awake(told):
            sys.exit(subprocess.run(sys.argv[1:]).returncode)
    except OSError as error:
        sys.exit(f"hold.py: {error}")
