// low_rank_grad: dlow[T, R] = alpha dy b and db[N, R] += alpha dy^T low, as the two products that it stands for. What
// makes it one op, that dy is read once, pays on devices; a core spends its time in the products.
#include "linear.h"

namespace sg::cpu::SG_ISA {
namespace {

// A call of linear_input_grad (dy, b) or linear_weight_grad (dy, low) on the operands of a low_rank_grad.
template <LinearOp op>
struct Product {
  static_assert(op != LinearOp::forward);
  const sg_tensor *inputs[3];
  sg_call call;

  explicit Product(const sg_call *whole)
      : inputs{input(whole, 0), input(whole, op == LinearOp::input_grad ? 1 : 2), nullptr}, call(*whole) {
    call.num_inputs = op == LinearOp::input_grad ? 3 : 2;
    call.inputs = inputs;
    call.num_outputs = 1;
    call.outputs = whole->outputs + (op == LinearOp::input_grad ? 0 : 1);
  }
  Product(const Product &) = delete;
};

int32_t supports(const sg_call *call) {
  if (call->num_inputs != 3 || call->num_outputs != 2) return 0;
  LinearProblem p;
  const Product<LinearOp::input_grad> low(call);
  const Product<LinearOp::weight_grad> weight(call);
  if (!read_linear<LinearOp::input_grad>(&low.call, &p) || !read_linear<LinearOp::weight_grad>(&weight.call, &p)) {
    return 0;
  }
  return output(call, 0)->dtype == input(call, 0)->dtype ? isa_score(SG_ISA_NAME) : 0;
}

size_t workspace(const sg_call *call) {
  const Product<LinearOp::input_grad> low(call);
  const Product<LinearOp::weight_grad> weight(call);
  const size_t for_low = gemm_workspace<LinearOp::input_grad, FloatMicro>(&low.call);
  const size_t for_weight = gemm_workspace<LinearOp::weight_grad, FloatMicro>(&weight.call);
  return for_low < for_weight ? for_weight : for_low;
}

int32_t run(const sg_call *call) {
  const Product<LinearOp::input_grad> low(call);
  const Product<LinearOp::weight_grad> weight(call);
  const int32_t result = gemm_run<LinearOp::input_grad, FloatMicro>(&low.call);
  return result == SG_OK ? gemm_run<LinearOp::weight_grad, FloatMicro>(&weight.call) : result;
}

constexpr sg_kernel low_rank_grad{sizeof(sg_kernel), "low_rank_grad", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC, -1,
                                  supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(low_rank_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA
