// paged_attention in fp32 arithmetic, for caches and queries in fp32 or bf16; see attention_paged.h.
#include "attention_paged.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports(const sg_call *call) { return paged_supported(call) ? isa_score(SG_ISA_NAME) : 0; }

template <class T>
int32_t run_with(const sg_call *call) {
  return input(call, 1)->dtype == SG_F32 ? Paged<FloatArithmetic, T, float>(call).run()
                                         : Paged<FloatArithmetic, T, bf16>(call).run();
}

int32_t run(const sg_call *call) {
  return input(call, 0)->dtype == SG_F32 ? run_with<float>(call) : run_with<bf16>(call);
}

const sg_kernel kernel = {
    sizeof(sg_kernel), "paged_attention", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC | SG_TRAIT_ROW_INVARIANT, 0,
    supports, paged_workspace<FloatArithmetic>, nullptr, nullptr, run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
