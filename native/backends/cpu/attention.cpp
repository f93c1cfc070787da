// attention on any supported processor, in fp32 arithmetic; see attention_forward.h.
#include "attention_forward.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports(const sg_call *call) { return forward_supported(call) ? isa_score(SG_ISA_NAME) : 0; }

int32_t run(const sg_call *call) {
  return input(call, 0)->dtype == SG_F32 ? Forward<FloatArithmetic, float>(call).run()
                                         : Forward<FloatArithmetic, bf16>(call).run();
}

const sg_kernel kernel = {sizeof(sg_kernel),
                          "attention",
                          "cpu",
                          SG_ISA_NAME,
                          SG_TRAIT_DETERMINISTIC,
                          0,
                          supports,
                          forward_workspace<FloatArithmetic>,
                          nullptr,
                          nullptr,
                          run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
