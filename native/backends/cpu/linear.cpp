// linear, linear_input_grad and linear_weight_grad in fp32 vectors, for every dtype: what runs where nothing faster
// does.
#include "linear.h"

namespace sg::cpu::SG_ISA {
namespace {

template <LinearOp op>
int32_t supports(const sg_call *call) {
  LinearProblem p;
  return read_linear<op>(call, &p) ? isa_score(SG_ISA_NAME) : 0;
}

constexpr sg_kernel linear = gemm_kernel<LinearOp::forward, FloatMicro>(SG_ISA_NAME, supports<LinearOp::forward>);
constexpr sg_kernel linear_input_grad =
    gemm_kernel<LinearOp::input_grad, FloatMicro>(SG_ISA_NAME, supports<LinearOp::input_grad>);
constexpr sg_kernel linear_weight_grad =
    gemm_kernel<LinearOp::weight_grad, FloatMicro>(SG_ISA_NAME, supports<LinearOp::weight_grad>);
SG_REGISTER_KERNEL(linear);
SG_REGISTER_KERNEL(linear_input_grad);
SG_REGISTER_KERNEL(linear_weight_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA
