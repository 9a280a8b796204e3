/* null_s3: an S3-shaped server that hashes nothing and keeps no large body, so that what a bench measures is the client.
 *
 *     null_s3 CONTROL      listens on a free port of 127.0.0.1, prints it, and runs until it is killed
 *
 * It answers what ckptmgr and boto3 send while they upload: put (create-only with If-None-Match: *), get and head of small objects, delete, multipart
 * uploads with their parts listed, and listings by prefix. A checksum is believed and given back, never computed; a signature is not looked at.
 *
 * CONTROL is a file of three 64-bit counters that the server and its users map into memory (see struct control): a bench can hold uploads back at
 * their first request, let them all go at one moment, and see the moment of a commit without a request.
 *
 * Build: cc -O2 -Wall -Wextra -pthread null_s3.c -o null_s3 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BUFFER = 1 << 20,        /* bytes read at a time */
    KEPT_BYTES = 256 << 10,  /* bodies up to this size are kept; larger ones are counted and dropped */
    NAME = 2048,             /* longest key, query value or header value */
    MOST_PARTS = 10000,
    PAGE_KEYS = 1000,
};

struct control {
    _Atomic uint64_t hold;    /* not 0: a request that begins a multipart upload waits for its answer */
    _Atomic uint64_t waiting; /* how many do */
    _Atomic uint64_t commits; /* objects created below a "manifests/" */
};

struct object {
    char *key; /* bucket/key */
    uint64_t size;
    char *body;      /* NULL: dropped */
    char crc[64];    /* what the client said; "" if it did not */
};

struct upload {
    char *key; /* NULL: complete or aborted */
    uint64_t sizes[MOST_PARTS + 1]; /* 0: not there; no part is empty */
    char crcs[MOST_PARTS + 1][20];
};

struct request {
    char method[16];
    char path[NAME];
    char query[NAME];
    char crc[64];
    bool create_only, wants_checksum, is_continued;
    uint64_t length;
    char *body; /* the first KEPT_BYTES of it */
};

struct text {
    char *data;
    size_t length, room;
};

static struct control *control;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static struct object *objects;                           /* sorted by key */
static size_t object_count, object_room;
static struct upload **uploads; /* the id is the index */
static size_t upload_count;

static void *allocate(void *old, size_t size)
{
    void *found = realloc(old, size);
    if (found == NULL) {
        perror("null_s3");
        exit(1);
    }
    return found;
}

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

/* --- what is stored --------------------------------------------------------------------------------------------------- */

/* Where `key` is, or would be. */
static size_t position(const char *key)
{
    size_t low = 0, high = object_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(objects[middle].key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct object *find(const char *key)
{
    size_t at = position(key);
    return at < object_count && strcmp(objects[at].key, key) == 0 ? &objects[at] : NULL;
}

/* False if `create_only` and it is there. */
static bool store(const char *key, uint64_t size, const char *body, const char *crc, bool create_only)
{
    struct object *object = find(key);
    if (object != NULL && create_only)
        return false;
    if (object == NULL) {
        size_t at = position(key);
        if (object_count == object_room)
            objects = allocate(objects, (object_room = 2 * object_room + 64) * sizeof *objects);
        memmove(&objects[at + 1], &objects[at], (object_count++ - at) * sizeof *objects);
        object = &objects[at];
        *object = (struct object){.key = strdup(key)};
    }
    free(object->body);
    object->body = NULL;
    if (body != NULL) {
        object->body = allocate(NULL, size + 1);
        memcpy(object->body, body, size);
    }
    object->size = size;
    snprintf(object->crc, sizeof object->crc, "%s", crc);
    if (strstr(key, "/manifests/") != NULL)
        atomic_fetch_add(&control->commits, 1);
    return true;
}

static void forget(const char *key)
{
    struct object *object = find(key);
    if (object == NULL)
        return;
    free(object->key);
    free(object->body);
    size_t at = (size_t)(object - objects);
    memmove(object, object + 1, (--object_count - at) * sizeof *objects);
}

static struct upload *upload_of(const char *id)
{
    size_t index = strtoul(id, NULL, 10);
    return index < upload_count && uploads[index]->key != NULL ? uploads[index] : NULL;
}

/* --- the wire --------------------------------------------------------------------------------------------------------- */

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
    int size = snprintf(head, sizeof head, "HTTP/1.1 %d -\r\nServer: null_s3\r\nx-amz-request-id: 1\r\n%sContent-Length: %llu\r\n\r\n",
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
    snprintf(text, sizeof text, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>null_s3 says so</Message></Error>", code);
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
        else if (is_header(line + 2, "expect", value))
            request->is_continued = true;
        else if (is_header(line + 2, "transfer-encoding", value))
            return false; /* nobody who is measured here sends chunks */
    }
    return true;
}

/* --- requests --------------------------------------------------------------------------------------------------------- */

static void checksum_header(char *header, size_t room, const char *crc)
{
    if (*crc == '\0')
        *header = '\0';
    else
        snprintf(header, room, "x-amz-checksum-crc64nvme: %s\r\nx-amz-checksum-type: FULL_OBJECT\r\n", crc);
}

static bool put_object(int peer, const struct request *request)
{
    char headers[256], checksum[160];
    pthread_mutex_lock(&lock);
    const char *body = request->length <= KEPT_BYTES ? request->body : NULL;
    bool stored = store(request->path, request->length, body, request->crc, request->create_only);
    pthread_mutex_unlock(&lock);
    if (!stored)
        return answer_error(peer, 412, "PreconditionFailed");
    checksum_header(checksum, sizeof checksum, request->crc);
    snprintf(headers, sizeof headers, "ETag: \"null\"\r\n%s", checksum);
    return answer_text(peer, 200, headers, "");
}

static bool put_part(int peer, const struct request *request, const char *id)
{
    char headers[256], checksum[160], number[NAME];
    asks(request, "partNumber", number);
    long part = strtol(number, NULL, 10);
    pthread_mutex_lock(&lock);
    struct upload *upload = upload_of(id);
    bool known = upload != NULL && part >= 1 && part <= MOST_PARTS;
    if (known) {
        upload->sizes[part] = request->length;
        snprintf(upload->crcs[part], sizeof upload->crcs[part], "%.19s", request->crc);
    }
    pthread_mutex_unlock(&lock);
    if (!known)
        return answer_error(peer, 404, "NoSuchUpload");
    checksum_header(checksum, sizeof checksum, request->crc);
    snprintf(headers, sizeof headers, "ETag: \"part-%ld\"\r\n%s", part, checksum);
    return answer_text(peer, 200, headers, "");
}

static bool begin_upload(int peer, const struct request *request)
{
    struct timespec pause = {.tv_nsec = 200000};
    atomic_fetch_add(&control->waiting, 1);
    while (atomic_load(&control->hold) != 0)
        nanosleep(&pause, NULL);
    atomic_fetch_sub(&control->waiting, 1);
    char text[2 * NAME];
    pthread_mutex_lock(&lock);
    uploads = allocate(uploads, (upload_count + 1) * sizeof(*uploads));
    struct upload *upload = uploads[upload_count] = calloc(1, sizeof(struct upload));
    upload->key = strdup(request->path);
    snprintf(text, sizeof text,
             "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Key>%s</Key><UploadId>%zu</UploadId></InitiateMultipartUploadResult>",
             strchr(request->path, '/') + 1, upload_count++);
    pthread_mutex_unlock(&lock);
    return answer_text(peer, 200, "Content-Type: application/xml\r\n", text);
}

static bool complete_upload(int peer, const struct request *request, const char *id)
{
    char text[2 * NAME];
    uint64_t size = 0;
    pthread_mutex_lock(&lock);
    struct upload *upload = upload_of(id);
    bool known = upload != NULL, stored = false;
    if (known) {
        for (int part = 1; part <= MOST_PARTS; part++)
            size += upload->sizes[part];
        stored = store(upload->key, size, NULL, request->crc, request->create_only);
    }
    if (stored) {
        free(upload->key);
        upload->key = NULL;
    }
    pthread_mutex_unlock(&lock);
    if (!known)
        return answer_error(peer, 404, "NoSuchUpload");
    if (!stored)
        return answer_error(peer, 412, "PreconditionFailed");
    snprintf(text, sizeof text,
             "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><ETag>\"null\"</ETag>%s%s%s<ChecksumType>FULL_OBJECT</ChecksumType>"
             "</CompleteMultipartUploadResult>",
             *request->crc ? "<ChecksumCRC64NVME>" : "", request->crc, *request->crc ? "</ChecksumCRC64NVME>" : "");
    return answer_text(peer, 200, "Content-Type: application/xml\r\n", text);
}

static bool list_parts(int peer, const char *id)
{
    struct text text = {0};
    pthread_mutex_lock(&lock);
    struct upload *upload = upload_of(id);
    add(&text, "<?xml version=\"1.0\"?><ListPartsResult><IsTruncated>false</IsTruncated>");
    for (int part = 1; upload != NULL && part <= MOST_PARTS; part++)
        if (upload->sizes[part] > 0)
            add(&text,
                "<Part><PartNumber>%d</PartNumber><ETag>\"part-%d\"</ETag><Size>%llu</Size><ChecksumCRC64NVME>%s</ChecksumCRC64NVME>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Part>",
                part, part, (unsigned long long)upload->sizes[part], upload->crcs[part]);
    bool known = upload != NULL;
    pthread_mutex_unlock(&lock);
    add(&text, "</ListPartsResult>");
    bool sent = known ? answer_text(peer, 200, "Content-Type: application/xml\r\n", text.data) : answer_error(peer, 404, "NoSuchUpload");
    free(text.data);
    return sent;
}

static bool list_objects(int peer, const struct request *request)
{
    char prefix[NAME], delimiter[NAME], token[NAME], start[2 * NAME], full[2 * NAME], bucket[NAME], folder[NAME] = "";
    struct text text = {0};
    asks(request, "prefix", prefix);
    asks(request, "delimiter", delimiter);
    bool goes_on = asks(request, "continuation-token", token);
    snprintf(bucket, sizeof bucket, "%.*s", (int)strcspn(request->path, "/"), request->path);
    size_t skip = strlen(bucket) + 1;
    snprintf(full, sizeof full, "%s/%s", bucket, prefix);
    snprintf(start, sizeof start, "%s/%s", bucket, goes_on ? token : prefix);
    pthread_mutex_lock(&lock);
    size_t at = position(start);
    int count = 0;
    const char *next = NULL;
    add(&text, "<?xml version=\"1.0\"?><ListBucketResult><Name>%s</Name>", bucket);
    for (; at < object_count && strncmp(objects[at].key, full, strlen(full)) == 0; at++) {
        const char *key = objects[at].key + skip, *rest = objects[at].key + strlen(full);
        const char *end = *delimiter != '\0' ? strstr(rest, delimiter) : NULL;
        int length = end == NULL ? 0 : (int)(end - key) + (int)strlen(delimiter);
        if (end != NULL && strncmp(folder, key, (size_t)length) == 0 && folder[length] == '\0')
            continue;
        if (count++ == PAGE_KEYS) {
            next = key;
            break;
        }
        if (end != NULL) {
            snprintf(folder, sizeof folder, "%.*s", length, key);
            add(&text, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", folder);
        } else {
            add(&text, "<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>\"null\"</ETag><Size>%llu</Size></Contents>",
                key, (unsigned long long)objects[at].size);
        }
    }
    add(&text, "<IsTruncated>%s</IsTruncated>", next != NULL ? "true" : "false");
    if (next != NULL)
        add(&text, "<NextContinuationToken>%s</NextContinuationToken>", next);
    pthread_mutex_unlock(&lock);
    add(&text, "</ListBucketResult>");
    bool sent = answer_text(peer, 200, "Content-Type: application/xml\r\n", text.data);
    free(text.data);
    return sent;
}

static bool get_object(int peer, const struct request *request)
{
    char headers[512], checksum[160] = "";
    pthread_mutex_lock(&lock);
    struct object *object = find(request->path);
    bool known = object != NULL, is_head = strcmp(request->method, "HEAD") == 0;
    uint64_t size = known ? object->size : 0;
    char *body = NULL;
    if (known && object->body != NULL) {
        body = allocate(NULL, size + 1);
        memcpy(body, object->body, size);
    }
    if (known && request->wants_checksum)
        checksum_header(checksum, sizeof checksum, object->crc);
    pthread_mutex_unlock(&lock);
    bool sent;
    snprintf(headers, sizeof headers, "ETag: \"null\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n%s", checksum);
    if (is_head)
        sent = answer(peer, known ? 200 : 404, known ? headers : "", NULL, size);
    else if (!known)
        sent = answer_error(peer, 404, "NoSuchKey");
    else if (body == NULL)
        sent = answer_error(peer, 501, "NotImplemented");
    else
        sent = answer(peer, 200, headers, body, size);
    free(body);
    return sent;
}

static bool serve(int peer, const struct request *request)
{
    char id[NAME];
    const char *slash = strchr(request->path, '/');
    bool in_bucket = slash != NULL && slash[1] != '\0', is_get = strcmp(request->method, "GET") == 0;
    if (strcmp(request->method, "PUT") == 0) {
        if (!in_bucket)
            return answer_text(peer, 200, "", "");
        return asks(request, "uploadId", id) ? put_part(peer, request, id) : put_object(peer, request);
    }
    if (strcmp(request->method, "POST") == 0 && in_bucket)
        return asks(request, "uploadId", id) ? complete_upload(peer, request, id) : begin_upload(peer, request);
    if (strcmp(request->method, "DELETE") == 0 && in_bucket) {
        pthread_mutex_lock(&lock);
        struct upload *upload = asks(request, "uploadId", id) ? upload_of(id) : NULL;
        if (upload != NULL) {
            free(upload->key);
            upload->key = NULL;
        } else if (*id == '\0') {
            forget(request->path);
        }
        pthread_mutex_unlock(&lock);
        return answer_text(peer, 204, "", "");
    }
    if (is_get && !in_bucket)
        return list_objects(peer, request);
    if (is_get && asks(request, "uploadId", id))
        return list_parts(peer, id);
    if (is_get || strcmp(request->method, "HEAD") == 0)
        return get_object(peer, request);
    return answer_error(peer, 501, "NotImplemented"); /* batch deletes, copies */
}

/* Reads a request's body, of which `have` bytes lie at `data`; its beginning is kept. Returns how many of `have` were more than that, or -1. */
static ssize_t read_body(int peer, struct request *request, const char *data, size_t have, char *scrap)
{
    size_t used = have < request->length ? have : request->length, kept = used < KEPT_BYTES ? used : KEPT_BYTES;
    uint64_t left = request->length - used;
    memcpy(request->body, data, kept);
    while (left > 0) {
        ssize_t got = recv(peer, scrap, left < BUFFER ? left : BUFFER, 0);
        if (got <= 0)
            return -1;
        size_t room = KEPT_BYTES - kept, more = (size_t)got < room ? (size_t)got : room;
        memcpy(request->body + kept, scrap, more);
        kept += more;
        left -= (uint64_t)got;
    }
    return (ssize_t)(have - used);
}

/* One connection, request by request. */
static void *converse(void *argument)
{
    int peer = (int)(intptr_t)argument, on = 1;
    char *buffer = allocate(NULL, BUFFER + 1), *scrap = allocate(NULL, BUFFER);
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
        size_t head = (size_t)(end + 4 - buffer);
        char *text = strndup(buffer, head);
        bool readable = text != NULL && parse(text, &request);
        free(text);
        if (!readable || (request.is_continued && !put_all(peer, "HTTP/1.1 100 Continue\r\n\r\n", 25)))
            goto over;
        ssize_t rest = read_body(peer, &request, buffer + head, have - head, scrap);
        if (rest < 0)
            goto over;
        memmove(buffer, buffer + have - rest, (size_t)rest);
        have = (size_t)rest;
        if (!serve(peer, &request))
            goto over;
    }
over:
    close(peer);
    free(buffer);
    free(scrap);
    free(request.body);
    return NULL;
}

static int listen_on_loopback(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (door < 0 || bind(door, (struct sockaddr *)&address, length) != 0 || listen(door, 128) != 0 ||
        getsockname(door, (struct sockaddr *)&address, &length) != 0)
        return -1;
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return door;
}

int main(int count, char **arguments)
{
    signal(SIGPIPE, SIG_IGN);
    int file = count == 2 ? open(arguments[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file < 0 || ftruncate(file, sizeof(struct control)) != 0) {
        fprintf(stderr, "usage: null_s3 CONTROL (a file that can be written)\n");
        return 2;
    }
    control = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    int door = control == MAP_FAILED ? -1 : listen_on_loopback();
    if (door < 0) {
        perror("null_s3");
        return 1;
    }
    for (;;) {
        int peer = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        if (peer >= 0 && pthread_create(&thread, NULL, converse, (void *)(intptr_t)peer) == 0)
            pthread_detach(thread);
    }
}
