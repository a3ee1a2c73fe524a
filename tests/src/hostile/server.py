# A server in a guest that writes down what arrives, byte by byte. `GET /log` gives all requests since the last time, as a list of
# texts (Latin-1, so that each byte is a character), and is not in it. Framing is read as simply as can be: what was smuggled
# past whoever stands before it would be a request of its own here.
import json, socket, sys, threading

log, lock = [], threading.Lock()

def serve(c):
    rest = b""
    while True:
        while b"\r\n\r\n" not in rest:
            more = c.recv(65536)
            if not more:
                if rest:
                    with lock: log.append("CUT " + rest.decode("latin-1"))
                return c.close()
            rest += more
        head, rest = rest.split(b"\r\n\r\n", 1)
        fields = {}
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip()
        body = b""
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            while not body.endswith(b"0\r\n\r\n"):
                if not rest: rest = c.recv(65536)
                if not rest: break
                body, rest = body + rest[:1], rest[1:]
        else:
            length = int(fields.get(b"content-length", b"0"))
            while len(rest) < length:
                more = c.recv(65536)
                if not more: break
                rest += more
            body, rest = rest[:length], rest[length:]
        request = (head + b"\r\n\r\n" + body).decode("latin-1")
        with lock:
            if head.startswith(b"GET /log "):
                answer, log[:] = json.dumps(log).encode(), []
            else:
                log.append(request)
                answer = b"guest"
        c.sendall(b"HTTP/1.1 200 OK\r\nX-Guest: yes\r\nContent-Length: %d\r\n\r\n" % len(answer))
        if not head.startswith(b"HEAD "): c.sendall(answer)

s = socket.create_server(("0.0.0.0", int(sys.argv[1])), backlog=128)
while True:
    threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
