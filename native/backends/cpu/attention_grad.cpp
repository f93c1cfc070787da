// attention_grad on any supported processor, in fp32 arithmetic; see attention_backward.h.
#include "attention_backward.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports(const sg_call *call) { return backward_supported(call) ? isa_score(SG_ISA_NAME) : 0; }

int32_t run(const sg_call *call) {
  return input(call, 1)->dtype == SG_F32 ? Backward<FloatArithmetic, float>(call).run()
                                         : Backward<FloatArithmetic, bf16>(call).run();
}

const sg_kernel kernel = {sizeof(sg_kernel),
                          "attention_grad",
                          "cpu",
                          SG_ISA_NAME,
                          SG_TRAIT_DETERMINISTIC,
                          0,
                          supports,
                          backward_workspace<FloatArithmetic>,
                          nullptr,
                          nullptr,
                          run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
