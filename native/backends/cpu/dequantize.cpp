// dequantize(weight[N, K] in a block format) -> y[N, K] in f32 or bf16, rounded once.
#include "quant.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports(const sg_call *call) {
  const sg_tensor *weight = input(call, 0), *y = output(call, 0);
  if (!weight || !y || !all_dense(call) || weight->rank != 2 || !same_shape(weight, y)) return 0;
  return is_quantised(weight->dtype) && is_activation(y) ? isa_score(SG_ISA_NAME) : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *weight = input(call, 0), *y = output(call, 0);
  const int64_t n = weight->shape[1], stride = row_bytes(weight->dtype, n);
  with_type(y, [&]<class Y>(Y) {
    parallel_rows(call, weight->shape[0], n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        decode_row(weight->dtype, data<const char>(weight) + row * stride, n, data<Y>(y) + row * n);
      }
    });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("dequantize", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
