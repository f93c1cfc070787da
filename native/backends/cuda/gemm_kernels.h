// Our own kernels around matrix products: one that takes every problem, and random numbers to time products on.
#pragma once

#include <cuda_runtime.h>

#include "gemm.h"

namespace sg::cuda {

// The product of gemm.h on the stream, for every problem with m, n > 0; k may be 0. Strides must be set. The caller
// looks at cudaGetLastError.
void tiled_gemm(const GemmProblem &problem, float alpha, const void *a, const void *b, float beta, const void *c,
                void *d, const void *bias, cudaStream_t stream);

// Fills with numbers that look normal, with mean 0 and deviation 1; dtype SG_F32 or SG_BF16.
void fill_random(void *data, int32_t dtype, int64_t count, uint32_t seed, cudaStream_t stream);

}  // namespace sg::cuda
