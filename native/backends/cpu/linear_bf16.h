// The kernels of the matrix-product ops for bf16 activations, on one of the bf16 Micros.
#pragma once

#include "cross_entropy.h"
#include "gemm_bf16.h"
#include "linear.h"

namespace sg::cpu::SG_ISA {

// Both operands that the processor multiplies are, or become, bf16: a weight of another dtype is rounded as it is
// packed.
template <LinearOp op, class Micro>
int32_t supports_bf16(const sg_call *call) {
  LinearProblem p;
  if (Micro::score() == 0 || !read_linear<op>(call, &p) || p.a.dtype != SG_BF16) return 0;
  return op == LinearOp::weight_grad && p.b.dtype != SG_BF16 ? 0 : Micro::score();
}

template <class Micro, bool gradient>
int32_t cross_entropy_supports_bf16(const sg_call *call) {
  CrossEntropy p;
  return Micro::score() > 0 && p.read(call, gradient) && p.x->dtype == SG_BF16 ? Micro::score() : 0;
}

template <class Micro, bool gradient>
constexpr sg_kernel cross_entropy_kernel(const char *op) {
  return {sizeof(sg_kernel),
          op,
          "cpu",
          SG_ISA_NAME,
          SG_TRAIT_DETERMINISTIC,
          -1,
          cross_entropy_supports_bf16<Micro, gradient>,
          cross_entropy_workspace<Micro, bf16, gradient>,
          nullptr,
          nullptr,
          cross_entropy_run<Micro, bf16, gradient>};
}

}  // namespace sg::cpu::SG_ISA

// At the end of a source file that defines `Micro`. A processor without the instructions doesn't see the kernels.
#define SG_REGISTER_BF16_KERNELS(Micro)                                                                            \
  namespace {                                                                                                      \
  constexpr sg_kernel linear =                                                                                     \
      gemm_kernel<LinearOp::forward, Micro>(SG_ISA_NAME, supports_bf16<LinearOp::forward, Micro>);                 \
  constexpr sg_kernel linear_input_grad =                                                                          \
      gemm_kernel<LinearOp::input_grad, Micro>(SG_ISA_NAME, supports_bf16<LinearOp::input_grad, Micro>);           \
  constexpr sg_kernel linear_weight_grad =                                                                         \
      gemm_kernel<LinearOp::weight_grad, Micro>(SG_ISA_NAME, supports_bf16<LinearOp::weight_grad, Micro>);         \
  constexpr sg_kernel linear_cross_entropy = cross_entropy_kernel<Micro, false>("linear_cross_entropy");           \
  constexpr sg_kernel linear_cross_entropy_grad = cross_entropy_kernel<Micro, true>("linear_cross_entropy_grad");  \
  [[maybe_unused]] const bool registered =                                                                         \
      Micro::score() > 0 && register_kernel(&linear) && register_kernel(&linear_input_grad) &&                     \
      register_kernel(&linear_weight_grad) && register_kernel(&linear_cross_entropy) &&                            \
      register_kernel(&linear_cross_entropy_grad);                                                                 \
  }
