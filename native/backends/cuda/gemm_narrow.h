// Matrix products of bf16 with one side of 16, 32, 48 or 64: what a low-rank branch (LoRA) is made of. They move bytes,
// and do little else.
#pragma once

#include <cuda_runtime.h>

#include "gemm.h"

namespace sg::cuda {

// Whether narrow_gemm takes a problem whose strides are set. Its operands must start at multiples of 16 bytes too.
bool narrow_supports(const GemmProblem &problem);

// Bytes of workspace for a problem that it takes.
size_t narrow_workspace_bytes(const GemmProblem &problem);

// The product of gemm.h on the stream. The caller looks at cudaGetLastError.
void narrow_gemm(const GemmProblem &problem, float alpha, const void *a, const void *b, float beta, const void *c,
                 void *d, void *workspace, cudaStream_t stream);

}  // namespace sg::cuda
