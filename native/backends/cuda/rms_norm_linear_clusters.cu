// rms_norm_linear for 9 to 64 tokens in bf16 and a bf16 weight: y[T, N] = alpha rms_norm(x[T, K]) weight[N, K]^T +
// bias[N], or y[T, N / 2] = activation(gate) * up of its two halves. See surogate_core/ops/rms_norm_linear.py.
//
// linear_clusters.cu with two ends, as rms_norm_linear.cu is linear_few.cu with two. Each block multiplies its part of
// x by the norm's weight where that lies in shared memory, while the weight is on its way; it sends the squares that it
// has added up along with its sums, and who finishes a column scales by the norm. A warp's rows of the weight are eight
// of the gate and the eight that belong to them.
#include <algorithm>

#include "activation.cuh"
#include "linear_clusters.cuh"
#include "norm_weight.cuh"
#include "rms_norm_linear.h"

namespace sg::cuda {
namespace {

using namespace clusters;

enum Activation : int { kNone, kSilu, kGeluTanh, kGelu };

struct NormedProblem {
  Product product;
  Weight norm;
  const void *bias;  // in y's dtype
  void *y;
  int64_t y_stride;  // elements from token to token
  float alpha, eps;
  Activation activation;
  bool packs, to_bf16;  // packs: what a thread finishes at once is loaded and stored at once

  __host__ __device__ bool gated() const { return activation != kNone; }
};

__device__ inline float activated(Activation activation, float x) {
  return activation == kSilu ? Silu::value(x) : activation == kGeluTanh ? GeluTanh::value(x) : Gelu::value(x);
}

// Where gated, a lane's two columns of the first tile are of the gate, those of the second let through.
struct NormedRows {
  PlainRows plain;
  int first, count;
  bool gated;

  __device__ explicit NormedRows(const NormedProblem &p)
      : plain(p.product), first(plain.first / 2), count(p.product.n / 2), gated(p.gated()) {}
  __device__ int operator()(int tile, int column) const {
    return gated ? min(first + column, count - 1) + tile * count : plain(tile, column);
  }
};

template <int tiles>
struct Squares {
  float own[16 * tiles], all[kMostRanks][16 * tiles];  // of this block's terms; of each block's

  static constexpr int bytes(int ranks) { return ranks * static_cast<int>(sizeof(own)); }

  // Called after a barrier.
  __device__ void send(const Exchange<tiles> &exchange) {
    const int rank = static_cast<int>(blockIdx.y);
    for (int i = static_cast<int>(threadIdx.x); i < exchange.ranks * 16 * tiles; i += kThreads) {
      const int token = i % (16 * tiles);
      send_to_block(i / (16 * tiles), &all[rank][token], exchange.arrived, own[token]);
    }
  }
  __device__ float sum(int ranks, int token) const {
    float total = 0.0f;
    for (int rank = 0; rank < ranks; ++rank) total += all[rank][token];
    return total;
  }
};

// The norm's weight for the first terms, into the second-level cache.
__device__ inline void bring_norm(const Weight &norm, const Share &share) {
  const int own = 8 * lane_index();
  if (warp_index() > 0 || own >= share.count) return;
  bring_closer(static_cast<const char *>(norm.data) + static_cast<int64_t>(share.first + own) * norm.element_bytes());
}

// Multiplies the terms that this thread has copied by the norm's weight, and adds up the squares of the warp's tokens.
template <int tiles>
__device__ inline void norm_terms(const NormedProblem &p, const Share &share, unsigned char *shared_terms,
                                  Squares<tiles> *squares) {
  constexpr int kPanel = Terms<tiles>::kPanel, kTokens = 16 * tiles / kWarps;
  const int own = 8 * lane_index();
  float sums[kTokens] = {}, factors[8] = {};
  const auto load_factors = [&](int first) {
    if (own < kPanel && first + own < share.count) p.norm.load_pack<8>(share.first + first + own, factors);
  };
  load_factors(0);
  wait_copies();
  unsigned char *at = shared_terms + warp_index() * row_bytes(tiles) + 2 * own;
  for (int first = 0; first < share.count; first += kPanel, at += panel_bytes(tiles)) {
    if (first > 0) load_factors(first);
    if (own >= kPanel) break;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      auto *const word = reinterpret_cast<uint4 *>(at + i * kWarps * row_bytes(tiles));
      Pack<bf16, 8> pack;
      memcpy(&pack, word, sizeof(pack));
      float values[8];
      to_floats<8>(pack, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sums[i] = fmaf(values[j], values[j], sums[i]);
        values[j] *= factors[j];
      }
      *word = {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
               pack_bf16(values[6], values[7])};
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float square = warp_sum(sums[i]);
    if (lane_index() == 0) squares->own[warp_index() + i * kWarps] = square;
  }
}

template <bool gated, bool packs, class Y, int tiles>
__device__ inline void finish(const NormedProblem &p, const Exchange<tiles> &exchange, const Squares<tiles> &squares) {
  constexpr int kColumns = gated ? 2 : 4;  // of y, of a thread
  const int count = gated ? p.product.n / 2 : p.product.n;
  const auto *bias = static_cast<const Y *>(p.bias);
  auto *y = static_cast<Y *>(p.y);
  for (int item = static_cast<int>(threadIdx.x); item < exchange.items(); item += kThreads) {
    const Place place = exchange.place(item);
    const int column = gated ? place.row / 2 : place.row, left = place.token < p.product.tokens ? count - column : 0;
    float added[kColumns] = {}, added_up[kColumns] = {};
    if (bias != nullptr) {
      load_upto<kColumns, packs>(bias + column, left, added);
      if (gated) load_upto<kColumns, packs>(bias + count + column, left, added_up);
    }
    if (item < kThreads) exchange.await();
    if (left <= 0) continue;
    const float square = squares.sum(exchange.ranks, place.token);
    const float factor = p.alpha * rsqrtf(square / static_cast<float>(p.product.k) + p.eps);
    const float4 sum = exchange.sum(item);
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    float result[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      result[i] = fmaf(factor, sums[i], added[i]);
      if constexpr (gated) result[i] = activated(p.activation, result[i]) * fmaf(factor, sums[2 + i], added_up[i]);
    }
    store_upto<kColumns, packs>(y + place.token * p.y_stride + column, left, result);
  }
}

template <int tiles>
__global__ void __launch_bounds__(kThreads, 2) rms_norm_linear_clusters(const NormedProblem p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Squares<tiles> squares;
  const Share share(p.product);
  const NormedRows of_weight(p);
  const WeightRows rows(p.product, share, of_weight);
  unsigned char *const shared_terms = shared + terms_offset(tiles);
  const Terms<tiles> terms(p.product, share, shared_terms);
  bring_weight(p.product, share, of_weight);
  bring_norm(p.norm, share);
  const Exchange<tiles> exchange(p.product, shared);
  exchange.begin(Squares<tiles>::bytes(exchange.ranks));
  wait_for_kernels_ahead();

  terms.copy(p.product, share);
  float sums[tiles][2][4] = {};
  const auto await_terms = [&] {
    exchange.begin_to_send();
    norm_terms<tiles>(p, share, shared_terms, &squares);
  };
  multiply_share<tiles>(rows, share, shared_terms, await_terms, sums);
  squares.send(exchange);
  exchange.send(sums);
  with_whole(p.packs, [&](auto packs) {
    with_whole(p.gated(), [&](auto gated) {
      if (p.to_bf16) {
        finish<decltype(gated)::value, decltype(packs)::value, bf16>(p, exchange, squares);
      } else {
        finish<decltype(gated)::value, decltype(packs)::value, float>(p, exchange, squares);
      }
    });
  });
#endif
}

Activation activation_of(const sg_call *call) {
  const char *name = attr_string(call, "activation", "none");
  if (!std::strcmp(name, "none")) return kNone;
  return !std::strcmp(name, "silu") ? kSilu : !std::strcmp(name, "gelu_tanh") ? kGeluTanh : kGelu;
}

bool read_normed(const sg_call *call, NormedProblem *p) {
  const sg_tensor *x = input(call, 0), *norm = input(call, 1), *weight = input(call, 2), *bias = input(call, 3);
  const sg_tensor *y = output(call, 0);
  if (!has_clusters() || !x || !norm || !weight || !y) return false;
  if (x->rank != 2 || weight->rank != 2 || y->rank != 2) return false;
  if (x->dtype != SG_BF16 || weight->dtype != SG_BF16 || !is_activation(y) || !is_weight_vector(norm, x)) return false;
  if (!has_dense_rows(x) || !has_dense_rows(weight) || !has_dense_rows(y)) return false;
  const int64_t tokens = x->shape[0], n = weight->shape[0], k = weight->shape[1];
  if (bias != nullptr && (bias->rank != 1 || bias->shape[0] != n || !is_dense(bias) || bias->dtype != y->dtype)) {
    return false;
  }
  p->activation = activation_of(call);
  if (p->gated() && (!known_activation(call) || n % 2 != 0)) return false;
  if (x->shape[1] != k || y->shape[0] != tokens || y->shape[1] != (p->gated() ? n / 2 : n)) return false;
  if (!read_product(x, weight, &p->product)) return false;
  constexpr size_t kOwn = sizeof(Squares<kMostTiles>);
  if (shared_bytes(tiles_of(p->product.tokens), p->product.cut.part) + kOwn > device().shared_memory) return false;
  p->norm = weight_of(call, 1);
  p->bias = bias != nullptr ? bias->data : nullptr;
  p->y = y->data;
  p->y_stride = y->strides[0];
  p->alpha = static_cast<float>(attr_float(call, "alpha", 1.0));
  p->eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  p->to_bf16 = y->dtype == SG_BF16;
  return true;
}

int32_t supports(const sg_call *call) {
  NormedProblem p;
  return read_normed(call, &p) ? clusters_score(p.product) : 0;
}

template <class Y>
bool packs_ends(const NormedProblem &p) {
  const auto *y = static_cast<const Y *>(p.y), *bias = static_cast<const Y *>(p.bias);
  if (p.gated()) return can_pack<2>(y, p.y_stride) && can_pack<2>(bias, p.product.n / 2);
  return can_pack<4>(y, p.y_stride) && can_pack<4>(bias, 0);
}

int32_t run(const sg_call *call) {
  NormedProblem p;
  if (!read_normed(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.product.tokens == 0 || p.product.n == 0) return SG_OK;
  if (!is_aligned<8>(p.product.x) || !is_aligned<8>(p.product.weight) || !p.norm.packable<8>()) {
    return run_rms_norm_linear(call);  // rows that are whole packs, but begin within one
  }
  p.packs = p.to_bf16 ? packs_ends<bf16>(p) : packs_ends<float>(p);
  return with_tiles(tiles_of(p.product.tokens), [&](auto tiles) {
    return launch_product(call, p.product, tiles, rms_norm_linear_clusters<decltype(tiles)::value>, p);
  });
}

constexpr sg_kernel kernel = describe_kernel("rms_norm_linear", "clusters", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
