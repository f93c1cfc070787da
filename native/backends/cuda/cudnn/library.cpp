// The one exported function of libsurogate_cudnn.so: attention through cuDNN, on the backend that libsurogate_cuda.so
// brings.
#include <cstdio>

#include "attention_call.h"

namespace {

constexpr const sg_kernel *kKernels[] = {&sg::cudnn::kAttention, &sg::cudnn::kAttentionGrad,
                                         &sg::cudnn::kAttentionGradAtomic};

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t sg_kernel_library_v1(
    const sg_host *host, sg_kernel_library *library, char *error, size_t error_size) {
  if (host->abi_major != SG_ABI_MAJOR) {
    std::snprintf(error, error_size, "the cuDNN kernels speak ABI %d, the engine %u: install matching versions",
                  SG_ABI_MAJOR, host->abi_major);
    return SG_ERROR;
  }
  if (!sg::cudnn::open_library(error, error_size)) return SG_ERROR;
  library->struct_size = sizeof(*library);
  library->abi_major = SG_ABI_MAJOR;
  library->abi_minor = SG_ABI_MINOR;
  library->name = "surogate_cudnn";
  library->version = "0.1.0";
  library->num_kernels = sizeof(kKernels) / sizeof(kKernels[0]);
  library->kernels = kKernels;
  return SG_OK;
}
