// Which instruction set this translation unit is compiled for. Every kernel source is compiled once per set, with
// SG_ISA naming the namespace, so that the two builds of one template or inline function never meet in the linker.
#pragma once

#ifndef SG_ISA
#error "SG_ISA must name the instruction set, e.g. -DSG_ISA=avx512"
#endif

#define SG_STRINGIZE_(x) #x
#define SG_STRINGIZE(x) SG_STRINGIZE_(x)
#define SG_ISA_NAME SG_STRINGIZE(SG_ISA)

namespace sg::cpu {

// Filled by library.cpp, which is compiled for the baseline, before any kernel can run.
struct CpuFeatures {
  bool avx2 = false;        // avx2, fma, f16c
  bool avx512 = false;      // f, bw, dq, vl, vnni
  bool avx512_bf16 = false;
  bool amx_bf16 = false;    // amx tile + bf16, and the kernel granted the tile state
  bool amx_int8 = false;
};
const CpuFeatures &cpu_features();

// Scores by instruction set: a kernel of a wider set outranks a narrower one of the same source.
inline int isa_score(const char *isa) {
  const CpuFeatures &cpu = cpu_features();
  if (isa[3] == '5' && isa[6] != '\0') return cpu.avx512_bf16 ? 25 : 0;  // "avx512bf16"
  if (isa[3] == '5') return cpu.avx512 ? 20 : 0;                           // "avx512"
  return cpu.avx2 ? 10 : 0;                                                // "avx2"
}

}  // namespace sg::cpu
