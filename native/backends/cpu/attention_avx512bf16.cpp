// attention and attention_grad for bf16 operands, multiplied by AVX-512 bf16 dot products with sums in fp32. The
// weights of the softmax (and the gradients of the logits) are rounded to bf16 before they are multiplied.
#include "attention_backward.h"
#include "attention_forward.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports_forward(const sg_call *call) {
  return forward_supported(call) && input(call, 0)->dtype == SG_BF16 ? Bf16DotArithmetic::score() : 0;
}
int32_t run_forward(const sg_call *call) { return Forward<Bf16DotArithmetic, bf16>(call).run(); }

const sg_kernel forward_kernel = {sizeof(sg_kernel),
                                  "attention",
                                  "cpu",
                                  SG_ISA_NAME,
                                  SG_TRAIT_DETERMINISTIC,
                                  0,
                                  supports_forward,
                                  forward_workspace<Bf16DotArithmetic>,
                                  nullptr,
                                  nullptr,
                                  run_forward};
SG_REGISTER_KERNEL(forward_kernel);

int32_t supports_backward(const sg_call *call) {
  return backward_supported(call) && input(call, 1)->dtype == SG_BF16 ? Bf16DotArithmetic::score() : 0;
}
int32_t run_backward(const sg_call *call) { return Backward<Bf16DotArithmetic, bf16>(call).run(); }

const sg_kernel backward_kernel = {sizeof(sg_kernel),
                                   "attention_grad",
                                   "cpu",
                                   SG_ISA_NAME,
                                   SG_TRAIT_DETERMINISTIC,
                                   0,
                                   supports_backward,
                                   backward_workspace<Bf16DotArithmetic>,
                                   nullptr,
                                   nullptr,
                                   run_backward};
SG_REGISTER_KERNEL(backward_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
