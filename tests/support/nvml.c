/* Stands in for NVIDIA's libnvidia-ml.so.1 where there is no GPU. STANDIN_GPUS names the devices, separated by spaces: a GPU's UUID, or
 * that of a divided one and its instances, `GPU-a=MIG-x,MIG-y` (`-` for a place that holds none). STANDIN_CUDA: what the driver runs;
 * STANDIN_INIT: the code that it starts with. A `GPU-old` is of 7.5, a `GPU-ancient` of 6.1. A `GPU-busy` has memory in use, and
 * a `GPU-silent` doesn't tell its own; a
 * `GPU-nothing` says 0, and a `GPU-lost` has fallen off the bus. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15, MOST = 16 };
typedef struct { char uuid[96]; int divided, count; struct { char uuid[96]; } instances[MOST]; } gpu_t;
typedef struct { unsigned long long total, free, used; } memory_t;
static gpu_t gpus[MOST];
static unsigned count;

int nvmlInitWithFlags(unsigned flags) {
    const char *code = getenv("STANDIN_INIT"), *given = getenv("STANDIN_GPUS");
    char *rest, *word, text[4096];
    (void)flags;
    count = 0;
    snprintf(text, sizeof text, "%s", given ? given : "");
    for (word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        gpu_t *gpu = &gpus[count++];
        char *instances = strchr(word, '='), *more, *each;
        gpu->divided = instances != NULL;
        gpu->count = 0;
        if (instances) *instances++ = 0;
        snprintf(gpu->uuid, sizeof gpu->uuid, "%s", word);
        for (each = instances ? strtok_r(instances, ",", &more) : NULL; each; each = strtok_r(NULL, ",", &more))
            snprintf(gpu->instances[gpu->count++].uuid, 96, "%s", each);
    }
    return code ? atoi(code) : SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "570.86"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = getenv("STANDIN_CUDA") ? atoi(getenv("STANDIN_CUDA")) : 13000;
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = gpus[index].uuid;
    return strncmp(*handle, "GPU-lost", 8) ? SUCCESS : GPU_IS_LOST;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { snprintf(text, size, "%s", (char *)handle); return SUCCESS; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { (void)handle; snprintf(text, size, "Stand-in"); return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    if (!strncmp(handle, "GPU-silent", 10)) return NOT_SUPPORTED;
    memory->total = (!strncmp(handle, "GPU-nothing", 11) ? 0ULL : strncmp(handle, "MIG", 3) ? 80ULL : 10ULL) << 30;
    memory->used = (strncmp(handle, "GPU-busy", 8) ? 0ULL : 60ULL) << 30;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    int old = !strncmp(handle, "GPU-old", 7), ancient = !strncmp(handle, "GPU-ancient", 11);
    *major = ancient ? 6 : old ? 7 : 9;
    *minor = ancient ? 1 : old ? 5 : 0;
    return SUCCESS;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    if (!strncmp(handle, "GPU-old", 7)) return NOT_SUPPORTED;
    *current = *pending = (unsigned)((gpu_t *)handle)->divided;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *most) { *most = (unsigned)((gpu_t *)handle)->count; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    *instance = ((gpu_t *)handle)->instances[index].uuid;
    return strcmp(*instance, "-") ? SUCCESS : NOT_FOUND;
}
