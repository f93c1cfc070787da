// attention_grad: from do, the gradient of attention's result, those of q, k and v. With p the weights of the softmax,
// made again from lse, and delta[t, h] = do . o:
//   dv[j] = sum p do      dlogit = p (do . v - delta) (1 - tanh^2 where capped)      dq = scale dlogit k
//   dk[j] = scale sum dlogit q, both sums over the queries that see j and over the heads of j's group.
// Shapes as in attention.cu; delta is f32 [T, H], in the workspace.
//
// Floor: 5 products over the visible pairs. Here it is 7, since each sum has blocks of its own: one block owns a tile
// of keys of one key-value head and walks over the heads of its group and their queries (4 products), another owns a
// tile of queries of one head and walks over its keys (3 products). Every sum then stays in registers and is added in
// one order, with no atomics and no partial sums in memory.
//
// bf16: a warp owns rows, so that what one product gives is, rounded, the left operand of the next: weights and their
// gradients stay in registers, but for what two warps exchange that share the keys of heads of 128. The next tile of
// the loop arrives while one is multiplied. Both kinds of blocks are started by one launch.
#include "attention_grad_call.cuh"
#include "attention_grad_f32.cuh"
#include "attention_tile.cuh"

namespace sg::cuda {
namespace {

struct BackwardOperands {
  HeadRows<const bf16> grad, q, k, v;  // grad: do
  HeadRows<bf16> dq, dk, dv;
  const float *lse, *delta;
};

// Tiles of the blocks for dk and dv. Both sums take many registers: heads of 128 spread 32 keys over a team of two
// warps, each of which has half of the dims, looks at half of the queries, and hands their weights to the other; heads
// of 256 sum their dims in two passes, each by a block of its own.
template <int DIM, int STAGES>
struct KeyGradTile {
  static constexpr int kRowTiles = DIM <= 128 ? 2 : 1;
  static constexpr int kTeam = DIM == 128 ? 2 : 1;  // warps that share keys
  static constexpr int kPasses = DIM <= 128 ? 1 : 2;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kTeams = kAttentionThreads / 32 / kTeam;
  static constexpr int kKeys = kWarpRows * kTeams;
  static constexpr int kQueries = DIM == 128 ? 64 : 32;
  static constexpr int kOwnQueries = kQueries / kTeam;
  static constexpr int kDims = DIM / kPasses / kTeam;  // that a warp sums
  static constexpr int kQueryBytes = kQueries * kRowBytes<DIM>;
  static constexpr int kKeyBytes = kKeys * kRowBytes<DIM>;
  static constexpr int kSharedBytes = kTeam > 1 ? kWarpRows * kRowBytes<kQueries> : 0;  // weights, of a team
  static constexpr size_t kBytes = 2 * kKeyBytes + STAGES * 2 * (kQueryBytes + kQueries * sizeof(float)) +
                                   kTeams * kSharedBytes + kKeys * sizeof(TokenRange);
};

// Tiles of the blocks for dq.
template <int DIM>
struct QueryGradTile {
  static constexpr int kRowTiles = DIM <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kQueries = kWarpRows * kAttentionThreads / 32;
  static constexpr int kKeys = 32;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = DIM / 8;
  static constexpr int kStages = DIM <= 128 ? 2 : 1;
  static constexpr int kQueryBytes = kQueries * kRowBytes<DIM>;
  static constexpr int kKeyBytes = kKeys * kRowBytes<DIM>;
  static constexpr size_t kBytes = 2 * kQueryBytes + kStages * 2 * kKeyBytes + kQueries * sizeof(TokenRange);
};

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&sums)[MT][NT][4]) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[mt][nt][i] = 0.0f;
    }
  }
}

// A product q.k becomes its weight, and the weight's gradient do.v that of the logit.
template <bool CAPPED>
__device__ __forceinline__ void weigh(float &product, float &grad, float lse, float delta,
                                      const AttentionShape &shape) {
  float logit = product, slope = 1.0f;
  if constexpr (CAPPED) {
    logit = fast_tanh(product * shape.tanh_factor);
    slope = 1.0f - logit * logit;
  }
  product = fast_exp2(fmaf(logit, shape.logit_factor, -lse * kLog2e));
  grad = product * (grad - delta);
  if constexpr (CAPPED) grad *= slope;
}

// Zeros in place of what the rows of a warp don't see of the tile that begins at `first`.
template <int MT, int NT>
__device__ __forceinline__ void hide(float (&weights)[MT][NT][4], float (&grads)[MT][NT][4], const TokenRange *ranges,
                                     int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TokenRange range = ranges[mt * 16 + half * 8 + lane / 4];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = first + nt * 8 + (lane % 4) * 2 + i;
          if (at >= range.begin && at < range.end) continue;
          weights[mt][nt][2 * half + i] = 0.0f;
          grads[mt][nt][2 * half + i] = 0.0f;
        }
      }
    }
  }
}

// What a row's sums are multiplied with at the end: NaN where the row belongs to no document.
template <int MT>
__device__ __forceinline__ void row_factors(float (&factor)[MT][2], const TokenRange *ranges, float value) {
  const int group = threadIdx.x % 32 / 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TokenRange range = ranges[mt * 16 + half * 8 + group];
      factor[mt][half] = range.begin < range.end ? value : NAN;
    }
  }
}

// Starts to load queries, their do, lse and delta, of one head.
template <int DIM, class Tile>
__device__ __forceinline__ void load_queries(unsigned char *tiles, float *columns, const BackwardOperands &operands,
                                             const AttentionShape &shape, int head, int first) {
  load_tile<DIM, Tile::kQueries>(tiles, operands.q.head(head), first, shape.tokens);
  load_tile<DIM, Tile::kQueries>(tiles + Tile::kQueryBytes, operands.grad.head(head), first, shape.tokens);
  const int which = static_cast<int>(threadIdx.x) / Tile::kQueries, at = first + threadIdx.x % Tile::kQueries;
  if (which < 2) {
    const bool valid = at < shape.tokens;
    const int64_t from = static_cast<int64_t>(valid ? at : 0) * shape.heads + head;
    copy_async_4(shared_address(columns + threadIdx.x), (which == 0 ? operands.lse : operands.delta) + from, valid);
  }
}

// What a warp sums while it walks over the queries: dk and dv of its team's keys, its own dims.
template <int DIM, class Tile, bool CAPPED>
struct KeyGradWarp {
  float dk[Tile::kRowTiles][Tile::kDims / 8][4], dv[Tile::kRowTiles][Tile::kDims / 8][4];
  int team, member;
  unsigned char *shared_weights;  // [keys, queries] of the team, in bf16
  const TokenRange *ranges;       // of its keys
  Bounds bounds;

  using Packed = uint32_t[Tile::kRowTiles][Tile::kOwnQueries / 16][4];

  __device__ __forceinline__ int first_dim(int pass) const { return (pass * Tile::kTeam + member) * Tile::kDims; }

  __device__ __forceinline__ void sync_team() const {
    static_assert(Tile::kTeam == 1 || Tile::kTeams == 2);
    if (team == 0) {
      sync_warps<1, 32 * Tile::kTeam>();
    } else {
      sync_warps<2, 32 * Tile::kTeam>();
    }
  }

  // sums += weights * rows, of all queries of the tile at `rows`: this warp's, then those of the rest of its team.
  __device__ __forceinline__ void add(float (&sums)[Tile::kRowTiles][Tile::kDims / 8][4], Packed &weights,
                                      uint32_t rows, bool first) {
    constexpr int own_bytes = Tile::kOwnQueries * kRowBytes<DIM>, chunks = Tile::kOwnQueries / 8;
    if constexpr (Tile::kTeam > 1) {
      if (!first) sync_team();  // the others have read the last ones
      put_packed<Tile::kQueries>(shared_weights, weights, member * chunks);
    }
    multiply_packed<DIM>(sums, weights, rows + member * own_bytes);
    if constexpr (Tile::kTeam > 1) {
      sync_team();
#pragma unroll
      for (int i = 1; i < Tile::kTeam; ++i) {
        const int other = (member + i) % Tile::kTeam;
        get_packed<Tile::kQueries>(weights, shared_address(shared_weights) + lane_by_rows<Tile::kQueries>(),
                                   other * chunks);
        multiply_packed<DIM>(sums, weights, rows + other * own_bytes);
      }
    }
  }

  // keys: address of the team's keys, values behind them; queries: of a stage, their do behind them.
  __device__ __forceinline__ void add_queries(uint32_t keys, uint32_t queries, const float *columns, int pass,
                                              const AttentionShape &shape, int first) {
    const int own = member * Tile::kOwnQueries;
    const uint32_t own_queries = queries + own * kRowBytes<DIM> + lane_by_columns<DIM>();
    float weights[Tile::kRowTiles][Tile::kOwnQueries / 8][4], grads[Tile::kRowTiles][Tile::kOwnQueries / 8][4];
    multiply_rows<DIM>(weights, keys, own_queries);
    multiply_rows<DIM>(grads, keys + Tile::kKeyBytes, own_queries + Tile::kQueryBytes);
#pragma unroll
    for (int nt = 0; nt < Tile::kOwnQueries / 8; ++nt) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = own + nt * 8 + threadIdx.x % 4 * 2 + i;
        const float lse = columns[column], delta = columns[Tile::kQueries + column];
#pragma unroll
        for (int mt = 0; mt < Tile::kRowTiles; ++mt) {
          weigh<CAPPED>(weights[mt][nt][i], grads[mt][nt][i], lse, delta, shape);
          weigh<CAPPED>(weights[mt][nt][i + 2], grads[mt][nt][i + 2], lse, delta, shape);
        }
      }
    }
    if (!bounds.cover(first + own, Tile::kOwnQueries)) hide(weights, grads, ranges, first + own);
    Packed packed;
    const uint32_t rows = queries + lane_by_rows<DIM>() + first_dim(pass) * 2;
    pack_fragments(packed, weights);
    add(dv, packed, rows + Tile::kQueryBytes, true);
    pack_fragments(packed, grads);
    add(dk, packed, rows, false);
  }

  // own: the team's rows of the tile of keys, which nobody reads any more; those of values are as far behind as the
  // tile.
  __device__ __forceinline__ void store(unsigned char *own, const BackwardOperands &operands,
                                        const AttentionShape &shape, int kv_head, int first, int pass) const {
    const int dim = first_dim(pass);
    unsigned char *const keys = own + dim * 2, *const values = keys + Tile::kKeyBytes;
    float factor[Tile::kRowTiles][2];
    row_factors(factor, ranges, shape.scale);
    put_fragments<DIM>(keys, dk, factor);
    row_factors(factor, ranges, 1.0f);
    put_fragments<DIM>(values, dv, factor);
    __syncwarp();
    store_rows<DIM, Tile::kWarpRows, Tile::kDims>(keys, operands.dk.head(kv_head), first, shape.tokens, dim);
    store_rows<DIM, Tile::kWarpRows, Tile::kDims>(values, operands.dv.head(kv_head), first, shape.tokens, dim);
  }
};

// dk and dv of one tile of keys; `number` counts passes, heads and tiles.
template <int DIM, int STAGES, bool CAPPED>
__device__ __forceinline__ void sum_key_grads(const AttentionShape &shape, const BackwardOperands &operands,
                                              unsigned char *shared, int number) {
  using Tile = KeyGradTile<DIM, STAGES>;
  unsigned char *const k_tile = shared, *const v_tile = k_tile + Tile::kKeyBytes;
  unsigned char *const q_tiles = v_tile + Tile::kKeyBytes;  // a stage: queries, then their do
  unsigned char *const weights = q_tiles + STAGES * 2 * Tile::kQueryBytes;
  float *const columns = reinterpret_cast<float *>(weights + Tile::kTeams * Tile::kSharedBytes);  // lse, then delta
  TokenRange *const ranges = reinterpret_cast<TokenRange *>(columns + STAGES * 2 * Tile::kQueries);

  const int pass = number % Tile::kPasses, kv_head = number / Tile::kPasses % shape.kv_heads;
  const int first = number / Tile::kPasses / shape.kv_heads * Tile::kKeys;
  load_tile<DIM, Tile::kKeys>(k_tile, operands.k.head(kv_head), first, shape.tokens);
  load_tile<DIM, Tile::kKeys>(v_tile, operands.v.head(kv_head), first, shape.tokens);
  for (int i = threadIdx.x; i < Tile::kKeys; i += kAttentionThreads) {
    ranges[i] = queries_of(shape, min(first + i, shape.tokens - 1));
  }
  __syncthreads();
  const Bounds block = bounds_of(ranges, Tile::kKeys);
  KeyGradWarp<DIM, Tile, CAPPED> state;
  clear(state.dk);
  clear(state.dv);
  state.team = static_cast<int>(threadIdx.x) / 32 / Tile::kTeam;
  state.member = static_cast<int>(threadIdx.x) / 32 % Tile::kTeam;
  state.shared_weights = weights + state.team * Tile::kSharedBytes;
  const int team_row = state.team * Tile::kWarpRows, last_head = (kv_head + 1) * shape.group - 1;
  state.ranges = ranges + team_row;
  state.bounds = bounds_of(state.ranges, Tile::kWarpRows);

  const uint32_t keys = shared_address(k_tile) + team_row * kRowBytes<DIM> + lane_by_rows<DIM>();
  int head = kv_head * shape.group, query = block.begin, stage = 0;
  bool more = block.begin < block.end;
  if (more) load_queries<DIM, Tile>(q_tiles, columns, operands, shape, head, query);
  while (more) {
    const int now = query;
    query += Tile::kQueries;
    if (query >= block.end) {
      query = block.begin;
      ++head;
    }
    more = head <= last_head;
    wait_copies();
    __syncthreads();
    const int other = STAGES == 2 ? stage ^ 1 : 0;
    if (STAGES == 2 && more) {
      load_queries<DIM, Tile>(q_tiles + other * 2 * Tile::kQueryBytes, columns + other * 2 * Tile::kQueries, operands,
                              shape, head, query);
    }
    if (state.bounds.touch(now, Tile::kQueries)) {
      state.add_queries(keys, shared_address(q_tiles) + stage * 2 * Tile::kQueryBytes,
                        columns + stage * 2 * Tile::kQueries, pass, shape, now);
    }
    if (STAGES == 1) {
      __syncthreads();
      if (more) load_queries<DIM, Tile>(q_tiles, columns, operands, shape, head, query);
    }
    stage = other;
  }
  wait_copies();
  __syncthreads();  // the keys were used; where no query sees one, they may arrive only now
  state.store(k_tile + team_row * kRowBytes<DIM>, operands, shape, kv_head, first + team_row, pass);
}

// Starts to load keys and their values, of one head.
template <int DIM>
__device__ __forceinline__ void load_keys(unsigned char *tiles, const HeadRows<const bf16> &k,
                                          const HeadRows<const bf16> &v, int first, int limit) {
  using Tile = QueryGradTile<DIM>;
  load_tile<DIM, Tile::kKeys>(tiles, k, first, limit);
  load_tile<DIM, Tile::kKeys>(tiles + Tile::kKeyBytes, v, first, limit);
}

// What a warp knows of its rows while it walks over the keys: dq, and lse and delta of rows lane / 4 and lane / 4 + 8.
template <int DIM, bool CAPPED>
struct QueryGradWarp {
  using Tile = QueryGradTile<DIM>;
  float dq[Tile::kRowTiles][Tile::kDimTiles][4];
  float lse[Tile::kRowTiles][2], delta[Tile::kRowTiles][2];

  __device__ __forceinline__ void start(const BackwardOperands &operands, const AttentionShape &shape, int head,
                                        int first) {
    clear(dq);
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles * 2; ++i) {
      const int row = min(first + i * 8 + static_cast<int>(threadIdx.x) % 32 / 4, shape.tokens - 1);
      lse[i / 2][i % 2] = operands.lse[static_cast<int64_t>(row) * shape.heads + head];
      delta[i / 2][i % 2] = operands.delta[static_cast<int64_t>(row) * shape.heads + head];
    }
  }

  // queries: address of the warp's queries, their do behind the tile; keys: of a stage.
  __device__ __forceinline__ void add_keys(uint32_t queries, uint32_t keys, const AttentionShape &shape,
                                           const TokenRange *ranges, const Bounds &bounds, int first) {
    float weights[Tile::kRowTiles][Tile::kKeyTiles][4], grads[Tile::kRowTiles][Tile::kKeyTiles][4];
    multiply_rows<DIM>(weights, queries, keys + lane_by_columns<DIM>());
    multiply_rows<DIM>(grads, queries + Tile::kQueryBytes, keys + Tile::kKeyBytes + lane_by_columns<DIM>());
#pragma unroll
    for (int mt = 0; mt < Tile::kRowTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Tile::kKeyTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weigh<CAPPED>(weights[mt][nt][i], grads[mt][nt][i], lse[mt][i / 2], delta[mt][i / 2], shape);
        }
      }
    }
    if (!bounds.cover(first, Tile::kKeys)) hide(weights, grads, ranges, first);
    uint32_t packed[Tile::kRowTiles][Tile::kKeyTiles / 2][4];
    pack_fragments(packed, grads);
    multiply_packed<DIM>(dq, packed, keys + lane_by_rows<DIM>());
  }
};

// dq of one tile of queries; `number` counts heads and tiles.
template <int DIM, bool CAPPED>
__device__ __forceinline__ void sum_query_grads(const AttentionShape &shape, const BackwardOperands &operands,
                                                unsigned char *shared, int number) {
  using Tile = QueryGradTile<DIM>;
  unsigned char *const q_tile = shared;  // then their do
  unsigned char *const k_tiles = q_tile + 2 * Tile::kQueryBytes;  // a stage: keys, then values
  TokenRange *const ranges = reinterpret_cast<TokenRange *>(k_tiles + Tile::kStages * 2 * Tile::kKeyBytes);

  const int head = number % shape.heads, kv_head = head / shape.group;
  const int first = number / shape.heads * Tile::kQueries;
  const HeadRows<const bf16> k = operands.k.head(kv_head), v = operands.v.head(kv_head);
  load_tile<DIM, Tile::kQueries>(q_tile, operands.q.head(head), first, shape.tokens);
  load_tile<DIM, Tile::kQueries>(q_tile + Tile::kQueryBytes, operands.grad.head(head), first, shape.tokens);
  for (int i = threadIdx.x; i < Tile::kQueries; i += kAttentionThreads) {
    ranges[i] = keys_of(shape, min(first + i, shape.tokens - 1));
  }
  __syncthreads();
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
  const Bounds block = bounds_of(ranges, Tile::kQueries);
  const Bounds warp = bounds_of(ranges + warp_row, Tile::kWarpRows);
  QueryGradWarp<DIM, CAPPED> state;
  state.start(operands, shape, head, first + warp_row);
  const uint32_t queries = shared_address(q_tile) + warp_row * kRowBytes<DIM> + lane_by_rows<DIM>();
  int stage = 0;
  if (block.begin < block.end) load_keys<DIM>(k_tiles, k, v, block.begin, shape.tokens);
  for (int key = block.begin; key < block.end; key += Tile::kKeys) {
    const bool more = key + Tile::kKeys < block.end;
    wait_copies();
    __syncthreads();
    const int other = Tile::kStages == 2 ? stage ^ 1 : 0;
    if (Tile::kStages == 2 && more) {
      load_keys<DIM>(k_tiles + other * 2 * Tile::kKeyBytes, k, v, key + Tile::kKeys, shape.tokens);
    }
    if (warp.touch(key, Tile::kKeys)) {
      state.add_keys(queries, shared_address(k_tiles) + stage * 2 * Tile::kKeyBytes, shape, ranges + warp_row, warp,
                     key);
    }
    if (Tile::kStages == 1) {
      __syncthreads();
      if (more) load_keys<DIM>(k_tiles, k, v, key + Tile::kKeys, shape.tokens);
    }
    stage = other;
  }
  wait_copies();
  __syncthreads();  // where no key was seen, the queries may arrive only now
  float factor[Tile::kRowTiles][2];
  row_factors(factor, ranges + warp_row, shape.scale);
  unsigned char *const own = q_tile + warp_row * kRowBytes<DIM>;  // no other warp reads these queries
  put_fragments<DIM>(own, state.dq, factor);
  __syncwarp();
  store_rows<DIM, Tile::kWarpRows, DIM>(own, operands.dq.head(head), first + warp_row, shape.tokens, 0);
}

// Blocks that sum dk and dv come first: they are fewer and longer, and those of dq, the longest of them first, fill the
// multiprocessors as they become free.
template <int DIM, int STAGES, bool CAPPED>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_backward(const AttentionShape shape, const BackwardOperands operands, int key_blocks) {
  extern __shared__ __align__(1024) unsigned char shared[];
  if (static_cast<int>(blockIdx.x) < key_blocks) {
    sum_key_grads<DIM, STAGES, CAPPED>(shape, operands, shared, blockIdx.x);
  } else {
    sum_query_grads<DIM, CAPPED>(shape, operands, shared, gridDim.x - 1 - blockIdx.x);
  }
}

template <int DIM, int STAGES, bool CAPPED>
void start_stages(const sg_call *call, const AttentionShape &shape, const BackwardOperands &operands) {
  using KeyTile = KeyGradTile<DIM, STAGES>;
  using QueryTile = QueryGradTile<DIM>;
  const int64_t key_blocks = ceil_div(shape.tokens, KeyTile::kKeys) * shape.kv_heads * KeyTile::kPasses;
  const int64_t query_blocks = ceil_div(shape.tokens, QueryTile::kQueries) * shape.heads;
  launch(attention_backward<DIM, STAGES, CAPPED>, key_blocks + query_blocks, kAttentionThreads,
         std::max(KeyTile::kBytes, QueryTile::kBytes), stream(call), shape, operands, static_cast<int>(key_blocks));
}

template <int DIM, bool CAPPED>
void start_backward(const sg_call *call, const AttentionShape &shape, const BackwardOperands &operands) {
  if constexpr (DIM == 128) {
    if (KeyGradTile<DIM, 2>::kBytes > device().shared_memory) {  // as on sm_89 and sm_120
      return start_stages<DIM, 1, CAPPED>(call, shape, operands);
    }
  }
  start_stages<DIM, DIM <= 128 ? 2 : 1, CAPPED>(call, shape, operands);
}

int32_t supports(const sg_call *call) {
  const AttentionGradCall c(call);
  if (!attention_grad_supported(call, c)) return 0;
  const bool wide = std::max(c.q->shape[2], c.v->shape[2]) > kMaxTiledHeadDim;
  if (wide && kBackwardBytesF32<kMaxHeadDim> > device().shared_memory) return 0;
  return c.q->dtype == SG_BF16 ? 20 : 10;
}

size_t workspace(const sg_call *call) {
  return static_cast<size_t>(num_elements(input(call, 5))) * sizeof(float);
}

int32_t run(const sg_call *call) {
  const sg_tensor *grad = input(call, 0), *q = input(call, 1), *k = input(call, 2), *v = input(call, 3);
  const sg_tensor *o = input(call, 4), *dq = output(call, 0), *dk = output(call, 1), *dv = output(call, 2);
  const AttentionShape shape(call, q, k, input(call, 6));
  if (shape.tokens == 0 || shape.heads == 0) return SG_OK;
  const float *lse = data<const float>(input(call, 5));
  float *delta = static_cast<float *>(call->workspace);
  with_type(q, [&](auto element) {
    using T = decltype(element);
    start_delta(call, shape, HeadRows<const T>(grad), HeadRows<const T>(o), delta);
  });
  with_head_dim(std::max(q->shape[2], v->shape[2]), [&](auto size) {
    constexpr int dim = decltype(size)::value;
    if (q->dtype == SG_F32) {
      start_backward_f32<dim, float>(
          call, shape,
          {HeadRows<const float>(grad), HeadRows<const float>(q), HeadRows<const float>(k), HeadRows<const float>(v),
           HeadRows<float>(dq), HeadRows<float>(dk), HeadRows<float>(dv), lse, delta});
      return;
    }
    const HeadRows<const bf16> grads(grad), queries(q), keys(k), values(v);
    const HeadRows<bf16> of_queries(dq), of_keys(dk), of_values(dv);
    if constexpr (dim > kMaxTiledHeadDim) {
      start_backward_f32<dim, bf16>(
          call, shape, {grads, queries, keys, values, of_queries, of_keys, of_values, lse, delta});
    } else if (shape.tanh_factor > 0.0f) {
      start_backward<dim, true>(
          call, shape, {grads, queries, keys, values, of_queries, of_keys, of_values, lse, delta});
    } else {
      start_backward<dim, false>(
          call, shape, {grads, queries, keys, values, of_queries, of_keys, of_values, lse, delta});
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("attention_grad", "flash", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
