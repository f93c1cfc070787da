// attention: o[t, h] = softmax(scale * q[t, h] . k[j, h / group]) . v over the tokens j that t sees in its document,
// and lse[t, h] = log of the sum of exponentials. q [T, H, head_dim], k and v [T, KV, ...], o [T, H, value_dim]; lse
// f32 [T, H].
//
// Floor: 2 (head_dim + value_dim) FLOPs for each visible pair and head, at the rate of mma.sync (on Hopper about 60 %
// of the tensor cores' rate, which only wgmma reaches); bytes do not matter from some 300 tokens a document.
//
// bf16: one block a tile of queries of one head (Dao, 2023: "FlashAttention-2"). Each of four warps owns 32 rows (16
// for heads of up to 256), so that a fragment of keys or values is used twice once it is in registers: shared memory,
// at 128 bytes a clock, would otherwise be what limits. The sums and the logits stay in registers. Keys of the next
// tile arrive while values are multiplied, values while keys are. Tiles that a warp does not see are skipped, and only
// tiles that it sees in part are masked. Long tiles start first. Heads are padded with zeros in shared memory to 64,
// 128 or 256.
#include "attention_f32.cuh"
#include "attention_tile.cuh"

namespace sg::cuda {
namespace {

struct ForwardOperands {
  HeadRows<const bf16> q, k, v;
  HeadRows<bf16> o;
  float *lse;
};

template <int DIM>
struct ForwardTile {
  static constexpr int kRowTiles = DIM <= 128 ? 2 : 1;  // of 16 rows, of a warp
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kQueries = kWarpRows * kAttentionThreads / 32;
  static constexpr int kKeys = 64;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = DIM / 8;
  static constexpr int kBlocks = DIM <= 64 ? 3 : 2;  // on a multiprocessor
  static constexpr size_t kBytes = (kQueries + 2 * kKeys) * kRowBytes<DIM> + kQueries * sizeof(TokenRange);
};

// Weights are relative to a base that the peak of the logits may exceed by this many powers of two: the sums, which
// have to shrink when the base moves, then hardly ever do, and weights and sums are as exact as before.
constexpr float kSlack = 8.0f;

// The softmax of 16 rows goes on: logits become weights, and what was summed shrinks where the base moves. base and
// total belong to rows lane / 4 and lane / 4 + 8; total is this lane's share. A row that has seen nothing has base
// -infinity.
template <int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void softmax_step(float (&logits)[KEY_TILES][4], float (&sums)[DIM_TILES][4],
                                             float (&base)[2], float (&total)[2], float factor) {
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float peak = -INFINITY;
#pragma unroll
    for (int nt = 0; nt < KEY_TILES; ++nt) {
      peak = fmaxf(peak, fmaxf(logits[nt][2 * half], logits[nt][2 * half + 1]));
    }
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    const bool moves = peak * factor > fmaf(base[half], factor, kSlack);
    const float next = moves ? peak : base[half];
    const float shift = next == -INFINITY ? 0.0f : next * factor;
    shrink[half] = moves ? fast_exp2(fmaf(base[half], factor, -shift)) : 1.0f;
    base[half] = next;
    float sum = 0.0f;
#pragma unroll
    for (int nt = 0; nt < KEY_TILES; ++nt) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        logits[nt][i] = fast_exp2(fmaf(logits[nt][i], factor, -shift));
        sum += logits[nt][i];
      }
    }
    total[half] = fmaf(total[half], shrink[half], sum);
  }
  if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int nt = 0; nt < DIM_TILES; ++nt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[nt][i] *= shrink[i / 2];
  }
}

// What a warp knows of its rows while it walks over the keys.
template <int DIM, bool CAPPED>
struct ForwardWarp {
  using Tile = ForwardTile<DIM>;
  static constexpr int kRowTiles = Tile::kRowTiles;
  float sums[kRowTiles][Tile::kDimTiles][4];
  float base[kRowTiles][2], total[kRowTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
      base[mt][0] = base[mt][1] = -INFINITY;
      total[mt][0] = total[mt][1] = 0.0f;
#pragma unroll
      for (int nt = 0; nt < Tile::kDimTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[mt][nt][i] = 0.0f;
      }
    }
  }

  // Hides the keys, of the tile that begins at `key`, outside the rows' ranges.
  __device__ __forceinline__ void mask(float (&logits)[kRowTiles][Tile::kKeyTiles][4], const TokenRange *ranges,
                                       int key) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TokenRange range = ranges[mt * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int nt = 0; nt < Tile::kKeyTiles; ++nt) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = key + nt * 8 + (lane % 4) * 2 + i;
            if (at < range.begin || at >= range.end) logits[mt][nt][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void cap(float (&logits)[kRowTiles][Tile::kKeyTiles][4], float factor) const {
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Tile::kKeyTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[mt][nt][i] = fast_tanh(logits[mt][nt][i] * factor);
      }
    }
  }

  // Weights of the keys of one tile, packed for the product with the values.
  __device__ __forceinline__ void see_keys(uint32_t (&weights)[kRowTiles][Tile::kKeyTiles / 2][4], uint32_t queries,
                                           uint32_t keys, const AttentionShape &shape, const TokenRange *ranges,
                                           const Bounds &bounds, int key) {
    float logits[kRowTiles][Tile::kKeyTiles][4];
    multiply_rows<DIM>(logits, queries, keys);
    if constexpr (CAPPED) cap(logits, shape.tanh_factor);
    if (!bounds.cover(key, Tile::kKeys)) mask(logits, ranges, key);
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
      softmax_step(logits[mt], sums[mt], base[mt], total[mt], shape.logit_factor);
    }
    pack_fragments(weights, logits);
  }

  // The factor that makes sums a mean, and lse. NaN where a row saw nothing.
  __device__ __forceinline__ void finish(float (&factor)[kRowTiles][2], float *lse, const AttentionShape &shape,
                                         int first) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float all = total[mt][half];
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        const bool seen = !(all == 0.0f);
        factor[mt][half] = seen ? 1.0f / all : NAN;
        const int row = first + mt * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && row < shape.tokens) {
          lse[static_cast<int64_t>(row) * shape.heads] =
              seen ? (base[mt][half] * shape.logit_factor + log2f(all)) * kLn2 : NAN;
        }
      }
    }
  }
};

template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kAttentionThreads, ForwardTile<DIM>::kBlocks)
    attention_forward(const AttentionShape shape, const ForwardOperands operands) {
  using Tile = ForwardTile<DIM>;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char *const q_tile = shared;
  unsigned char *const k_tile = q_tile + Tile::kQueries * kRowBytes<DIM>;
  unsigned char *const v_tile = k_tile + Tile::kKeys * kRowBytes<DIM>;
  TokenRange *const ranges = reinterpret_cast<TokenRange *>(v_tile + Tile::kKeys * kRowBytes<DIM>);

  const int head = blockIdx.x % shape.heads, kv_head = head / shape.group;
  const int first = (static_cast<int>((gridDim.x - 1 - blockIdx.x) / shape.heads)) * Tile::kQueries;
  const HeadRows<const bf16> k = operands.k.head(kv_head), v = operands.v.head(kv_head);
  load_tile<DIM, Tile::kQueries>(q_tile, operands.q.head(head), first, shape.tokens);
  for (int i = threadIdx.x; i < Tile::kQueries; i += kAttentionThreads) {
    ranges[i] = keys_of(shape, min(first + i, shape.tokens - 1));
  }
  __syncthreads();
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
  const Bounds block = bounds_of(ranges, Tile::kQueries);
  const Bounds warp = bounds_of(ranges + warp_row, Tile::kWarpRows);
  if (block.begin < block.end) load_tile<DIM, Tile::kKeys>(k_tile, k, block.begin, shape.tokens);

  const uint32_t queries = shared_address(q_tile) + warp_row * kRowBytes<DIM> + lane_by_rows<DIM>();
  const uint32_t keys = shared_address(k_tile) + lane_by_columns<DIM>();
  const uint32_t values = shared_address(v_tile) + lane_by_rows<DIM>();
  ForwardWarp<DIM, CAPPED> state;
  state.clear();
  for (int key = block.begin; key < block.end; key += Tile::kKeys) {
    const bool seen = warp.touch(key, Tile::kKeys);
    uint32_t weights[Tile::kRowTiles][Tile::kKeyTiles / 2][4];
    wait_copies();
    __syncthreads();  // keys are here, and the last tile's values were used
    load_tile<DIM, Tile::kKeys>(v_tile, v, key, shape.tokens);
    if (seen) state.see_keys(weights, queries, keys, shape, ranges + warp_row, warp, key);
    wait_copies();
    __syncthreads();  // values are here, and the keys were used
    if (key + Tile::kKeys < block.end) load_tile<DIM, Tile::kKeys>(k_tile, k, key + Tile::kKeys, shape.tokens);
    if (seen) multiply_packed<DIM>(state.sums, weights, values);
  }
  wait_copies();
  __syncthreads();  // where no key was seen, the queries may arrive only now
  float factor[Tile::kRowTiles][2];
  state.finish(factor, operands.lse + head, shape, first + warp_row);
  unsigned char *const own = q_tile + warp_row * kRowBytes<DIM>;  // no other warp reads these queries
  put_fragments<DIM>(own, state.sums, factor);
  __syncwarp();
  store_rows<DIM, Tile::kWarpRows, DIM>(own, operands.o.head(head), first + warp_row, shape.tokens, 0);
}

template <int DIM, bool CAPPED>
void start_forward(const sg_call *call, const AttentionShape &shape, const ForwardOperands &operands) {
  using Tile = ForwardTile<DIM>;
  launch(attention_forward<DIM, CAPPED>, ceil_div(shape.tokens, Tile::kQueries) * shape.heads, kAttentionThreads,
         Tile::kBytes, stream(call), shape, operands);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *v = input(call, 2);
  if (!attention_supported(call, q, input(call, 1), v, input(call, 3))) return 0;
  const sg_tensor *o = output(call, 0);
  if (!is_heads(o, q->dtype) || o->shape[0] != q->shape[0] || o->shape[1] != q->shape[1]) return 0;
  if (o->shape[2] != v->shape[2] || !is_lse(output(call, 1), q)) return 0;
  return q->dtype == SG_BF16 ? 20 : 10;
}

int32_t run(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *o = output(call, 0);
  const AttentionShape shape(call, q, k, input(call, 3));
  if (shape.tokens == 0 || shape.heads == 0) return SG_OK;
  float *lse = data<float>(output(call, 1));
  with_head_dim(std::max(q->shape[2], v->shape[2]), [&](auto size) {
    constexpr int dim = decltype(size)::value;
    if (q->dtype == SG_F32) {
      start_forward_f32<dim>(call, shape, {HeadRows<const float>(q), HeadRows<const float>(k), HeadRows<const float>(v),
                                           HeadRows<float>(o), lse});
      return;
    }
    const ForwardOperands operands = {HeadRows<const bf16>(q), HeadRows<const bf16>(k), HeadRows<const bf16>(v),
                                      HeadRows<bf16>(o), lse};
    if (shape.tanh_factor > 0.0f) {
      start_forward<dim, true>(call, shape, operands);
    } else {
      start_forward<dim, false>(call, shape, operands);
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("attention", "flash", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
