// global_norm(grad[n]) -> norm[1], and adamw(grad, norm?, hyper) -> param, m, v, both over flat groups of parameters.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kBlock = 32768;

int64_t num_blocks(const sg_tensor *grad) { return (num_elements(grad) + kBlock - 1) / kBlock; }
bool is_flat_f32(const sg_tensor *t) { return t != nullptr && t->dtype == SG_F32 && t->rank == 1 && is_dense(t); }

// ---- global_norm: each block is summed in float64, and the blocks in order

int32_t norm_supports(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *norm = output(call, 0);
  return is_flat_f32(grad) && is_flat_f32(norm) && norm->shape[0] == 1 ? isa_score(SG_ISA_NAME) : 0;
}
size_t norm_workspace(const sg_call *call) { return static_cast<size_t>(num_blocks(call->inputs[0])) * sizeof(double); }

#if defined(__AVX512F__)
using vd = __m512d;
inline vd vd_zero() { return _mm512_setzero_pd(); }
inline vd vd_add_square(const float *p, vd sum) {
  const vd x = _mm512_cvtps_pd(_mm256_loadu_ps(p));
  return _mm512_fmadd_pd(x, x, sum);
}
#else
using vd = __m256d;
inline vd vd_zero() { return _mm256_setzero_pd(); }
inline vd vd_add_square(const float *p, vd sum) {
  const vd x = _mm256_cvtps_pd(_mm_loadu_ps(p));
  return _mm256_fmadd_pd(x, x, sum);
}
#endif
constexpr int kDoubles = sizeof(vd) / sizeof(double);

double sum_of_squares(const float *p, int64_t n) {
  vd sums[4] = {vd_zero(), vd_zero(), vd_zero(), vd_zero()};
  int64_t i = 0;
  for (; i + 4 * kDoubles <= n; i += 4 * kDoubles) {
    for (int j = 0; j < 4; ++j) sums[j] = vd_add_square(p + i + j * kDoubles, sums[j]);
  }
  double lanes[4 * kDoubles], total = 0.0;
  std::memcpy(lanes, sums, sizeof(lanes));
  for (double lane : lanes) total += lane;
  for (; i < n; ++i) total += static_cast<double>(p[i]) * p[i];
  return total;
}

int32_t norm_run(const sg_call *call) {
  const sg_tensor *grad = input(call, 0);
  const int64_t n = num_elements(grad), blocks = num_blocks(grad);
  double *partials = static_cast<double *>(call->workspace);
  parallel_for(call, blocks, [&](int64_t block, int) {
    const int64_t begin = block * kBlock, left = n - begin;
    partials[block] = sum_of_squares(data<float>(grad) + begin, left < kBlock ? left : kBlock);
  });
  double total = 0.0;
  for (int64_t block = 0; block < blocks; ++block) total += partials[block];
  *data<float>(output(call, 0)) = static_cast<float>(std::sqrt(total));
  return SG_OK;
}

constexpr sg_kernel norm_kernel = describe_kernel("global_norm", -1, norm_supports, norm_workspace, norm_run);
SG_REGISTER_KERNEL(norm_kernel);

// ---- adamw

int32_t adamw_supports(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *norm = input(call, 1), *hyper = input(call, 2);
  if (call->num_outputs != 3 || !is_flat_f32(grad) || !is_flat_f32(hyper) || hyper->shape[0] != 4) return 0;
  if (norm == nullptr && attr_float(call, "max_grad_norm", 0.0) > 0.0) return 0;
  if (norm != nullptr && (!is_flat_f32(norm) || norm->shape[0] != 1)) return 0;
  for (int i = 0; i < 3; ++i) {
    if (!is_flat_f32(output(call, i)) || output(call, i)->shape[0] != grad->shape[0]) return 0;
  }
  return isa_score(SG_ISA_NAME);
}

// What is the same for every element, worked out in float64.
struct AdamStep {
  vf grad_scale, beta1, one_less_beta1, beta2, one_less_beta2, decay, step_size, inverse_root_correction2, eps;
};

AdamStep plan_step(const sg_call *call) {
  const float *hyper = data<float>(input(call, 2));
  const double learning_rate = hyper[0], step = hyper[1];
  const double beta1 = attr_float(call, "beta1", 0.9), beta2 = attr_float(call, "beta2", 0.999);
  const double max_grad_norm = attr_float(call, "max_grad_norm", 0.0);
  double grad_scale = 1.0;
  if (max_grad_norm > 0.0) {
    const double ratio = max_grad_norm / (*data<float>(input(call, 1)) + 1e-6);
    grad_scale = ratio > 1.0 ? 1.0 : ratio;  // a norm that is NaN spreads, and the run stops on it
  }
  auto constant = [](double x) { return vset(static_cast<float>(x)); };
  return {constant(grad_scale),
          constant(beta1),
          constant(1.0 - beta1),
          constant(beta2),
          constant(1.0 - beta2),
          constant(1.0 - learning_rate * attr_float(call, "weight_decay", 0.0)),
          constant(learning_rate / (1.0 - std::pow(beta1, step))),
          constant(1.0 / std::sqrt(1.0 - std::pow(beta2, step))),
          constant(attr_float(call, "eps", 1e-8))};
}

int32_t adamw_run(const sg_call *call) {
  const sg_tensor *grad = input(call, 0);
  const float *g = data<float>(grad);
  float *param = data<float>(output(call, 0)), *m = data<float>(output(call, 1)), *v = data<float>(output(call, 2));
  const AdamStep s = plan_step(call);
  const int64_t count = num_elements(grad);
  parallel_for(call, num_blocks(grad), [&](int64_t block, int) {
    const int64_t begin = block * kBlock, left = count - begin;
    for_vectors(left < kBlock ? left : kBlock, [&](int64_t offset, int n) SG_FLATTEN {
      const int64_t i = begin + offset;
      const vf gradient = vmul(vload_upto(g + i, n), s.grad_scale);
      const vf mean = vfma(s.beta1, vload_upto(m + i, n), vmul(s.one_less_beta1, gradient));
      const vf square = vfma(s.beta2, vload_upto(v + i, n), vmul(vmul(s.one_less_beta2, gradient), gradient));
      const vf denominator = vfma(vsqrt(square), s.inverse_root_correction2, s.eps);
      const vf shrunk = vmul(vload_upto(param + i, n), s.decay);
      vstore_upto(m + i, mean, n);
      vstore_upto(v + i, square, n);
      vstore_upto(param + i, vfnma(s.step_size, vdiv(mean, denominator), shrunk), n);
    });
  });
  return SG_OK;
}

constexpr sg_kernel adamw_kernel = describe_kernel("adamw", -1, adamw_supports, nullptr, adamw_run);
SG_REGISTER_KERNEL(adamw_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
