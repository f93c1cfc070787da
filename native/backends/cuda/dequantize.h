// Rows of a quantised weight as plain elements: what products with block formats call before a GEMM.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace sg::cuda {

bool is_quantised(int32_t dtype);  // one of SG_Q4_0 .. SG_Q6_K

// Elements and bytes of a block; 1 and 0 for a dtype that is not quantised.
int64_t block_elements(int32_t dtype);
int64_t block_bytes(int32_t dtype);

// out[rows, columns], dense, = the values of `rows` dense rows of `columns` elements (a multiple of the block) in
// `dtype`. Out is float or __nv_bfloat16. To decode rows [a, b) of a weight give blocks + a * (columns /
// block_elements) * block_bytes and b - a. Full speed where `out` is aligned to 16 bytes and `blocks` to 8; right
// everywhere. Puts one kernel on the stream, none for an empty matrix; the caller looks at cudaGetLastError, as
// `launched` does.
template <class Out>
void dequantize_rows(const void *blocks, int32_t dtype, int64_t rows, int64_t columns, Out *out, cudaStream_t stream);

extern template void dequantize_rows(const void *, int32_t, int64_t, int64_t, float *, cudaStream_t);
extern template void dequantize_rows(const void *, int32_t, int64_t, int64_t, __nv_bfloat16 *, cudaStream_t);

}  // namespace sg::cuda
