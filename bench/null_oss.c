/* null_oss: an OSS-shaped server that keeps no large body and looks at no signature, so that what a bench measures is the client.
 *
 *     null_oss             listens on a free port of 127.0.0.1, prints it, and runs until it is killed
 *
 * It answers what oss2 and ckptmgr send for an upload and a download: put, get (with a range) and head of an object, delete, and multipart uploads
 * with their parts listed. Unlike null_s3 it computes the CRC-64/XZ of every byte that arrives and answers it, as OSS does: a client that compares
 * it proves something. What it hands out is zeros.
 *
 * Build: cc -O3 -Wall -Wextra -pthread null_oss.c -o null_oss */
#define _GNU_SOURCE

#include "null_server.h"

enum { SLICES = 16 };

static const uint64_t POLYNOMIAL = 0xC96C5795D7870F42ULL; /* CRC-64/XZ, reflected */
static uint64_t tables[SLICES][256];

/* --- the CRC ---------------------------------------------------------------------------------------------------------- */

static void make_tables(void)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        uint64_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = (value >> 1) ^ ((value & 1) != 0 ? POLYNOMIAL : 0);
        tables[0][byte] = value;
    }
    for (int slice = 1; slice < SLICES; slice++)
        for (unsigned byte = 0; byte < 256; byte++) {
            uint64_t before = tables[slice - 1][byte];
            tables[slice][byte] = tables[0][before & 255] ^ (before >> 8);
        }
}

/* The CRC of what `crc` is of, and of `data` after it; 16 bytes at a time, little-endian machines only. */
static uint64_t crc_of(uint64_t crc, const char *data, size_t length)
{
    crc = ~crc;
    for (; length >= SLICES; data += SLICES, length -= SLICES) {
        uint64_t low, high, sum = 0;
        memcpy(&low, data, 8);
        memcpy(&high, data + 8, 8);
        low ^= crc;
        for (int byte = 0; byte < 8; byte++)
            sum ^= tables[15 - byte][(low >> (8 * byte)) & 255] ^ tables[7 - byte][(high >> (8 * byte)) & 255];
        crc = sum;
    }
    for (; length > 0; length--)
        crc = tables[0][(crc ^ (unsigned char)*data++) & 255] ^ (crc >> 8);
    return ~crc;
}

/* The product of two polynomials, modulo the CRC's; the highest bit is x to the power 0. */
static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product = 0;
    for (uint64_t bit = 1ULL << 63; bit != 0; bit >>= 1) {
        if ((a & bit) != 0)
            product ^= b;
        b = (b >> 1) ^ ((b & 1) != 0 ? POLYNOMIAL : 0);
    }
    return product;
}

/* The CRC of two pieces, of which the second has `length` bytes. */
static uint64_t joined(uint64_t first, uint64_t second, uint64_t length)
{
    uint64_t shift = 1ULL << 63, power = 1ULL << 55; /* x to the powers 0 and 8: one byte further */
    for (; length != 0; length >>= 1, power = times(power, power))
        if ((length & 1) != 0)
            shift = times(shift, power);
    return times(shift, first) ^ second;
}

/* --- requests --------------------------------------------------------------------------------------------------------- */

static void keep_crc(char *text, size_t room, uint64_t crc)
{
    snprintf(text, room, "%llu", (unsigned long long)crc);
}

static bool answer_written(int peer, const char *crc, const char *body)
{
    char headers[256];
    snprintf(headers, sizeof headers, "ETag: \"NULL\"\r\nx-oss-hash-crc64ecma: %s\r\n%s", crc,
             *body != '\0' ? "Content-Type: application/xml\r\n" : "");
    return answer_text(peer, 200, headers, body);
}

static bool put_object(int peer, const struct request *request)
{
    char text[24];
    keep_crc(text, sizeof text, request->sum);
    pthread_mutex_lock(&lock);
    bool stored = store(request->path, request->length, NULL, text, request->create_only);
    pthread_mutex_unlock(&lock);
    return stored ? answer_written(peer, text, "") : answer_error(peer, 409, "FileAlreadyExists");
}

static bool put_part(int peer, const struct request *request, const char *id)
{
    char number[NAME], text[24];
    asks(request, "partNumber", number);
    keep_crc(text, sizeof text, request->sum);
    long part = strtol(number, NULL, 10);
    pthread_mutex_lock(&lock);
    struct upload *upload = upload_of(id);
    bool known = upload != NULL && part >= 1 && part <= MOST_PARTS;
    if (known) {
        upload->sizes[part] = request->length;
        snprintf(upload->crcs[part], sizeof upload->crcs[part], "%016llx", (unsigned long long)request->sum);
    }
    pthread_mutex_unlock(&lock);
    return known ? answer_written(peer, text, "") : answer_error(peer, 404, "NoSuchUpload");
}

static bool begin_upload(int peer, const struct request *request)
{
    char text[2 * NAME];
    pthread_mutex_lock(&lock);
    snprintf(text, sizeof text, "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><UploadId>%zu</UploadId></InitiateMultipartUploadResult>",
             new_upload(request->path));
    pthread_mutex_unlock(&lock);
    return answer_text(peer, 200, "Content-Type: application/xml\r\n", text);
}

static bool complete_upload(int peer, const struct request *request, const char *id)
{
    char text[24] = "";
    uint64_t size = 0, crc = 0;
    pthread_mutex_lock(&lock);
    struct upload *upload = upload_of(id);
    bool known = upload != NULL, stored = false;
    if (known) {
        for (int part = 1; part <= MOST_PARTS; part++) {
            if (upload->sizes[part] == 0)
                continue;
            crc = joined(crc, strtoull(upload->crcs[part], NULL, 16), upload->sizes[part]);
            size += upload->sizes[part];
        }
        keep_crc(text, sizeof text, crc);
        stored = store(upload->key, size, NULL, text, request->create_only);
    }
    if (stored)
        end_upload(upload);
    pthread_mutex_unlock(&lock);
    if (!known)
        return answer_error(peer, 404, "NoSuchUpload");
    if (!stored)
        return answer_error(peer, 409, "FileAlreadyExists");
    return answer_written(peer, text, "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><ETag>\"NULL\"</ETag></CompleteMultipartUploadResult>");
}

static bool list_parts(int peer, const char *id)
{
    struct text text = {0};
    pthread_mutex_lock(&lock);
    struct upload *upload = upload_of(id);
    add(&text, "<?xml version=\"1.0\"?><ListPartsResult><IsTruncated>false</IsTruncated><NextPartNumberMarker>0</NextPartNumberMarker>");
    for (int part = 1; upload != NULL && part <= MOST_PARTS; part++)
        if (upload->sizes[part] > 0)
            add(&text,
                "<Part><PartNumber>%d</PartNumber><ETag>\"NULL\"</ETag><Size>%llu</Size><HashCrc64ecma>%llu</HashCrc64ecma>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Part>",
                part, (unsigned long long)upload->sizes[part], strtoull(upload->crcs[part], NULL, 16));
    bool known = upload != NULL;
    pthread_mutex_unlock(&lock);
    add(&text, "</ListPartsResult>");
    bool sent = known ? answer_text(peer, 200, "Content-Type: application/xml\r\n", text.data) : answer_error(peer, 404, "NoSuchUpload");
    free(text.data);
    return sent;
}

/* Reads the range in `head`, a request for an object of `size` bytes; false if there is none. */
static bool range_of(const char *head, uint64_t size, uint64_t *first, uint64_t *length)
{
    unsigned long long from, to;
    char value[NAME];
    for (const char *line = strstr(head, "\r\n"); line != NULL && line[2] != '\r'; line = strstr(line + 2, "\r\n")) {
        if (!is_header(line + 2, "range", value) || sscanf(value, "bytes=%llu-%llu", &from, &to) != 2 || from >= size)
            continue;
        *first = from;
        *length = (to < size ? to + 1 : size) - from;
        return true;
    }
    return false;
}

static bool get_object(int peer, const struct request *request, const char *head)
{
    static const char zeros[BUFFER];
    char headers[512], crc[64] = "";
    pthread_mutex_lock(&lock);
    struct object *object = find(request->path);
    bool known = object != NULL;
    uint64_t size = known ? object->size : 0, first = 0, length = size;
    if (known)
        snprintf(crc, sizeof crc, "%s", object->crc);
    pthread_mutex_unlock(&lock);
    if (!known)
        return strcmp(request->method, "HEAD") == 0 ? answer(peer, 404, "", NULL, 0) : answer_error(peer, 404, "NoSuchKey");
    bool ranged = range_of(head, size, &first, &length);
    int used = snprintf(headers, sizeof headers, "ETag: \"NULL\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nx-oss-hash-crc64ecma: %s\r\n", crc);
    if (ranged)
        snprintf(headers + used, sizeof headers - (size_t)used, "Content-Range: bytes %llu-%llu/%llu\r\n", (unsigned long long)first,
                 (unsigned long long)(first + length - 1), (unsigned long long)size);
    if (!answer(peer, ranged ? 206 : 200, headers, NULL, length))
        return false;
    for (uint64_t left = strcmp(request->method, "HEAD") == 0 ? 0 : length; left > 0;) {
        size_t piece = left < BUFFER ? (size_t)left : BUFFER;
        if (!put_all(peer, zeros, piece))
            return false;
        left -= piece;
    }
    return true;
}

static void note_oss_headers(const char *head, struct request *request)
{
    char value[NAME];
    for (const char *line = strstr(head, "\r\n"); line != NULL && line[2] != '\r'; line = strstr(line + 2, "\r\n"))
        if (is_header(line + 2, "x-oss-forbid-overwrite", value))
            request->create_only = strcmp(value, "true") == 0;
}

static bool serve(int peer, struct request *request, const char *head)
{
    char id[NAME];
    const char *slash = strchr(request->path, '/');
    bool is_get = strcmp(request->method, "GET") == 0;
    note_oss_headers(head, request);
    if (slash == NULL || slash[1] == '\0')
        return answer_error(peer, 501, "NotImplemented");
    if (strcmp(request->method, "PUT") == 0)
        return asks(request, "uploadId", id) ? put_part(peer, request, id) : put_object(peer, request);
    if (strcmp(request->method, "POST") == 0)
        return asks(request, "uploadId", id) ? complete_upload(peer, request, id) : begin_upload(peer, request);
    if (strcmp(request->method, "DELETE") == 0)
        return answer_delete(peer, request);
    if (is_get && asks(request, "uploadId", id))
        return list_parts(peer, id);
    if (is_get || strcmp(request->method, "HEAD") == 0)
        return get_object(peer, request, head);
    return answer_error(peer, 501, "NotImplemented");
}

/* The CRC of all of it. */
static void take(struct request *request, uint64_t at, const char *data, size_t size)
{
    request->sum = crc_of(at == 0 ? 0 : request->sum, data, size);
}

int main(void)
{
    static struct control unused;
    control = &unused;
    make_tables();
    listen_for_ever();
    perror("null_oss");
    return 1;
}
