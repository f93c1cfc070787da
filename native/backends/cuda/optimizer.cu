// global_norm(grad[n]) -> norm[1], and adamw(grad, norm?, hyper) -> param, m, v [n], over flat groups of parameters;
// every operand but norm and hyper is f32 or bf16 by itself.
//
// Both are bound by bytes: 2 or 4 n for the norm; for adamw what it reads and writes (16 n with bf16 param, m and v and
// an f32 grad). So each element is touched once, by 16-byte packs. The norm sums squares in float64: conversion keeps
// up with memory, and no square overflows or vanishes. adamw gives a thread eight elements, which is what one draw of
// Philox4x32-10 rounds for one tensor; its arithmetic is IEEE's, in the order of the CPU kernel, to the same bits.
// Where all that it writes is f32 nothing is drawn, and the eight are two packs of 16 bytes a block's width apart: if
// they lay side by side, each store of a warp would leave half of every 32-byte sector to the next one.
#include <algorithm>
#include <cstring>

#include "kernel.cuh"

namespace sg::cuda {
namespace {

bool is_flat(const sg_tensor *t) { return t != nullptr && is_activation(t) && t->rank == 1 && is_dense(t); }
bool is_flat_f32(const sg_tensor *t) { return is_flat(t) && t->dtype == SG_F32; }

// ---- global_norm: a block sums kBlock elements, a last block adds the sums. Which thread adds which element, and
// when, does not depend on alignment.

constexpr int kNormThreads = 512, kFinishThreads = 1024;
constexpr int64_t kBlock = 32768;

int64_t num_blocks(const sg_tensor *grad) { return ceil_div(num_elements(grad), kBlock); }

int32_t norm_supports(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *norm = output(call, 0);
  return is_flat(grad) && is_flat_f32(norm) && norm->shape[0] == 1 ? 10 : 0;
}
size_t norm_workspace(const sg_call *call) { return static_cast<size_t>(num_blocks(call->inputs[0])) * sizeof(double); }

// Sum over a block of `threads`; thread 0 gets it.
template <int threads>
__device__ double block_sum_double(double value) {
  __shared__ double warps[threads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0.0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < threads / 32; ++warp) total += warps[warp];
  }
  return total;
}

// The N elements at p, of which `left` exist; the others read as zero.
template <int N, class T>
__device__ inline void load_upto(const T *p, int64_t left, float (&to)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = j < left ? to_float(p[j]) : 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kNormThreads) sum_squares(const T *grad, int64_t n, bool packed, double *partials) {
  constexpr int N = 16 / sizeof(T), kUnroll = 4, kRounds = kBlock / (N * kNormThreads);
  constexpr int64_t kStep = N * kNormThreads;
  static_assert(kRounds % kUnroll == 0);
  const int64_t first = blockIdx.x * kBlock + threadIdx.x * N;
  double sum = 0.0;
  for (int round = 0; round < kRounds; round += kUnroll) {
    float values[kUnroll][N];
    const int64_t at = first + round * kStep;
    if (packed && at + (kUnroll - 1) * kStep + N <= n) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load(grad + at + u * kStep, values[u]);
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load_upto(grad + at + u * kStep, n - at - u * kStep, values[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < N; ++j) sum = fma(static_cast<double>(values[u][j]), static_cast<double>(values[u][j]), sum);
    }
  }
  sum = block_sum_double<kNormThreads>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kFinishThreads) finish_norm(const double *partials, int64_t count, float *norm) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) sum += partials[i];
  sum = block_sum_double<kFinishThreads>(sum);
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(sum));
}

int32_t norm_run(const sg_call *call) {
  const sg_tensor *grad = input(call, 0);
  const int64_t blocks = num_blocks(grad);
  double *partials = static_cast<double *>(call->workspace);
  if (blocks > 0) {
    with_type(grad, [&]<class T>(T) {
      const bool packed = can_pack<16 / sizeof(T)>(data<const T>(grad), 0);
      sum_squares<T><<<static_cast<unsigned>(blocks), kNormThreads, 0, stream(call)>>>(
          data<const T>(grad), num_elements(grad), packed, partials);
    });
  }
  finish_norm<<<1, kFinishThreads, 0, stream(call)>>>(partials, blocks, data<float>(output(call, 0)));
  return launched(call);
}

constexpr sg_kernel norm_kernel = describe_kernel("global_norm", "cuda", -1, norm_supports, norm_workspace, norm_run);
SG_REGISTER_KERNEL(norm_kernel);

// ---- adamw

constexpr int kAdamThreads = 256, kAdamBlocks = 4;  // blocks on a multiprocessor
constexpr int kEight = 8;                           // elements of a thread, and of a draw of random words

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
  return 10;
}

// Attributes, frozen when a graph is captured.
struct AdamSettings {
  double beta1, beta2, eps, weight_decay, max_grad_norm;
};

// What is the same for every element of a step: worked out once, in float64, from what changes between steps.
struct AdamStep {
  float grad_scale, beta1, one_less_beta1, beta2, one_less_beta2, decay, step_size, inverse_root_correction2, eps;
  uint32_t step;
  int32_t update;  // 0 where the norm is not finite: nothing is touched then
};
size_t adamw_workspace(const sg_call *) { return sizeof(AdamStep); }

__global__ void plan_step(AdamSettings settings, const float *norm, const float *hyper, AdamStep *plan) {
  const double learning_rate = hyper[0], step = hyper[1];
  double grad_scale = 1.0;
  if (settings.max_grad_norm > 0.0) {
    const double ratio = settings.max_grad_norm / (*norm + 1e-6);
    grad_scale = ratio > 1.0 ? 1.0 : ratio;
  }
  plan->grad_scale = static_cast<float>(grad_scale);
  plan->beta1 = static_cast<float>(settings.beta1);
  plan->one_less_beta1 = static_cast<float>(1.0 - settings.beta1);
  plan->beta2 = static_cast<float>(settings.beta2);
  plan->one_less_beta2 = static_cast<float>(1.0 - settings.beta2);
  plan->decay = static_cast<float>(1.0 - __dmul_rn(learning_rate, settings.weight_decay));
  plan->step_size = static_cast<float>(learning_rate / (1.0 - pow(settings.beta1, step)));
  plan->inverse_root_correction2 = static_cast<float>(1.0 / sqrt(1.0 - pow(settings.beta2, step)));
  plan->eps = static_cast<float>(settings.eps);
  plan->step = static_cast<uint32_t>(hyper[1]);
  plan->update = norm == nullptr || isfinite(*norm);
}

// The keys of the ten rounds of Philox4x32-10.
struct PhiloxKeys {
  uint32_t at[10][2];

  explicit PhiloxKeys(uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (auto &key : at) {
      key[0] = key0;
      key[1] = key1;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }
};

__device__ inline void draw(const PhiloxKeys &keys, uint64_t counter, uint32_t step, uint32_t tensor,
                            uint32_t (&words)[4]) {
  words[0] = static_cast<uint32_t>(counter);
  words[1] = static_cast<uint32_t>(counter >> 32);
  words[2] = step;
  words[3] = tensor;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(words[0]) * 0xD2511F53u;
    const uint64_t second = static_cast<uint64_t>(words[2]) * 0xCD9E8D57u;
    words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ keys.at[round][0];
    words[1] = static_cast<uint32_t>(second);
    words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ keys.at[round][1];
    words[3] = static_cast<uint32_t>(first);
  }
}

// Eight results as bf16: to nearest even, or, with random words, by adding a half-word below the mantissa and cutting.
// `numbers`: no result is NaN, to which nothing may be added.
__device__ inline uint4 round_eight(const float (&x)[kEight], bool stochastic, bool numbers, uint32_t (&words)[4]) {
  uint32_t packed[4];
  if (!stochastic) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]);
      packed[j] = *reinterpret_cast<const uint32_t *>(&pair);
    }
  } else {
    if (!numbers) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] &= (isnan(x[2 * j]) ? 0u : 0xffffu) | (isnan(x[2 * j + 1]) ? 0u : 0xffff0000u);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t low = __float_as_uint(x[2 * j]) + (words[j] & 0xffffu);
      const uint32_t high = __float_as_uint(x[2 * j + 1]) + (words[j] >> 16);
      packed[j] = __byte_perm(low, high, 0x7632);  // the upper halves of both
    }
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// A thread's eight elements: two runs of four, the second `gap` elements behind the first. 4: all side by side.
template <int gap>
constexpr int eight_at(int j) {
  return j < 4 ? j : gap + j - 4;
}

template <int gap, class T>
__device__ inline void load_eight(const T *p, float (&to)[kEight]) {
  if constexpr (gap == 4) {
    load(p, to);
  } else {
    const Pack<T, 4> first = load_pack<4>(p), second = load_pack<4>(p + gap);
#pragma unroll
    for (int j = 0; j < kEight; ++j) to[j] = to_float(j < 4 ? first.at[j % 4] : second.at[j % 4]);
  }
}
// Of which `left` elements exist from the first on; the others read as zero.
template <int gap, class T>
__device__ inline void load_eight_upto(const T *p, int64_t left, float (&to)[kEight]) {
#pragma unroll
  for (int j = 0; j < kEight; ++j) to[j] = eight_at<gap>(j) < left ? to_float(p[eight_at<gap>(j)]) : 0.0f;
}

// What the eight elements of a thread are written by.
template <int gap>
struct EightWriter {
  const PhiloxKeys &keys;
  uint64_t counter;
  uint32_t step;
  int64_t left;  // elements that exist from the first on
  bool whole, stochastic, numbers;

  template <class T>
  __device__ void store(T *to, const float (&x)[kEight], uint32_t tensor) const {
    if constexpr (std::is_same_v<T, float>) {
      if (whole) {
        const float halves[2][4] = {{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}};
        sg::cuda::store(to, halves[0]), sg::cuda::store(to + gap, halves[1]);
        return;
      }
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        if (eight_at<gap>(j) < left) to[eight_at<gap>(j)] = x[j];
      }
    } else {
      static_assert(gap == 4, "random words are drawn for eight elements in a row");
      uint32_t words[4];
      if (stochastic) draw(keys, counter, step, tensor, words);
      const uint4 bits = round_eight(x, stochastic, numbers, words);
      if (whole) {
        store_word(reinterpret_cast<uint4 *>(to), bits);
        return;
      }
      const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        if (j < left) to[j] = __ushort_as_bfloat16(static_cast<unsigned short>(pairs[j / 2] >> (j % 2 * 16)));
      }
    }
  }
};

template <class G, class P, class M, class V>
__global__ void __launch_bounds__(kAdamThreads, kAdamBlocks)
    adamw(const G *__restrict__ grad, P *__restrict__ param, M *__restrict__ m, V *__restrict__ v, int64_t n,
          bool packed, bool stochastic, const __grid_constant__ PhiloxKeys keys, const AdamStep *__restrict__ plan) {
  constexpr bool kRounds = !(std::is_same_v<P, float> && std::is_same_v<M, float> && std::is_same_v<V, float>);
  constexpr int kGap = kRounds ? 4 : 4 * kAdamThreads;
  const AdamStep s = *plan;
  if (!s.update) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kAdamThreads * kEight;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kAdamThreads * kEight + threadIdx.x * (kRounds ? kEight : 4);
  for (int64_t i = first; i < n; i += stride) {
    float g[kEight], p[kEight], mean[kEight], square[kEight];
    const bool whole = packed && i + eight_at<kGap>(kEight - 1) < n;
    if (whole) {
      load_eight<kGap>(grad + i, g), load_eight<kGap>(m + i, mean);
      load_eight<kGap>(v + i, square), load_eight<kGap>(param + i, p);
    } else {
      load_eight_upto<kGap>(grad + i, n - i, g), load_eight_upto<kGap>(m + i, n - i, mean);
      load_eight_upto<kGap>(v + i, n - i, square), load_eight_upto<kGap>(param + i, n - i, p);
    }
    float all = 0.0f;
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      const float gradient = __fmul_rn(g[j], s.grad_scale);
      mean[j] = __fmaf_rn(s.beta1, mean[j], __fmul_rn(s.one_less_beta1, gradient));
      square[j] = __fmaf_rn(s.beta2, square[j], __fmul_rn(__fmul_rn(s.one_less_beta2, gradient), gradient));
      const float denominator = __fmaf_rn(__fsqrt_rn(square[j]), s.inverse_root_correction2, s.eps);
      p[j] = __fmaf_rn(-s.step_size, __fdiv_rn(mean[j], denominator), __fmul_rn(p[j], s.decay));
      all += p[j];
    }
    // NaN in m or v is NaN in param, and NaN in any param is NaN in the sum (as infinities may be: each is looked at).
    const uint64_t counter = static_cast<uint64_t>(i) / kEight;
    const EightWriter<kGap> writer{keys, counter, s.step, n - i, whole, stochastic, !isnan(all)};
    writer.store(m + i, mean, 1);
    writer.store(v + i, square, 2);
    writer.store(param + i, p, 0);
  }
}

int32_t adamw_run(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *param = output(call, 0), *m = output(call, 1), *v = output(call, 2);
  const int64_t n = num_elements(grad);
  if (n == 0) return SG_OK;
  AdamStep *plan = static_cast<AdamStep *>(call->workspace);
  const AdamSettings settings{attr_float(call, "beta1", 0.9), attr_float(call, "beta2", 0.999),
                              attr_float(call, "eps", 1e-8), attr_float(call, "weight_decay", 0.0),
                              attr_float(call, "max_grad_norm", 0.0)};
  plan_step<<<1, 1, 0, stream(call)>>>(settings, data<const float>(input(call, 1)), data<const float>(input(call, 2)),
                                       plan);
  const PhiloxKeys keys(static_cast<uint64_t>(attr_int(call, "seed", 0)));
  const int64_t resident = static_cast<int64_t>(device().units) * kAdamBlocks;
  const int64_t blocks = std::min(ceil_div(n, kAdamThreads * kEight), resident);
  const bool stochastic = rounds(call, "stochastic");
  with_type(grad, [&]<class G>(G) {
    with_type(param, [&]<class P>(P) {
      with_type(m, [&]<class M>(M) {
        with_type(v, [&]<class V>(V) {
          const bool packed = can_pack<kEight>(data<const G>(grad), 0) && can_pack<kEight>(data<P>(param), 0) &&
                              can_pack<kEight>(data<M>(m), 0) && can_pack<kEight>(data<V>(v), 0);
          adamw<G, P, M, V><<<static_cast<unsigned>(blocks), kAdamThreads, 0, stream(call)>>>(
              data<const G>(grad), data<P>(param), data<M>(m), data<V>(v), n, packed, stochastic, keys, plan);
        });
      });
    });
  });
  return launched(call);
}

constexpr sg_kernel adamw_kernel = describe_kernel("adamw", "cuda", -1, adamw_supports, adamw_workspace, adamw_run);
SG_REGISTER_KERNEL(adamw_kernel);

}  // namespace
}  // namespace sg::cuda
