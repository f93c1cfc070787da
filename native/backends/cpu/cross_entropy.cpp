// linear_cross_entropy and linear_cross_entropy_grad in fp32 vectors, for every dtype.
#include "cross_entropy.h"

namespace sg::cpu::SG_ISA {
namespace {

template <bool gradient>
int32_t supports(const sg_call *call) {
  CrossEntropy p;
  return p.read(call, gradient) ? isa_score(SG_ISA_NAME) : 0;
}

template <bool gradient>
constexpr sg_kernel kernel(const char *op) {
  return {sizeof(sg_kernel), op, "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC, -1, supports<gradient>,
          cross_entropy_workspace<FloatMicro, float, gradient>, nullptr, nullptr,
          cross_entropy_run<FloatMicro, float, gradient>};
}

constexpr sg_kernel linear_cross_entropy = kernel<false>("linear_cross_entropy");
constexpr sg_kernel linear_cross_entropy_grad = kernel<true>("linear_cross_entropy_grad");
SG_REGISTER_KERNEL(linear_cross_entropy);
SG_REGISTER_KERNEL(linear_cross_entropy_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA
