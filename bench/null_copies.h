/* Copies within null_s3: what S3 calls CopyObject and UploadPartCopy. */
#pragma once
#include "null_http.h"

/* All of another object; its bytes, if they were kept, and what was said of its checksum. */
static bool copy_object(int peer, const struct request *request)
{
    char text[512], crc[64] = "", *body = NULL;
    uint64_t size = 0;
    pthread_mutex_lock(&lock);
    struct object *source = find(request->copy_source);
    bool known = source != NULL, stored = false;
    if (known) {
        size = source->size;
        snprintf(crc, sizeof crc, "%s", source->crc);
        if (source->body != NULL) {
            body = allocate(NULL, size + 1);
            memcpy(body, source->body, size);
        }
        stored = store(request->path, size, body, crc, request->create_only);
    }
    pthread_mutex_unlock(&lock);
    free(body);
    if (!known)
        return answer_error(peer, 404, "NoSuchKey");
    if (!stored)
        return answer_error(peer, 412, "PreconditionFailed");
    snprintf(text, sizeof text,
             "<?xml version=\"1.0\"?><CopyObjectResult><ETag>\"null\"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
             "%s%s%s</CopyObjectResult>",
             *crc ? "<ChecksumCRC64NVME>" : "", crc, *crc ? "</ChecksumCRC64NVME><ChecksumType>FULL_OBJECT</ChecksumType>" : "");
    return answer_text(peer, 200, "Content-Type: application/xml\r\n", text);
}

/* A part from another object, of which nothing is known but its length. */
static bool copy_part(int peer, const struct request *request, const char *id)
{
    char text[256], number[NAME];
    asks(request, "partNumber", number);
    long part = strtol(number, NULL, 10);
    pthread_mutex_lock(&lock);
    struct object *source = find(request->copy_source);
    struct upload *upload = upload_of(id);
    bool known = source != NULL && upload != NULL && part >= 1 && part <= MOST_PARTS;
    if (known) {
        bool whole = request->copy_to == 0 && request->copy_from == 0;
        upload->sizes[part] = whole ? source->size : request->copy_to - request->copy_from + 1;
        upload->crcs[part][0] = '\0';
    }
    pthread_mutex_unlock(&lock);
    if (!known)
        return answer_error(peer, 404, "NoSuchUpload");
    snprintf(text, sizeof text,
             "<?xml version=\"1.0\"?><CopyPartResult><ETag>\"part-%ld\"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
             "</CopyPartResult>",
             part);
    return answer_text(peer, 200, "Content-Type: application/xml\r\n", text);
}
