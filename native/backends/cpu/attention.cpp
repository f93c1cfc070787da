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

// Where a token sees what comes after it, its document is always there as a whole, and blocks are cut from where it
// begins: a token's bits depend on no other document. Of causal ones there may be parts: see attention_paged.cpp.
int32_t supports_whole(const sg_call *call) { return attr_int(call, "causal", 1) == 0 ? supports(call) / 10 : 0; }

const sg_kernel whole_kernel = {sizeof(sg_kernel),
                                "attention",
                                "cpu",
                                "whole_" SG_ISA_NAME,
                                SG_TRAIT_DETERMINISTIC | SG_TRAIT_ROW_INVARIANT,
                                0,
                                supports_whole,
                                forward_workspace<FloatArithmetic>,
                                nullptr,
                                nullptr,
                                run};
SG_REGISTER_KERNEL(whole_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
