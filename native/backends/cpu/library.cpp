// The one exported function of libsurogate_cpu.so. Compiled for the baseline instruction set: it decides, before any
// wider code runs, what this processor can do.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#define SG_ISA baseline
#include "isa.h"
#include "surogate/abi.h"

namespace sg::cpu {

namespace {

// Linux grants the AMX tile registers to a process that asks (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18).
bool request_tile_state() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures probe() {
  CpuFeatures f;
  __builtin_cpu_init();
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (f.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) f.avx512_bf16 = (a >> 5) & 1u;
  if (f.avx512_bf16 && __get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    bool tile = (d >> 24) & 1u;
    bool granted = tile && request_tile_state();
    f.amx_bf16 = granted && ((d >> 22) & 1u);
    f.amx_int8 = granted && ((d >> 25) & 1u);
  }
  return f;
}

std::vector<const sg_kernel *> &table() {
  static std::vector<const sg_kernel *> kernels;
  return kernels;
}

}  // namespace

const CpuFeatures &cpu_features() {
  static const CpuFeatures features = probe();
  return features;
}

bool register_kernel(const sg_kernel *kernel) {
  table().push_back(kernel);
  return true;
}

}  // namespace sg::cpu

extern "C" int32_t sg_kernel_library_v1(const sg_host *host, sg_kernel_library *library, char *error,
                                        size_t error_size) {
  if (host->abi_major != SG_ABI_MAJOR) {
    std::snprintf(error, error_size, "the CPU kernels speak ABI %d, the engine %u: install matching versions",
                  SG_ABI_MAJOR, host->abi_major);
    return SG_ERROR;
  }
  if (!sg::cpu::cpu_features().avx2) {
    std::snprintf(error, error_size, "this processor lacks AVX2, FMA or F16C, which the CPU kernels need at least");
    return SG_ERROR;
  }
  library->struct_size = sizeof(*library);
  library->abi_major = SG_ABI_MAJOR;
  library->abi_minor = SG_ABI_MINOR;
  library->name = "surogate_cpu";
  library->version = "0.1.0";
  library->num_kernels = static_cast<int32_t>(sg::cpu::table().size());
  library->kernels = sg::cpu::table().data();
  return SG_OK;
}
