// rms_norm_linear for a few tokens and a bf16 weight: y[T, N] = alpha rms_norm(x[T, K]) weight[N, K]^T + bias[N], or
// y[T, N / 2] = activation(gate) * up of its two halves; x and y in f32 or bf16. See surogate_core/ops/rms_norm_linear.py.
//
// linear_few.cu with two ends. Where it reads x, x is multiplied by the norm's weight and rounded to bf16 as it goes into
// the product, while its squares are added up; a token's sums are scaled by its norm at the end, so that nothing waits for
// it. And a block's rows of 16 are eight of the gate and the eight of what it lets through that belong to them, so that
// it can multiply the two. Two kernels less in each half of a layer, at 2 to 3 us each, are worth more than that every
// block norms its tokens again.
//
// A result's bits depend on its token, its weight row and K, not on how many tokens there are.
#include "activation.cuh"
#include "linear_few_bf16.cuh"
#include "norm_weight.cuh"

namespace sg::cuda {
namespace {

enum Activation : int { kNone, kSilu, kGeluTanh, kGelu };

struct NormedProblem {
  FewProblem product;
  int64_t weight_stride;
  const void *norm_weight;
  int32_t norm_dtype;
  float unit_offset, eps;
  Activation activation;
};

// The terms of one token, times the norm's weight; `squares` is of what this lane has taken.
template <class X, class W>
struct NormedTerms {
  const X *x;
  const W *weight;
  float offset;
  bool is_token;
  float squares = 0.0f;

  template <bool packed, bool whole>
  __device__ uint4 eight(int at, int left) {
    float values[8], factors[8];
    const int there = whole ? 8 : left;
    load_within<8, packed>(x + at, is_token ? there : 0, values);
    load_within<8, packed>(weight + at, there, factors);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      squares = fmaf(values[i], values[i], squares);
      values[i] *= factors[i] + offset;
    }
    return {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
            pack_bf16(values[6], values[7])};
  }
};

// Which columns of y a block makes, and of which rows of the weight: row i of its 16 * tiles.
template <int tiles, bool gated>
struct Columns {
  static constexpr int kCount = (gated ? 8 : 16) * tiles;
  int64_t first, count;  // count: of y

  __device__ Columns(int64_t tile, int64_t n) : first(tile * kCount), count(gated ? n / 2 : n) {}
  __device__ int64_t weight_row(int i) const {
    if constexpr (!gated) return min(first + i, count - 1);
    return min(first + i / 16 * 8 + i % 8, count - 1) + (i % 16 < 8 ? 0 : count);
  }
};

__device__ inline float activated(Activation activation, float x) {
  return activation == kSilu ? Silu::value(x) : activation == kGeluTanh ? GeluTanh::value(x) : Gelu::value(x);
}

template <int tiles, bool gated, bool packed, class X, class W>
__global__ void __launch_bounds__(kFewThreads, 2)
    rms_norm_linear_few(NormedProblem p, const X *x, const bf16 *weight, void *y, bool to_bf16) {
  constexpr int kRows = 16 * tiles;
  __shared__ float partial[kFewWarps][kRows * kFewStride], squares[kFewWarps][kFewTokens];
  const FewSlice slice(p.product.tokens);
  const Columns<tiles, gated> columns(slice.tile, p.product.n);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index(), group = lane / 4;
  const int k = static_cast<int>(p.product.k);
  if (packed && threadIdx.x < kRows) {
    const int64_t bytes = min(2 * p.product.k, kBytesAhead);
    bring_closer(weight + columns.weight_row(static_cast<int>(threadIdx.x)) * p.weight_stride,
                 static_cast<uint32_t>(bytes));
  }
  wait_for_kernels_ahead();

  const bf16 *rows[2 * tiles];
#pragma unroll
  for (int i = 0; i < 2 * tiles; ++i) rows[i] = weight + columns.weight_row(8 * i + group) * p.weight_stride;
  const int token = slice.first_token + group;
  const bool is_token = token < p.product.tokens;
  NormedTerms<X, W> terms{x + (is_token ? token * p.product.x_stride : 0), static_cast<const W *>(p.norm_weight),
                          p.unit_offset, is_token};
  float sums[tiles][4] = {};
  for (int begin = warp * kGroup; begin < k; begin += kFewWarps * kGroup) {
    const int at = begin + 8 * (lane % 4);
    with_whole(begin + kGroup <= k, [&](auto whole) {
      add_group<tiles, packed, decltype(whole)::value>(rows, terms, at, k - at, sums);
    });
  }
  leave_sums<tiles>(sums, partial[warp]);
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) terms.squares += __shfl_xor_sync(0xffffffffu, terms.squares, offset);
  if (lane % 4 == 0) squares[warp][group] = terms.squares;
  __syncthreads();

  constexpr int kColumns = Columns<tiles, gated>::kCount;
  const int own = static_cast<int>(threadIdx.x) % kColumns, of = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = columns.first + own, place = slice.first_token + of;
  if (of >= kFewTokens || place >= p.product.tokens || column >= columns.count) return;
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kFewWarps; ++i) square += squares[i][of];
  const float factor = p.product.alpha * rsqrtf(square / static_cast<float>(k) + p.eps);
  const auto product = [&](int row, int64_t index) {
    const float sum = factor * sum_of_warps<kRows>(partial, row, of);
    return p.product.bias != nullptr ? sum + bias_at(p.product, index) : sum;
  };
  float value;
  if constexpr (gated) {
    const int gate = own / 8 * 16 + own % 8;
    value = activated(p.activation, product(gate, column)) * product(gate + 8, columns.count + column);
  } else {
    value = product(own, column);
  }
  const int64_t to = place * p.product.y_stride + column;
  if (to_bf16) {
    static_cast<bf16 *>(y)[to] = from_float<bf16>(value);
  } else {
    static_cast<float *>(y)[to] = value;
  }
}

Activation activation_of(const sg_call *call) {
  const char *name = attr_string(call, "activation", "none");
  if (!std::strcmp(name, "none")) return kNone;
  return !std::strcmp(name, "silu") ? kSilu : !std::strcmp(name, "gelu_tanh") ? kGeluTanh : kGelu;
}

bool read_normed(const sg_call *call, NormedProblem *p) {
  const sg_tensor *x = input(call, 0), *norm = input(call, 1), *weight = input(call, 2), *bias = input(call, 3);
  const sg_tensor *y = output(call, 0);
  if (!x || !norm || !weight || !y || x->rank != 2 || weight->rank != 2 || y->rank != 2) return false;
  if (!is_activation(x) || !is_activation(y) || !has_dense_rows(x) || !has_dense_rows(y)) return false;
  if (weight->dtype != SG_BF16 || !has_dense_rows(weight) || !is_weight_vector(norm, x)) return false;
  const int64_t tokens = x->shape[0], n = weight->shape[0], k = weight->shape[1];
  if (k < 1 || k >= INT32_MAX - 4096 || ceil_div(tokens, kFewTokens) * ceil_div(n, 8) >= INT32_MAX) return false;
  if (bias != nullptr && (bias->rank != 1 || bias->shape[0] != n || !is_dense(bias))) return false;
  if (bias != nullptr && !is_activation(bias) && bias->dtype != SG_F16) return false;
  p->activation = activation_of(call);
  if (p->activation != kNone && (!known_activation(call) || n % 2 != 0)) return false;
  if (x->shape[1] != k || y->shape[0] != tokens || y->shape[1] != (p->activation == kNone ? n : n / 2)) return false;
  p->product = {static_cast<int>(tokens),
                n,
                k,
                x->strides[0],
                0,
                y->strides[0],
                static_cast<float>(attr_float(call, "alpha", 1.0)),
                bias != nullptr ? bias->data : nullptr,
                bias != nullptr ? bias->dtype : 0};
  p->weight_stride = weight->strides[0];
  p->norm_weight = norm->data;
  p->norm_dtype = norm->dtype;
  p->unit_offset = static_cast<float>(attr_float(call, "unit_offset", 0.0));
  p->eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  return true;
}

int32_t supports(const sg_call *call) {
  NormedProblem p;
  return read_normed(call, &p) ? 10 : 0;
}

template <bool gated, class X, class W>
void launch_typed(const sg_call *call, const NormedProblem &p) {
  const FewProblem &product = p.product;
  const X *x = data<const X>(input(call, 0));
  const bf16 *weight = data<const bf16>(input(call, 2));
  const sg_tensor *y = output(call, 0);
  const bool packed = product.k % 8 == 0 && can_pack<8>(x, product.tokens > 1 ? product.x_stride : 0) &&
                      can_pack<8>(weight, product.n > 1 ? p.weight_stride : 0) &&
                      can_pack<8>(static_cast<const W *>(p.norm_weight), 0);
  const int64_t columns = gated ? product.n / 2 : product.n;
  // As in linear_few.cu; and where there are few blocks, x is read and normed the less often.
  const bool wide =
      packed && product.tokens > kFewTokens / 2 && product.n >= 64 * static_cast<int64_t>(device().units);
  const auto kernel = wide     ? rms_norm_linear_few<2, gated, true, X, W>
                      : packed ? rms_norm_linear_few<1, gated, true, X, W>
                               : rms_norm_linear_few<1, gated, false, X, W>;
  const int64_t blocks = ceil_div(columns, (gated ? 8 : 16) * (wide ? 2 : 1)) * few_slices(product.tokens);
  launch_ahead(call, static_cast<unsigned>(blocks), kFewThreads, 0, kernel, p, x, weight, y->data, y->dtype == SG_BF16);
}

template <class X, class W>
void launch(const sg_call *call, const NormedProblem &p) {
  if (p.activation != kNone) {
    launch_typed<true, X, W>(call, p);
  } else {
    launch_typed<false, X, W>(call, p);
  }
}

int32_t run(const sg_call *call) {
  NormedProblem p;
  if (!read_normed(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.product.tokens == 0 || p.product.n == 0) return SG_OK;
  with_type(input(call, 0), [&]<class X>(X) {
    if (p.norm_dtype == SG_F32) {
      launch<X, float>(call, p);
    } else if (p.norm_dtype == SG_BF16) {
      launch<X, bf16>(call, p);
    } else {
      launch<X, f16>(call, p);
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = row_invariant(describe_kernel("rms_norm_linear", "few", -1, supports, nullptr, run));
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
