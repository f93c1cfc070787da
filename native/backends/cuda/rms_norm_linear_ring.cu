// rms_norm_linear for 1 to 8 tokens and a bf16 weight on compute capability 9.0; see linear_ring.cuh.
#include "linear_ring.cuh"

namespace sg::cuda {
namespace {

bool read_ring(const sg_call *call, RingProblem *p) {
  *p = {};
  return read_normed(call, p) && p->norm.packable<8>() && p->product.tokens <= kFewTokens &&
         ring_supports(*p, input(call, 0), input(call, 2));
}

[[maybe_unused]] int32_t supports(const sg_call *call) {
  RingProblem p;
  return read_ring(call, &p) ? 20 : 0;
}

[[maybe_unused]] int32_t run(const sg_call *call) {
  RingProblem p;
  if (!read_ring(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.product.n == 0) return SG_OK;
  const sg_tensor *x = input(call, 0), *weight = input(call, 2);
  p.fixed = is_fixed(weight) && is_fixed(input(call, 1));
  int32_t status = SG_OK;
  with_type(x, [&]<class X>(X) {
    status = p.activation == kNone ? run_ring<X, true, false>(call, p, x, weight, nullptr)
                                   : run_ring<X, true, true>(call, p, x, weight, nullptr);
  });
  return status;
}

#ifdef SUROGATE_HOPPER
constexpr sg_kernel kernel = describe_kernel("rms_norm_linear", "ring", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);
#endif

}  // namespace
}  // namespace sg::cuda
