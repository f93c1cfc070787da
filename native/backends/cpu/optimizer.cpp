// global_norm(grad[n]) -> norm[1], and adamw(grad, norm?, hyper) -> param, m, v, both over flat groups of parameters.
// Each operand is f32 or bf16 by itself; an element type is a branch a vector, which memory hides.
#include "philox.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kBlock = 32768;

int64_t num_blocks(const sg_tensor *grad) { return (num_elements(grad) + kBlock - 1) / kBlock; }
bool is_flat(const sg_tensor *t) { return t != nullptr && is_activation(t) && t->rank == 1 && is_dense(t); }
bool is_flat_f32(const sg_tensor *t) { return is_flat(t) && t->dtype == SG_F32; }

// ---- global_norm: each block is summed in float64, and the blocks in order

int32_t norm_supports(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *norm = output(call, 0);
  return is_flat(grad) && is_flat_f32(norm) && norm->shape[0] == 1 ? isa_score(SG_ISA_NAME) : 0;
}
size_t norm_workspace(const sg_call *call) { return static_cast<size_t>(num_blocks(call->inputs[0])) * sizeof(double); }

#if defined(__AVX512F__)
using vd = __m512d;
inline vd vd_zero() { return _mm512_setzero_pd(); }
inline vd vd_load(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
inline vd vd_load(const bf16 *p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
}
inline vd vd_fma(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
#else
using vd = __m256d;
inline vd vd_zero() { return _mm256_setzero_pd(); }
inline vd vd_load(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
inline vd vd_load(const bf16 *p) {
  const __m128i words = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(words, 16)));
}
inline vd vd_fma(vd a, vd b, vd c) { return _mm256_fmadd_pd(a, b, c); }
#endif
constexpr int kDoubles = sizeof(vd) / sizeof(double);

template <class T>
double sum_of_squares(const T *p, int64_t n) {
  vd sums[4] = {vd_zero(), vd_zero(), vd_zero(), vd_zero()};
  int64_t i = 0;
  for (; i + 4 * kDoubles <= n; i += 4 * kDoubles) {
    for (int j = 0; j < 4; ++j) {
      const vd x = vd_load(p + i + j * kDoubles);
      sums[j] = vd_fma(x, x, sums[j]);
    }
  }
  double lanes[4 * kDoubles], total = 0.0;
  std::memcpy(lanes, sums, sizeof(lanes));
  for (double lane : lanes) total += lane;
  for (; i < n; ++i) total += static_cast<double>(to_float(p[i])) * to_float(p[i]);
  return total;
}

int32_t norm_run(const sg_call *call) {
  const sg_tensor *grad = input(call, 0);
  const int64_t n = num_elements(grad), blocks = num_blocks(grad);
  double *partials = static_cast<double *>(call->workspace);
  with_type(grad, [&]<class T>(T) {
    parallel_for(call, blocks, [&](int64_t block, int) {
      const int64_t begin = block * kBlock, left = n - begin;
      partials[block] = sum_of_squares(data<const T>(grad) + begin, left < kBlock ? left : kBlock);
    });
  });
  double total = 0.0;
  for (int64_t block = 0; block < blocks; ++block) total += partials[block];
  *data<float>(output(call, 0)) = static_cast<float>(std::sqrt(total));
  return SG_OK;
}

constexpr sg_kernel norm_kernel = describe_kernel("global_norm", -1, norm_supports, norm_workspace, norm_run);
SG_REGISTER_KERNEL(norm_kernel);

// ---- adamw

bool rounds(const sg_call *call, const char *how) {
  return std::strcmp(attr_string(call, "rounding", "nearest"), how) == 0;
}

int32_t adamw_supports(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *norm = input(call, 1), *hyper = input(call, 2);
  if (call->num_outputs != 3 || !is_flat(grad) || !is_flat_f32(hyper) || hyper->shape[0] != 4) return 0;
  if (norm == nullptr && attr_float(call, "max_grad_norm", 0.0) > 0.0) return 0;
  if (norm != nullptr && (!is_flat_f32(norm) || norm->shape[0] != 1)) return 0;
  if (!rounds(call, "nearest") && !rounds(call, "stochastic")) return 0;
  for (int i = 0; i < 3; ++i) {
    if (!is_flat(output(call, i)) || output(call, i)->shape[0] != grad->shape[0]) return 0;
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
    grad_scale = ratio > 1.0 ? 1.0 : ratio;
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

// The first n floats of v plus random bits below bf16's mantissa, cut to bf16. Infinity stays, and so does NaN, to
// which nothing is added.
inline void vstore_stochastic(bf16 *p, vf v, const uint16_t *random, int n) {
#if defined(__AVX512F__)
  const __m512i noise = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(random)));
  const __mmask16 numbers = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
  const __m512i bits = _mm512_castps_si512(v), sum = _mm512_mask_add_epi32(bits, numbers, bits, noise);
  const __m256i cut = _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1u), cut);
#else
  const __m256i noise = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(random)));
  const __m256i numbers = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q));
  const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_and_si256(noise, numbers));
  const __m256i cut = _mm256_srli_epi32(sum, 16), packed = _mm256_packus_epi32(cut, cut);
  const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  std::memcpy(p, &halves, static_cast<size_t>(n) * sizeof(bf16));
#endif
}

// Elements that one batch of random words serves: two half-words a word.
constexpr int64_t kGroup = 2 * kPhiloxBatch;
static_assert(kBlock % kGroup == 0);

// A flat operand of either type.
struct Flat {
  void *data;
  bool half;

  explicit Flat(const sg_tensor *t) : data(t->data), half(t->dtype == SG_BF16) {}
  SG_FLATTEN vf load(int64_t i, int n) const {
    if (half) return vload_upto(static_cast<const bf16 *>(data) + i, n);
    return vload_upto(static_cast<const float *>(data) + i, n);
  }
};

// A flat output, and the random bits of the group of elements that is being written.
struct Updated : Flat {
  bool stochastic;
  Philox generator;
  uint16_t random[kGroup];  // in the order of the elements

  Updated(const sg_call *call, int index, int64_t seed, uint32_t step)
      : Flat(output(call, index)),
        stochastic(half && rounds(call, "stochastic")),
        generator(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), step, static_cast<uint32_t>(index)) {}
  void draw(int64_t first) {
    if (!stochastic) return;
    vu words[2];
    generator.batch(static_cast<uint64_t>(first) / 8, words);
    std::memcpy(random, words, sizeof(words));
  }
  SG_FLATTEN void store(int64_t i, vf v, int n) {
    if (stochastic) {
      vstore_stochastic(static_cast<bf16 *>(data) + i, v, random + i % kGroup, n);
    } else if (half) {
      vstore_upto(static_cast<bf16 *>(data) + i, v, n);
    } else {
      vstore_upto(static_cast<float *>(data) + i, v, n);
    }
  }
};

// The order of operations, and where they are fused, is that of the CUDA kernel: both give the same bits.
SG_FLATTEN inline void adamw_vector(const AdamStep &s, const Flat &grad, Updated &param, Updated &m, Updated &v,
                                    int64_t i, int n) {
  const vf gradient = vmul(grad.load(i, n), s.grad_scale);
  const vf mean = vfma(s.beta1, m.load(i, n), vmul(s.one_less_beta1, gradient));
  const vf square = vfma(s.beta2, v.load(i, n), vmul(vmul(s.one_less_beta2, gradient), gradient));
  const vf denominator = vfma(vsqrt(square), s.inverse_root_correction2, s.eps);
  const vf shrunk = vmul(param.load(i, n), s.decay);
  m.store(i, mean, n);
  v.store(i, square, n);
  param.store(i, vfnma(s.step_size, vdiv(mean, denominator), shrunk), n);
}

int32_t adamw_run(const sg_call *call) {
  if (const sg_tensor *norm = input(call, 1); norm != nullptr && !std::isfinite(*data<float>(norm))) return SG_OK;
  const AdamStep s = plan_step(call);
  const Flat grad(input(call, 0));
  const int64_t count = num_elements(input(call, 0)), seed = attr_int(call, "seed", 0);
  const uint32_t step = static_cast<uint32_t>(data<float>(input(call, 2))[1]);
  parallel_for(call, num_blocks(input(call, 0)), [&](int64_t block, int) {
    Updated param(call, 0, seed, step), m(call, 1, seed, step), v(call, 2, seed, step);
    const int64_t stop = std::min(count, (block + 1) * kBlock);
    for (int64_t first = block * kBlock; first < stop; first += kGroup) {
      param.draw(first), m.draw(first), v.draw(first);
      for_vectors(std::min(stop - first, kGroup), [&](int64_t offset, int n) SG_FLATTEN {
        adamw_vector(s, grad, param, m, v, first + offset, n);
      });
    }
  });
  return SG_OK;
}

constexpr sg_kernel adamw_kernel = describe_kernel("adamw", -1, adamw_supports, nullptr, adamw_run);
SG_REGISTER_KERNEL(adamw_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
