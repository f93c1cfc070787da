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
// 128 or 256. Wider ones, up to 512, go the way of fp32, at the general cores' rate.
#include "attention_f32.cuh"
#include "attention_forward.cuh"

namespace sg::cuda {
namespace {

struct ForwardOperands {
  HeadRows<const bf16> q, k, v;
  HeadRows<bf16> o;
  float *lse;
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
    if (seen) {
      state.see_keys(weights, queries, keys, shape.tanh_factor, shape.logit_factor, ranges + warp_row, warp, key);
    }
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
      start_forward_f32<dim, float>(call, shape, {HeadRows<const float>(q), HeadRows<const float>(k),
                                                  HeadRows<const float>(v), HeadRows<float>(o), lse});
      return;
    }
    const HeadRows<const bf16> queries(q), keys(k), values(v);
    const HeadRows<bf16> results(o);
    if constexpr (dim > kMaxTiledHeadDim) {
      start_forward_f32<dim, bf16>(call, shape, {queries, keys, values, results, lse});
    } else if (shape.tanh_factor > 0.0f) {
      start_forward<dim, true>(call, shape, {queries, keys, values, results, lse});
    } else {
      start_forward<dim, false>(call, shape, {queries, keys, values, results, lse});
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("attention", "flash", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
