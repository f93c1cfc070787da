// dequantize(weight[N, K] in a block format) -> y[N, K] in bf16 or f32; and dequantize_rows, the same for other
// kernels.
//
// Floor: the blocks once and the result once, 2.6 to 3.1 bytes an element into bf16. The matrix is one list of
// blocks; each thread decodes 16 elements (quant.cuh), so that a warp has some 300 to 550 bytes of codes in flight
// and its stores fill whole sectors.
#include "dequantize.h"

#include "quant.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;

template <int32_t dtype, bool fast, class Out>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const uint8_t *blocks, int64_t num_parts, Out *out) {
  using Format = Decoder<dtype>;
  constexpr unsigned kParts = Format::kElements / 16;
  const uint64_t index = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= static_cast<uint64_t>(num_parts)) return;
  const uint64_t block = index / kParts;
  Out *to = out + block * Format::kElements;
  Format::template decode<fast>(
      blocks + block * Format::kBytes, static_cast<int>(index % kParts),
      [&](int offset, const float(&values)[8]) { store_upto<8, fast>(to + offset, 8, values); });
}

}  // namespace

bool is_quantised(int32_t dtype) {
  return with_format(dtype, [](auto) {});
}
int64_t block_elements(int32_t dtype) {
  int64_t elements = 1;
  with_format(dtype, [&](auto format) { elements = Decoder<format.value>::kElements; });
  return elements;
}
int64_t block_bytes(int32_t dtype) {
  int64_t bytes = 0;
  with_format(dtype, [&](auto format) { bytes = Decoder<format.value>::kBytes; });
  return bytes;
}

template <class Out>
void dequantize_rows(const void *blocks, int32_t dtype, int64_t rows, int64_t columns, Out *out, cudaStream_t stream) {
  const int64_t num_parts = rows * columns / 16;
  if (num_parts == 0) return;
  const auto grid = static_cast<unsigned>(ceil_div(num_parts, kThreads));
  const uint8_t *from = static_cast<const uint8_t *>(blocks);
  with_format(dtype, [&](auto format) {
    constexpr int32_t kDtype = decltype(format)::value;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % Decoder<kDtype>::kAlignment == 0;
    if (aligned && is_aligned<8>(out)) {
      dequantize_kernel<kDtype, true><<<grid, kThreads, 0, stream>>>(from, num_parts, out);
    } else {
      dequantize_kernel<kDtype, false><<<grid, kThreads, 0, stream>>>(from, num_parts, out);
    }
  });
}
template void dequantize_rows(const void *, int32_t, int64_t, int64_t, float *, cudaStream_t);
template void dequantize_rows(const void *, int32_t, int64_t, int64_t, bf16 *, cudaStream_t);

namespace {

int32_t supports(const sg_call *call) {
  const sg_tensor *weight = input(call, 0), *y = output(call, 0);
  if (!weight || !y || !all_dense(call) || weight->rank != 2 || !same_shape(weight, y)) return 0;
  return is_quantised(weight->dtype) && is_activation(y) ? 10 : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *weight = input(call, 0), *y = output(call, 0);
  with_type(y, [&]<class Y>(Y) {
    dequantize_rows(weight->data, weight->dtype, weight->shape[0], weight->shape[1], data<Y>(y), stream(call));
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("dequantize", "cuda", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
