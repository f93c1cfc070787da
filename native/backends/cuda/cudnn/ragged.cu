// doc_starts i32[M+1] to lengths i32[M] and, for each of up to 9 tensors, offsets i32[M+1] = doc_starts * row stride.
//
// A few KiB in and out: its floor is a launch. It runs before every attention, since doc_starts is data that changes
// from step to step. It is also where that data is checked: starts that do not ascend from 0 to T, or a document that
// is longer than the plan was built for, give empty documents to cuDNN, which then touches nothing, and NaN in the
// outputs.
#include "ragged.h"

namespace sg::cudnn {

namespace {

constexpr int kThreads = 1024;

__device__ bool is_valid(const Ragged &ragged, int index) {
  const int start = ragged.doc_starts[index];
  if (start < 0 || (index == 0 && start != 0)) return false;
  if (index == ragged.documents) return start == ragged.tokens;
  const int end = ragged.doc_starts[index + 1];
  return end >= start && end - start <= ragged.longest;
}

__global__ void __launch_bounds__(kThreads) ragged_kernel(const __grid_constant__ Ragged ragged) {
  bool valid = true;
  for (int i = threadIdx.x; i <= ragged.documents; i += kThreads) valid &= is_valid(ragged, i);
  valid = __syncthreads_and(valid);
  for (int i = threadIdx.x; i <= ragged.documents; i += kThreads) {
    const int start = valid ? ragged.doc_starts[i] : 0;
    if (i < ragged.documents) ragged.lengths[i] = valid ? ragged.doc_starts[i + 1] - start : 0;
    for (int tensor = 0; tensor < ragged.num_tensors; ++tensor) {
      ragged.offsets[tensor][i] = start * ragged.strides[tensor];
    }
  }
  if (valid) return;
  for (int i = 0; i < ragged.num_outputs; ++i) {
    const Ragged::Output &output = ragged.outputs[i];
    for (int64_t at = threadIdx.x; at < output.words * ragged.tokens; at += kThreads) {
      output.data[at / output.words * output.stride + at % output.words] = 0xffff;  // NaN in bf16, and in f32 by twos
    }
  }
}

}  // namespace

void launch_ragged(const Ragged &ragged, cudaStream_t stream) { ragged_kernel<<<1, kThreads, 0, stream>>>(ragged); }

}  // namespace sg::cudnn
