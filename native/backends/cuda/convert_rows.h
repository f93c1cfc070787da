// Plain elements in another dtype: what products do first with an operand that is stored in another one than they run
// in.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sg::cuda {

// to[rows, columns], dense, = from, whose rows are `stride` elements apart, rounded to nearest even. from_dtype:
// SG_F32, SG_BF16 or SG_F16; to_dtype: SG_F32 or SG_BF16. Puts at most one kernel on the stream; the caller looks at
// cudaGetLastError.
void convert_rows(const void *from, int32_t from_dtype, int64_t rows, int64_t columns, int64_t stride, void *to,
                  int32_t to_dtype, cudaStream_t stream);

}  // namespace sg::cuda
