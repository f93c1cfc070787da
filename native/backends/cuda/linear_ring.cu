// linear for 1 to 128 tokens and a bf16 weight on compute capability 9.0; see linear_ring.cuh.
#include "linear_ring.cuh"

namespace sg::cuda {
namespace {

bool read_ring(const sg_call *call, RingProblem *p) {
  *p = {};
  return read_few(call, &p->product) && input(call, 1)->dtype == SG_BF16 && has_dense_rows(input(call, 1)) &&
         p->product.tokens <= kRingTokens && ring_supports(*p, input(call, 0), input(call, 1));
}

[[maybe_unused]] int32_t supports(const sg_call *call) {
  RingProblem p;
  if (!read_ring(call, &p)) return 0;
  return is_quick(p.product) ? 35 : 2;
}

[[maybe_unused]] int32_t run(const sg_call *call) {
  RingProblem p;
  if (!read_ring(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.product.n == 0) return SG_OK;
  p.fixed = is_fixed(input(call, 1));
  return run_ring<bf16, false, false>(call, p, input(call, 0), input(call, 1), input(call, 3));
}

#ifdef SUROGATE_HOPPER
constexpr sg_kernel kernel = describe_kernel("linear", "ring", 3, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);
#endif

}  // namespace
}  // namespace sg::cuda
