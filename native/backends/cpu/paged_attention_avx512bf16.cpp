// paged_attention whose large blocks (a prompt, or a chunk of one) are multiplied by AVX-512 bf16 dot products, with
// sums in fp32 and the weights of the softmax rounded to bf16. A token then has other last bits in a chunk than decoded.
#include "attention_paged.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports(const sg_call *call) { return paged_bf16_supported(call) ? Bf16DotArithmetic::score() : 0; }
int32_t run(const sg_call *call) { return Paged<Bf16DotArithmetic, bf16, bf16>(call).run(); }

const sg_kernel kernel = {
    sizeof(sg_kernel), "paged_attention", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC, 0,
    supports, paged_workspace<Bf16DotArithmetic>, nullptr, nullptr, run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
