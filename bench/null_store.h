/* What null servers keep: objects by key, uploads by number, and the counters that a bench looks at. One lock guards objects and uploads. */
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_PARTS = 10000 };

struct control {
    _Atomic uint64_t hold;    /* not 0: a request that begins a multipart upload waits for its answer */
    _Atomic uint64_t waiting; /* how many do */
    _Atomic uint64_t commits; /* objects created below a "manifests/" */
    _Atomic uint64_t received; /* bytes of all bodies */
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
        perror("a null server");
        exit(1);
    }
    return found;
}

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

/* Begins an upload; its id. */
static size_t new_upload(const char *key)
{
    uploads = allocate(uploads, (upload_count + 1) * sizeof(*uploads));
    struct upload *upload = uploads[upload_count] = calloc(1, sizeof(struct upload));
    upload->key = strdup(key);
    return upload_count++;
}

static void end_upload(struct upload *upload)
{
    free(upload->key);
    upload->key = NULL;
}
