// The one exported function of libsurogate_cuda.so.
#include <cstdio>
#include <vector>

#include "backend.h"
#include "kernel.cuh"

namespace sg::cuda {

namespace {

std::vector<const sg_kernel *> &table() {
  static std::vector<const sg_kernel *> kernels;
  return kernels;
}

}  // namespace

bool register_kernel(const sg_kernel *kernel) {
  table().push_back(kernel);
  return true;
}

}  // namespace sg::cuda

extern "C" __attribute__((visibility("default"))) int32_t sg_kernel_library_v1(
    const sg_host *host, sg_kernel_library *library, char *error, size_t error_size) {
  if (host->abi_major != SG_ABI_MAJOR) {
    std::snprintf(error, error_size, "the CUDA kernels speak ABI %d, the engine %u: install matching versions",
                  SG_ABI_MAJOR, host->abi_major);
    return SG_ERROR;
  }
  const sg_backend &backend = sg::cuda::backend();
  sg_device_info info{};
  info.struct_size = sizeof(info);
  if (backend.device_info(0, &info, error, error_size) != SG_OK) return SG_ERROR;
  if (info.architecture < 80) {
    std::snprintf(error, error_size, "%s has compute capability %d.%d; the kernels need 8.0 or later", info.name,
                  info.architecture / 10, info.architecture % 10);
    return SG_ERROR;
  }
  library->struct_size = sizeof(*library);
  library->abi_major = SG_ABI_MAJOR;
  library->abi_minor = SG_ABI_MINOR;
  library->name = "surogate_cuda";
  library->version = "0.1.0";
  library->num_kernels = static_cast<int32_t>(sg::cuda::table().size());
  library->kernels = sg::cuda::table().data();
  library->backend = &backend;
  return SG_OK;
}
