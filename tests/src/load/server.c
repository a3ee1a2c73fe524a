// A server in a guest that costs as little as it can: one thread, connections that stay open, and the request's path as the
// answer, so that whoever asks sees whether the answer is his. Argument: port. It waits for nothing but requests.
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CONNECTIONS_MAX = 4096, HEAD_MAX = 16384, EVENTS_MAX = 64 };

static struct {
    char head[HEAD_MAX];
    size_t length;
} connections[CONNECTIONS_MAX];

static void end(int fd) {
    close(fd);
    connections[fd].length = 0;
}

// Answers every request that has come whole. Requests without a body alone are understood.
static int answer(int fd) {
    char *head = connections[fd].head;
    char *last;
    while ((last = memmem(head, connections[fd].length, "\r\n\r\n", 4))) {
        char out[HEAD_MAX + 128];
        char *path = memchr(head, ' ', (size_t)(last - head));
        char *behind = path ? memchr(path + 1, ' ', (size_t)(last - path - 1)) : NULL;
        if (!behind) return -1;
        int length = (int)(behind - path - 1);
        int bytes = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%.*s",
                             length, length, path + 1);
        if (write(fd, out, (size_t)bytes) != bytes) return -1;
        size_t used = (size_t)(last + 4 - head);
        connections[fd].length -= used;
        memmove(head, head + used, connections[fd].length);
    }
    return 0;
}

int main(int count, char **words) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(count > 1 ? words[1] : "0"))};
    int yes = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), all = epoll_create1(EPOLL_CLOEXEC);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (listener < 0 || all < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1024)) {
        perror("server");
        return 1;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[EVENTS_MAX];
    epoll_ctl(all, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int ready = epoll_wait(all, events, EVENTS_MAX, -1);
        for (int n = 0; n < ready; n++) {
            int fd = events[n].data.fd;
            if (fd == listener) {
                int fresh = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
                if (fresh < 0) continue;
                setsockopt(fresh, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                struct epoll_event added = {.events = EPOLLIN, .data.fd = fresh};
                if (fresh >= CONNECTIONS_MAX || epoll_ctl(all, EPOLL_CTL_ADD, fresh, &added)) close(fresh);
                continue;
            }
            size_t room = HEAD_MAX - connections[fd].length;
            ssize_t got = read(fd, connections[fd].head + connections[fd].length, room);
            if (got <= 0) {
                end(fd);
                continue;
            }
            connections[fd].length += (size_t)got;
            if (answer(fd)) end(fd);
        }
    }
}
