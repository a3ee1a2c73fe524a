#!/usr/bin/env python3
"""Counts visits, in memory only: the number is lost when the process ends, and kept when the machine sleeps.

    python3 server.py 8000
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

lock = threading.Lock()
visits = 0


class Counter(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global visits
        with lock:
            visits += 1
            number = visits
        body = f"{number}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """One line a request on standard output would be the only thing that grows here."""


class Server(ThreadingHTTPServer):
    # Fifty requests at once are one of our tests; the default lets five wait.
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    # By default the standard library looks twice a second whether it shall stop: a timer that is always due soon, which
    # would keep the sandbox awake. Without it the server waits for nothing but requests.
    Server(("0.0.0.0", port), Counter).serve_forever(poll_interval=None)
