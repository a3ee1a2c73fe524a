"""What runs in the box while clients of others call it: a page, JSON, an event stream, a WebSocket and a git repository on one port.

Argument: port. Waits for nothing but requests. The repository is /work/repo.git, served by git's own `http-backend`.
"""

import base64
import hashlib
import http.server
import json
import os
import struct
import subprocess
import sys

PAGE = b"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>The app</title>
<link rel="icon" href="data:,">
<h1>The app</h1>
</html>
"""


class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == "/":
            self.answer("text/html; charset=utf-8", PAGE)
        elif path == "/api":
            seen = {"host": self.headers["Host"], "proto": self.headers["X-Forwarded-Proto"]}
            self.answer("application/json", json.dumps(seen).encode())
        elif path == "/events":
            self.events()
        elif path == "/ws":
            self.web_socket()
        elif path.startswith("/repo.git/"):
            self.git()
        else:
            self.answer("text/plain", b"nothing here\n", 404)

    def do_POST(self):
        if self.path == "/repo.git/git-upload-pack":
            return self.git()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer("text/plain", body)

    def answer(self, kind, body, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def events(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"data: an event\n\n")
        self.wfile.flush()
        # Open until the client goes.
        self.rfile.read(1)
        self.close_connection = True

    def web_socket(self):
        word = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(word.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        self.close_connection = True
        # One short message, masked as every client's is, goes back as it came; then the end.
        _, length = self.rfile.read(2)
        mask = self.rfile.read(4)
        masked = self.rfile.read(length & 0x7F)
        text = bytes(byte ^ mask[at % 4] for at, byte in enumerate(masked))
        self.wfile.write(struct.pack("!BB", 0x81, len(text)) + text + b"\x88\x00")
        self.wfile.flush()
        self.rfile.read(1)

    def git(self):
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": "/work",
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        made = subprocess.run(
            ["git", "http-backend"], input=body, env=environment, stdout=subprocess.PIPE, check=True
        ).stdout
        head, _, rest = made.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), App).serve_forever(poll_interval=None)
