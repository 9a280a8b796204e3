/* What null servers have in common: they listen, and one thread per connection takes request by request. The server's own are `take` and `serve`. */
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>

#include "null_http.h"

/* A piece of the body, which begins at `at`. */
static void take(struct request *request, uint64_t at, const char *data, size_t size);

/* Answers the request, whose body was taken; false ends the connection. */
static bool serve(int peer, struct request *request, const char *head);

/* DELETE: an upload is aborted, an object forgotten. */
static bool answer_delete(int peer, const struct request *request)
{
    char id[NAME];
    pthread_mutex_lock(&lock);
    struct upload *upload = asks(request, "uploadId", id) ? upload_of(id) : NULL;
    if (upload != NULL)
        end_upload(upload);
    else if (*id == '\0')
        forget(request->path);
    pthread_mutex_unlock(&lock);
    return answer_text(peer, 204, "", "");
}

/* Takes a request's body, of which `have` bytes lie at `data`. Returns how many of `have` were more than that, or -1. */
static ssize_t take_body(int peer, struct request *request, const char *data, size_t have, char *scrap)
{
    size_t used = have < request->length ? have : request->length;
    take(request, 0, data, used);
    for (uint64_t at = used; at < request->length;) {
        uint64_t left = request->length - at;
        ssize_t got = recv(peer, scrap, left < BUFFER ? left : BUFFER, 0);
        if (got <= 0)
            return -1;
        take(request, at, scrap, (size_t)got);
        at += (uint64_t)got;
    }
    return (ssize_t)(have - used);
}

/* One connection. */
static void *converse(void *argument)
{
    int peer = (int)(intptr_t)argument, on = 1;
    char *buffer = allocate(NULL, BUFFER + 1), *scrap = allocate(NULL, BUFFER), *head = NULL;
    struct request request = {.body = allocate(NULL, KEPT_BYTES)};
    size_t have = 0;
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (;;) {
        char *end;
        while ((end = memmem(buffer, have, "\r\n\r\n", 4)) == NULL) {
            ssize_t got = have < BUFFER ? recv(peer, buffer + have, BUFFER - have, 0) : 0;
            if (got <= 0)
                goto over;
            have += (size_t)got;
        }
        size_t size = (size_t)(end + 4 - buffer);
        free(head);
        head = strndup(buffer, size);
        if (head == NULL || !parse(head, &request))
            goto over;
        if (request.is_continued && !put_all(peer, "HTTP/1.1 100 Continue\r\n\r\n", 25))
            goto over;
        ssize_t rest = take_body(peer, &request, buffer + size, have - size, scrap);
        if (rest < 0)
            goto over;
        memmove(buffer, buffer + have - rest, (size_t)rest);
        have = (size_t)rest;
        if (!serve(peer, &request, head))
            goto over;
    }
over:
    close(peer);
    free(buffer);
    free(scrap);
    free(head);
    free(request.body);
    return NULL;
}

/* Listens on a free port of 127.0.0.1, prints it, and runs until the process is killed; returns if it cannot listen. */
static void listen_for_ever(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    signal(SIGPIPE, SIG_IGN);
    if (door < 0 || bind(door, (struct sockaddr *)&address, length) != 0 || listen(door, 128) != 0 ||
        getsockname(door, (struct sockaddr *)&address, &length) != 0)
        return;
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        int peer = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        if (peer >= 0 && pthread_create(&thread, NULL, converse, (void *)(intptr_t)peer) == 0)
            pthread_detach(thread);
    }
}
