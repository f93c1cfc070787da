// linear, linear_input_grad and linear_weight_grad in fp32 vectors, for every dtype: what runs where nothing faster does.
#include "linear.h"

namespace sg::cpu::SG_ISA {
namespace {

template <LinearOp op>
int32_t supports(const sg_call *call) {
  LinearProblem p;
  return read_linear<op>(call, &p) ? isa_score(SG_ISA_NAME) : 0;
}

template <LinearOp op>
constexpr sg_kernel kernel(const char *name, int in_place_input) {
  const int traits = in_place_input >= 0 ? SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE : SG_TRAIT_DETERMINISTIC;
  return {sizeof(sg_kernel), name, "cpu", SG_ISA_NAME, static_cast<uint32_t>(traits), in_place_input, supports<op>,
          gemm_workspace<op, FloatMicro>, nullptr, nullptr, gemm_run<op, FloatMicro>};
}

constexpr sg_kernel linear = kernel<LinearOp::forward>("linear", 3);
constexpr sg_kernel linear_input_grad = kernel<LinearOp::input_grad>("linear_input_grad", 2);
constexpr sg_kernel linear_weight_grad = kernel<LinearOp::weight_grad>("linear_weight_grad", -1);
SG_REGISTER_KERNEL(linear);
SG_REGISTER_KERNEL(linear_input_grad);
SG_REGISTER_KERNEL(linear_weight_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA
