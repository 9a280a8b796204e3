/* null_s3: an S3-shaped server that hashes nothing and keeps no large body, so that what a bench measures is the client.
 *
 *     null_s3 CONTROL      listens on a free port of 127.0.0.1, prints it, and runs until it is killed
 *
 * It answers what ckptmgr and boto3 send while they upload: put (create-only with If-None-Match: *), get and head of small objects, delete, copies,
 * multipart uploads with their parts listed, and listings by prefix. A checksum is believed and given back, never computed; a signature is not looked at.
 *
 * CONTROL is a file of four 64-bit counters that the server and its users map into memory (see struct control): a bench can hold uploads back at
 * their first request, let them all go at one moment, and see, without a request, the moment of a commit and how much was sent.
 *
 * Build: cc -O2 -Wall -Wextra -pthread null_s3.c -o null_s3 */
#define _GNU_SOURCE
#include <time.h>

#include "null_copies.h"
#include "null_server.h"

enum { PAGE_KEYS = 1000 };

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
    snprintf(text, sizeof text,
             "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Key>%s</Key><UploadId>%zu</UploadId></InitiateMultipartUploadResult>",
             strchr(request->path, '/') + 1, new_upload(request->path));
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
    if (stored)
        end_upload(upload);
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

static bool serve(int peer, struct request *request, const char *head)
{
    (void)head;
    char id[NAME];
    const char *slash = strchr(request->path, '/');
    bool in_bucket = slash != NULL && slash[1] != '\0', is_get = strcmp(request->method, "GET") == 0;
    if (strcmp(request->method, "PUT") == 0) {
        if (!in_bucket)
            return answer_text(peer, 200, "", "");
        bool is_part = asks(request, "uploadId", id);
        if (*request->copy_source != '\0')
            return is_part ? copy_part(peer, request, id) : copy_object(peer, request);
        return is_part ? put_part(peer, request, id) : put_object(peer, request);
    }
    if (strcmp(request->method, "POST") == 0 && in_bucket)
        return asks(request, "uploadId", id) ? complete_upload(peer, request, id) : begin_upload(peer, request);
    if (strcmp(request->method, "DELETE") == 0 && in_bucket)
        return answer_delete(peer, request);
    if (is_get && !in_bucket)
        return list_objects(peer, request);
    if (is_get && asks(request, "uploadId", id))
        return list_parts(peer, id);
    if (is_get || strcmp(request->method, "HEAD") == 0)
        return get_object(peer, request);
    return answer_error(peer, 501, "NotImplemented"); /* batch deletes */
}

/* The beginning is kept. */
static void take(struct request *request, uint64_t at, const char *data, size_t size)
{
    if (at < KEPT_BYTES)
        memcpy(request->body + at, data, size < KEPT_BYTES - at ? size : KEPT_BYTES - at);
    atomic_fetch_add(&control->received, size);
}

int main(int count, char **arguments)
{
    int file = count == 2 ? open(arguments[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file < 0 || ftruncate(file, sizeof(struct control)) != 0) {
        fprintf(stderr, "usage: null_s3 CONTROL (a file that can be written)\n");
        return 2;
    }
    control = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (control != MAP_FAILED)
        listen_for_ever();
    perror("null_s3");
    return 1;
}
