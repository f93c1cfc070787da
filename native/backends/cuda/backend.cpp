#include "backend.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "kernel.cuh"

namespace sg::cuda {
namespace {

int32_t report(cudaError_t result, const char *what, char *error, size_t error_size) {
  if (result == cudaSuccess) return SG_OK;
  cudaGetLastError();  // it is told here, and must not be met again by the next launch
  std::snprintf(error, error_size, "%s: %s", what, cudaGetErrorString(result));
  return SG_ERROR;
}

cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void *event) { return static_cast<cudaEvent_t>(event); }

int32_t num_devices(int32_t *count, char *error, size_t size) {
  int found = 0;
  const int32_t result = report(cudaGetDeviceCount(&found), "looking for CUDA devices", error, size);
  *count = found;
  return result;
}

// Another process's use of the device shows in free_bytes.
int32_t device_info(int32_t index, sg_device_info *info, char *error, size_t size) {
  cudaDeviceProp properties{};
  if (report(cudaGetDeviceProperties(&properties, index), "reading a CUDA device's properties", error, size) != SG_OK) {
    return SG_ERROR;
  }
  size_t free = 0, total = 0;
  if (report(cudaSetDevice(index), "activating a CUDA device", error, size) != SG_OK ||
      report(cudaMemGetInfo(&free, &total), "asking for free device memory", error, size) != SG_OK) {
    return SG_ERROR;
  }
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  std::snprintf(info->name, sizeof(info->name), "%.127s", properties.name);
  std::snprintf(info->versions, sizeof(info->versions), "driver CUDA %d.%d, runtime %d.%d", driver / 1000,
                driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  info->total_bytes = total;
  info->free_bytes = free;
  info->num_units = properties.multiProcessorCount;
  info->architecture = 10 * properties.major + properties.minor;
  return SG_OK;
}

int32_t activate(int32_t index, char *error, size_t size) {
  return report(cudaSetDevice(index), "activating a CUDA device", error, size);
}

int32_t allocate(uint64_t bytes, int32_t kind, void **data, char *error, size_t size) {
  *data = nullptr;
  if (kind == SG_MEMORY_PINNED) {
    return report(cudaHostAlloc(data, bytes, cudaHostAllocDefault), "allocating pinned memory", error, size);
  }
  return report(cudaMalloc(data, bytes), "allocating device memory", error, size);
}

void release(void *data, int32_t kind) {
  if (data == nullptr) return;
  if (kind == SG_MEMORY_PINNED) {
    cudaFreeHost(data);
  } else {
    cudaFree(data);
  }
}

int32_t stream_create(void **stream, char *error, size_t size) {
  cudaStream_t made = nullptr;
  const int32_t result = report(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "making a stream", error, size);
  *stream = made;
  return result;
}
void stream_destroy(void *stream) { cudaStreamDestroy(stream_of(stream)); }
int32_t stream_synchronize(void *stream, char *error, size_t size) {
  return report(cudaStreamSynchronize(stream_of(stream)), "waiting for the device", error, size);
}

int32_t copy(void *to, const void *from, uint64_t bytes, void *stream, char *error, size_t size) {
  return report(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "copying", error, size);
}
int32_t clear(void *data, int32_t byte, uint64_t bytes, void *stream, char *error, size_t size) {
  return report(cudaMemsetAsync(data, byte, bytes, stream_of(stream)), "clearing memory", error, size);
}

int32_t event_create(void **event, int32_t timed, char *error, size_t size) {
  cudaEvent_t made = nullptr;
  const unsigned flags = timed != 0 ? cudaEventDefault : cudaEventDisableTiming;
  const int32_t result = report(cudaEventCreateWithFlags(&made, flags), "making an event", error, size);
  *event = made;
  return result;
}
void event_destroy(void *event) { cudaEventDestroy(event_of(event)); }
int32_t event_record(void *event, void *stream, int32_t external, char *error, size_t size) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream_of(stream), &status);
  const bool node = external != 0 && status == cudaStreamCaptureStatusActive;
  const unsigned flags = node ? cudaEventRecordExternal : cudaEventRecordDefault;
  return report(cudaEventRecordWithFlags(event_of(event), stream_of(stream), flags), "recording an event", error, size);
}
int32_t event_wait(void *event, void *stream, char *error, size_t size) {
  return report(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "waiting for an event", error, size);
}
int32_t event_synchronize(void *event, char *error, size_t size) {
  return report(cudaEventSynchronize(event_of(event)), "waiting for an event", error, size);
}
int32_t event_seconds(void *begin, void *end, double *seconds, char *error, size_t size) {
  float milliseconds = 0.0f;
  const cudaError_t result = cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end));
  *seconds = 1e-3 * milliseconds;
  return report(result, "reading the time between events", error, size);
}

int32_t capture_begin(void *stream, char *error, size_t size) {
  return report(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal), "beginning a capture", error,
                size);
}
int32_t capture_end(void *stream, void **graph, char *error, size_t size) {
  *graph = nullptr;
  cudaGraph_t recorded = nullptr;
  if (report(cudaStreamEndCapture(stream_of(stream), &recorded), "ending a capture", error, size) != SG_OK) {
    return SG_ERROR;
  }
  cudaGraphExec_t made = nullptr;
  const int32_t result = report(cudaGraphInstantiate(&made, recorded, 0), "instantiating a graph", error, size);
  cudaGraphDestroy(recorded);
  *graph = made;
  return result;
}
int32_t graph_launch(void *graph, void *stream, char *error, size_t size) {
  return report(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)), "launching a graph", error, size);
}
void graph_destroy(void *graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

constexpr sg_backend kBackend = {
    sizeof(sg_backend), "cuda",        num_devices,   device_info,    activate,          allocate,
    release,            stream_create, stream_destroy, stream_synchronize, copy,          clear,
    event_create,       event_destroy, event_record,  event_wait,     event_synchronize, event_seconds,
    capture_begin,      capture_end,   graph_launch,  graph_destroy};

}  // namespace

const sg_backend &backend() { return kBackend; }

const Device &device() {
  static const Device found = [] {
    Device result;
    int index = 0, major = 0, minor = 0, shared = 0;
    cudaGetDevice(&index);
    cudaDeviceGetAttribute(&result.units, cudaDevAttrMultiProcessorCount, index);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    result.architecture = 10 * major + minor;
    result.shared_memory = static_cast<size_t>(shared);
    return result;
  }();
  return found;
}

}  // namespace sg::cuda
