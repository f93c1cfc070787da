// bias_grad: dbias[N] += the column sums of dy[T, N], over tokens in order.
#include <algorithm>

#include "kernel.h"
#include "simd.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kColumns = 64;  // of a task

int32_t supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *out = output(call, 0);
  if (dy == nullptr || out == nullptr || dy->rank != 2 || out->rank != 1 || !all_dense(call)) return 0;
  if (!is_activation(dy) || out->dtype != SG_F32 || out->shape[0] != dy->shape[1]) return 0;
  return isa_score(SG_ISA_NAME);
}

template <class T>
void run_as(const sg_call *call) {
  const sg_tensor *dy = input(call, 0);
  const int64_t tokens = dy->shape[0], n = dy->shape[1];
  const T *source = data<const T>(dy);
  float *out = data<float>(output(call, 0));
  parallel_for(call, (n + kColumns - 1) / kColumns, [&](int64_t task, int) {
    const int64_t end = std::min(n, (task + 1) * kColumns);
    for (int64_t c = task * kColumns; c < end; c += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, end - c));
      vf sum = vzero();
      for (int64_t t = 0; t < tokens; ++t) sum = vadd(sum, vload_n(source + t * n + c, lanes));
      vstore_n(out + c, vadd(vload_n(out + c, lanes), sum), lanes);
    }
  });
}

int32_t run(const sg_call *call) {
  if (input(call, 0)->dtype == SG_F32) run_as<float>(call);
  else run_as<bf16>(call);
  return SG_OK;
}

constexpr sg_kernel bias_grad{sizeof(sg_kernel), "bias_grad", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC, -1,
                              supports, nullptr, nullptr, nullptr, run};
SG_REGISTER_KERNEL(bias_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA
