/* HTTP as null servers need it: reads requests, writes answers. */
#pragma once
#include <ctype.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#include "null_store.h"

enum {
    BUFFER = 1 << 20,        /* bytes read at a time */
    KEPT_BYTES = 256 << 10,  /* bodies up to this size are kept; larger ones are counted and dropped */
    NAME = 2048,             /* longest key, query value or header value */
};

struct request {
    char method[16];
    char path[NAME];
    char query[NAME];
    char crc[64];
    char copy_source[NAME]; /* bucket/key; "": this is no copy */
    uint64_t copy_from, copy_to; /* the range of a part; 0, 0: all of it */
    bool create_only, wants_checksum, is_continued;
    uint64_t length;
    char *body;   /* room for the first KEPT_BYTES of it */
    uint64_t sum; /* of the whole body, where the server computes one */
};

struct text {
    char *data;
    size_t length, room;
};

__attribute__((format(printf, 2, 3))) static void add(struct text *text, const char *format, ...)
{
    char piece[3 * NAME];
    va_list arguments;
    va_start(arguments, format);
    size_t length = (size_t)vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    if (length >= sizeof piece)
        length = sizeof piece - 1;
    if (text->length + length + 1 > text->room)
        text->data = allocate(text->data, text->room = 2 * (text->length + length + 1));
    memcpy(text->data + text->length, piece, length + 1);
    text->length += length;
}

static bool put_all(int peer, const char *data, size_t length)
{
    while (length > 0) {
        ssize_t sent = send(peer, data, length, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        data += sent;
        length -= (size_t)sent;
    }
    return true;
}

/* An answer with a body of its own; `headers` end with a line break each. For HEAD, `length` without a body. */
static bool answer(int peer, int status, const char *headers, const char *body, uint64_t length)
{
    char head[4 * NAME];
    int size = snprintf(head, sizeof head, "HTTP/1.1 %d -\r\nServer: null\r\nx-amz-request-id: 1\r\nx-oss-request-id: 1\r\n%sContent-Length: %llu\r\n\r\n",
                        status, headers, (unsigned long long)length);
    return put_all(peer, head, (size_t)size) && (body == NULL || put_all(peer, body, length));
}

static bool answer_text(int peer, int status, const char *headers, const char *text)
{
    return answer(peer, status, headers, text, strlen(text));
}

static bool answer_error(int peer, int status, const char *code)
{
    char text[256];
    snprintf(text, sizeof text, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>the null server says so</Message></Error>", code);
    return answer_text(peer, status, "Content-Type: application/xml\r\n", text);
}

static void unescape(char *text)
{
    char *out = text;
    for (; *text != '\0'; text++) {
        if (*text == '%' && isxdigit((unsigned char)text[1]) && isxdigit((unsigned char)text[2])) {
            char digits[3] = {text[1], text[2], '\0'};
            *out++ = (char)strtol(digits, NULL, 16);
            text += 2;
        } else {
            *out++ = *text;
        }
    }
    *out = '\0';
}

/* The value of `name` in the query, unescaped into `value`; false if it is not there. */
static bool asks(const struct request *request, const char *name, char *value)
{
    size_t length = strlen(name);
    for (const char *at = request->query; *at != '\0'; at += strcspn(at, "&"), at += *at == '&') {
        if (strncmp(at, name, length) != 0 || strchr("=&", at[length]) == NULL)
            continue;
        const char *from = at + length + (at[length] == '=');
        snprintf(value, NAME, "%.*s", (int)strcspn(from, "&"), from);
        unescape(value);
        return true;
    }
    *value = '\0';
    return false;
}

/* Whether `line` is the header `name`; its value goes to `value`. */
static bool is_header(const char *line, const char *name, char *value)
{
    size_t length = strlen(name);
    if (strncasecmp(line, name, length) != 0 || line[length] != ':')
        return false;
    line += length + 1;
    line += strspn(line, " ");
    snprintf(value, NAME, "%.*s", (int)strcspn(line, "\r"), line);
    return true;
}

/* The request in `head`, which ends with an empty line; false if it cannot be read. */
static bool parse(char *head, struct request *request)
{
    char target[2 * NAME], value[NAME];
    *request = (struct request){.body = request->body};
    if (sscanf(head, "%15s %4095s", request->method, target) != 2)
        return false;
    char *query = strchr(target, '?');
    if (query != NULL)
        *query++ = '\0';
    snprintf(request->path, sizeof request->path, "%.*s", NAME - 1, target + 1);
    snprintf(request->query, sizeof request->query, "%.*s", NAME - 1, query == NULL ? "" : query);
    unescape(request->path);
    for (char *line = strstr(head, "\r\n"); line != NULL && line[2] != '\r'; line = strstr(line + 2, "\r\n")) {
        if (is_header(line + 2, "content-length", value))
            request->length = strtoull(value, NULL, 10);
        else if (is_header(line + 2, "x-amz-checksum-crc64nvme", value))
            snprintf(request->crc, sizeof request->crc, "%.63s", value);
        else if (is_header(line + 2, "if-none-match", value))
            request->create_only = strcmp(value, "*") == 0;
        else if (is_header(line + 2, "x-amz-checksum-mode", value))
            request->wants_checksum = true;
        else if (is_header(line + 2, "x-amz-copy-source", value)) {
            snprintf(request->copy_source, sizeof request->copy_source, "%s", value + (*value == '/'));
            unescape(request->copy_source);
        } else if (is_header(line + 2, "x-amz-copy-source-range", value))
            (void)sscanf(value, "bytes=%" SCNu64 "-%" SCNu64, &request->copy_from, &request->copy_to);
        else if (is_header(line + 2, "expect", value))
            request->is_continued = true;
        else if (is_header(line + 2, "transfer-encoding", value))
            return false; /* nobody who is measured here sends chunks */
    }
    return true;
}
