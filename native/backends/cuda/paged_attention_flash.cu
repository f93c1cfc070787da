// paged_attention in bf16, heads of 64, 80, 96, 128 or 256. Floor: the cached rows that tokens see, once for every
// key-value head, or the multiplications of the runs, whichever is more.
//
// Which token is what is only known on the device: blocks of lone tokens (paged_attention_decode.cuh) and of runs
// (paged_attention_runs.cuh, on compute capability 9.0 paged_attention_prompts.cuh) both look, and each takes its own. Calls
// of few tokens have the former only, and so have those that say that every token is of another sequence (attribute
// `lone`). So a token's bits are the same in all calls in which it stands alone, and in all in which it belongs to a run or
// to none.
#include "paged_attention.h"
#include "paged_attention_batches.cuh"
#include "paged_attention_prompts.cuh"

namespace sg::cuda {
namespace {

constexpr int kMostGroup = 16;       // query heads of a key-value head
constexpr int kMostTokens = 1 << 24;
constexpr int kMostStride = 1 << 24;  // from row to row of a cache, in elements
constexpr int kMostLoneTokens = 16;  // of a call whose tokens are all taken as standing alone
constexpr int kTokenBlocks = 128;    // that share the lone tokens of a call with one of many heads, if it has more
constexpr int kEnoughBlocks = 512;   // for the device, of one token and key-value head each
constexpr int kEnoughShort = 192;    // where no token sees more than kShortKeys
constexpr int64_t kShortKeys = 4096;
static_assert(kWindowTokens == kDecodeThreads);

// Blocks of one key-value head that share the lone tokens of a call, where it has more tokens.
inline int token_blocks(int64_t kv_heads) {
  return std::max<int>(kTokenBlocks, static_cast<int>(ceil_div(kEnoughBlocks, kv_heads)));
}

// Whether a block makes a whole token of one key-value head. The workspace then holds no batches.
inline bool makes_whole_tokens(const PagedProblem &p, int tokens) {
  const int64_t longest = p.max_blocks * p.block_size, most = p.window > 0 ? std::min(p.window, longest) : longest;
  const int enough = most <= kShortKeys ? kEnoughShort : kEnoughBlocks;
  return tokens > kTokenBlocks || (tokens > kMostLoneTokens && int64_t{tokens} * (p.heads / p.group) >= enough);
}

// A token whose batches are made by one block. `shared`: batch_bytes. `tiles_made`: of each warp, so far.
template <int DIM, int COLUMNS, class Tiles>
__device__ __forceinline__ void make_token(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                           int token, int kv_head, bool early, Tiles &tiles, unsigned char *shared,
                                           float4 *halves, int &tiles_made) {
  using Warp = DecodeWarp<DIM, COLUMNS, Tiles>;
  constexpr int kQuads = 8 * COLUMNS * DIM / 4, kOwn = (kQuads + kDecodeThreads - 1) / kDecodeThreads;
  const int own_split = Warp::own_split(), elements = p.group * DIM, stride = split_bytes(p);
  const KeySplits cut(p, at.positions[token]);
  const PagedHead head = t.head(p, at, kv_head, at.sequence_ids[token]);
  Warp warp(tiles, tiles_made);
  warp.walk_over(cut, own_split, true);
  if (early) warp.start(head, cut, cut.own_tile());
  wait_for_kernels_ahead();
  warp.load_queries(t.q + token * p.q_stride + kv_head * p.group * DIM, p.group);
  warp.start(head, cut, cut.end);

  float4 sums[kOwn] = {};  // elements [4 i, 4 i + 4) of the batches so far, i = thread, thread + threads, ...
  Fold folds[kOwn];
  const auto with_own = [&](auto &&body) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int i = static_cast<int>(threadIdx.x) + own * kDecodeThreads;
      if (i < elements / 4) body(own, i);
    }
  };
  for (int first = 0; first < cut.splits; first += Warp::kSplits) {
    if (first > 0) __syncthreads();  // the batch before has been folded
    if (first + own_split < cut.splits) {
      warp.see(t.factors, head, cut, first + own_split, halves);
      float *const left = reinterpret_cast<float *>(shared + own_split * stride);
      warp.leave(left, reinterpret_cast<SplitWeights *>(left + elements), p.group, t.factors);
    }
    __syncthreads();
    with_own([&](int own, int i) {
      SplitWeights of_batch;
      const float4 sum = fold_batch<DIM>(p, shared, min(Warp::kSplits, cut.splits - first), i, &of_batch);
      float before, after;
      folds[own].add(of_batch, &before, &after);
      sums[own] = folded(sums[own], before, sum, after);
    });
  }
  bf16 *const to = t.o + token * p.o_stride + kv_head * elements;
  with_own([&](int own, int i) {
    const float total = folds[own].total;
    const float4 &sum = sums[own];
    const float mean[4] = {sum.x / total, sum.y / total, sum.z / total, sum.w / total};
    store<4>(to + 4 * i, mean);
  });
}

// The result of one token and key-value head: its mean, 0 for padding, NaN where it is not known. early: nothing of what
// that needs but q and the token's own row has to be waited for.
template <int DIM, int COLUMNS, class Tiles>
__device__ __forceinline__ void make_any_token(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                               int token, int kv_head, bool early, Tiles &tiles, unsigned char *shared,
                                               float4 *halves, int &tiles_made) {
  if (is_known(p, at.sequence_ids[token], at.positions[token])) {
    make_token<DIM, COLUMNS>(p, at, t, token, kv_head, early, tiles, shared, halves, tiles_made);
  } else {
    wait_for_kernels_ahead();
    leave_nothing<DIM>(p, at, t, token, kv_head);
  }
}

// Those of the tokens first, first + step, ... that stand alone, for one key-value head. Each thread looks at one of
// these: where no token stands alone, a block is done after a look.
template <int DIM, int COLUMNS>
__device__ __forceinline__ void find_lone_tokens(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                                 int tokens, int first, int step, int kv_head, unsigned char *shared) {
  using Tiles = DirectTiles<DIM>;
  __shared__ float4 halves[DecodeWarp<DIM, COLUMNS, Tiles>::kShared];
  __shared__ TokenBits own;
  Tiles tiles({}, shared);
  int tiles_made = 0;
  for (; first < tokens; first += kDecodeThreads * step) {
    const int token = first + static_cast<int>(threadIdx.x) * step;
    own.put(token < tokens && is_alone(p, at, tokens, token));  // padding goes with runs
    __syncthreads();
    for (int i = own.find(0, true); i < kDecodeThreads; i = own.find(i + 1, true)) {
      make_any_token<DIM, COLUMNS>(p, at, t, first + i * step, kv_head, false, tiles, shared, halves, tiles_made);
      __syncthreads();  // shared memory is free
    }
    __syncthreads();  // every warp has seen that there is no further one
  }
}

// Tokens that are all taken as standing alone: block (kv head, y) makes tokens y, y + gridDim.y, ...
template <int DIM, int COLUMNS, class Tiles>
__global__ void __launch_bounds__(kDecodeThreads, COLUMNS == 1 ? 3 : 2)
    paged_tokens(const PagedProblem p, const PagedIndices at, const PagedTensors t,
                 const __grid_constant__ typename Tiles::Maps maps, int tokens) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float4 halves[DecodeWarp<DIM, COLUMNS, Tiles>::kShared];
  Tiles tiles(maps, shared);
  int tiles_made = 0;
  t.early ? bring_kernel_behind() : wait_for_kernels_ahead();
  for (int token = static_cast<int>(blockIdx.y); token < tokens; token += static_cast<int>(gridDim.y)) {
    make_any_token<DIM, COLUMNS>(p, at, t, token, blockIdx.x, t.early, tiles, shared + Tiles::kBytes, halves, tiles_made);
    __syncthreads();  // shared memory is free
  }
}

// Lone tokens and runs side by side, as the former wait for memory and the latter multiply: of `lone_blocks` blocks (kv
// head, those that share its lone tokens), then those of paged_attention_runs.cuh.
template <int DIM, int COLUMNS, class Tiles>
__global__ void __launch_bounds__(kAttentionThreads, Tiles::kBlocks)
    paged_mixed(const PagedProblem p, const PagedIndices at, const PagedTensors t, const HeadRows<const bf16> q,
                const HeadRows<bf16> o, const __grid_constant__ typename Tiles::Maps maps, int tokens, int lone_blocks) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  wait_for_kernels_ahead();
  const int block = static_cast<int>(blockIdx.x), kv_heads = p.heads / p.group;
  if (block < lone_blocks) {
    find_lone_tokens<DIM, COLUMNS>(p, at, t, tokens, block / kv_heads, lone_blocks / kv_heads, block % kv_heads, tiles);
  } else {
    make_runs<DIM, Tiles>(p, at, t, maps, q, o, tokens, block - lone_blocks, tiles);
  }
}

// What each of `count` blocks that need so many bytes is given: more, where two of them on a multiprocessor come in fuller
// waves than three. Either have enough under way.
inline int bytes_of_block(int needed, int64_t count) {
  const int all = static_cast<int>(device().shared_memory);
  const int64_t two = 2 * device().units, three = 3 * device().units;
  const int each = needed + kReservedShared;
  const bool fits_three = 3 * each <= all && 4 * each > all;
  return fits_three && ceil_div(count, two) * two < ceil_div(count, three) * three ? all / 3 + 1 : needed;
}

template <int DIM, int COLUMNS, class Tiles>
void launch_tokens(const sg_call *call, const PagedProblem &p, const PagedTensors &t, const typename Tiles::Maps &maps,
                   int tokens) {
  const auto kernel = paged_tokens<DIM, COLUMNS, Tiles>;
  const int needed = Tiles::kBytes + batch_bytes(p), kv_heads = p.heads / p.group;
  const dim3 blocks(static_cast<unsigned>(kv_heads), static_cast<unsigned>(std::min(tokens, token_blocks(kv_heads))));
  const int64_t count = int64_t{blocks.x} * blocks.y;
  const int shared = bytes_of_block(needed, count);
  take_shared(kernel, shared, count);
  launch_ahead(call, blocks, kDecodeThreads, static_cast<size_t>(shared), kernel, p, paged_indices(call), t, maps,
               tokens);
}

// `with_lone`: with blocks for lone tokens, no more than the device holds at once, as most tend to find nothing.
template <int DIM, int COLUMNS, class Tiles>
void launch_mixed(const sg_call *call, const PagedProblem &p, const PagedTensors &t, const typename Tiles::Maps &maps,
                  int tokens, bool with_lone) {
  const auto kernel = paged_mixed<DIM, COLUMNS, Tiles>;
  const int shared = std::max(static_cast<int>(Tiles::kBytes), with_lone ? batch_bytes(p) : 0);
  const int64_t kv_heads = p.heads / p.group, most = ceil_div(Tiles::kBlocks * device().units, kv_heads);
  const int lone = with_lone ? static_cast<int>(std::min<int64_t>(tokens, most) * kv_heads) : 0;
  const int64_t blocks = lone + run_blocks<Tiles>(p, tokens);
  take_shared(kernel, shared, blocks);
  launch_ahead(call, static_cast<unsigned>(blocks), kAttentionThreads, static_cast<size_t>(shared), kernel, p,
               paged_indices(call), t, HeadRows<const bf16>(input(call, 0)), HeadRows<bf16>(output(call, 0)), maps, tokens,
               lone);
}

template <int DIM, int COLUMNS>
void launch_runs(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens, bool with_lone) {
  if constexpr (DIM == 64 || DIM == 128) {
    PromptMaps maps;
    if (has_ring() && p.softcap == 0.0f && map_prompts(call, &maps)) {
      return launch_mixed<DIM, COLUMNS, PromptTiles<DIM>>(call, p, t, maps, tokens, with_lone);
    }
  }
  if (p.softcap > 0.0f) {
    launch_mixed<DIM, COLUMNS, RunTiles<DIM, true>>(call, p, t, {}, tokens, with_lone);
  } else {
    launch_mixed<DIM, COLUMNS, RunTiles<DIM, false>>(call, p, t, {}, tokens, with_lone);
  }
}

// By blocks that know no runs, which need not be there.
template <int DIM, int COLUMNS, class Tiles>
bool launch_lone(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens, bool has_runs, bool whole) {
  typename Tiles::Maps maps;
  if (!map_caches(call, p, &maps)) return false;
  if (whole) {
    launch_tokens<DIM, COLUMNS, Tiles>(call, p, t, maps, tokens);
  } else {
    launch_batches<DIM, COLUMNS, Tiles>(call, p, t, maps, tokens, has_runs);
  }
  return true;
}
template <int DIM, int COLUMNS>
void launch(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens) {
  const bool has_runs = tokens > kMostLoneTokens && attr_int(call, "lone", 0) == 0;
  const bool whole = makes_whole_tokens(p, tokens), lone = !has_runs || !whole;
  bool launched = !lone;
  if constexpr (DIM % 64 == 0) {
    if (lone && has_ring()) launched = launch_lone<DIM, COLUMNS, RingTiles<DIM>>(call, p, t, tokens, has_runs, whole);
  }
  if (!launched) launch_lone<DIM, COLUMNS, DirectTiles<DIM>>(call, p, t, tokens, has_runs, whole);
  if (has_runs) launch_runs<DIM, COLUMNS>(call, p, t, tokens, whole);
}
template <int DIM>
void launch(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens) {
  if (p.group <= 8) {
    launch<DIM, 1>(call, p, t, tokens);
  } else {
    launch<DIM, 2>(call, p, t, tokens);
  }
}

inline bool has_kernels(int dim) { return dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256; }

int32_t supports(const sg_call *call) {
  if (!paged_supported(call)) return 0;
  const sg_tensor *q = input(call, 0), *k = input(call, 1);
  if (q->dtype != SG_BF16 || k->dtype != SG_BF16) return 0;
  const PagedProblem p = paged_problem(call);
  if (p.value_dim != p.head_dim || !has_kernels(p.head_dim) || p.group > kMostGroup) return 0;
  if (p.block_size % kTileKeys != 0 || p.cache_rows < kTileKeys || p.cache_rows / kTileKeys > INT32_MAX) return 0;
  if (p.max_blocks * p.block_size > INT32_MAX - kTileKeys * kMostSplits || q->shape[0] > kMostTokens) return 0;
  if (std::max(p.key_stride, p.value_stride) > kMostStride) return 0;
  const bool packs = p.q_stride % 8 == 0 && p.key_stride % 8 == 0 && p.value_stride % 8 == 0 && p.o_stride % 8 == 0;
  return packs ? 30 : 0;
}

size_t workspace(const sg_call *call) {
  const PagedProblem p = paged_problem(call);
  const int tokens = static_cast<int>(input(call, 0)->shape[0]);
  return makes_whole_tokens(p, tokens) ? 0 : batches_workspace(p, tokens);
}

int32_t run(const sg_call *call) {
  if (num_elements(output(call, 0)) == 0) return SG_OK;
  const PagedProblem p = paged_problem(call);
  const int tokens = static_cast<int>(input(call, 0)->shape[0]);
  const bool early = attr_int(call, "lone", 0) != 0 && is_fixed(input(call, 3)) && is_fixed(input(call, 4)) &&
                     is_fixed(input(call, 5));
  const PagedTensors t = {data<const bf16>(input(call, 0)),
                          data<const bf16>(input(call, 1)),
                          data<const bf16>(input(call, 2)),
                          data<bf16>(output(call, 0)),
                          static_cast<int>(p.block_size / kTileKeys),
                          static_cast<int>(p.cache_rows / kTileKeys),
                          early,
                          LogitFactors(p)};
  // The planner may place an operand where 16 bytes cannot be moved at once.
  if (!is_aligned<8>(t.q) || !is_aligned<8>(t.keys) || !is_aligned<8>(t.values) || !is_aligned<8>(t.o)) {
    return run_paged_attention(call);
  }
  switch (p.head_dim) {
    case 64: launch<64>(call, p, t, tokens); break;
    case 80: launch<80>(call, p, t, tokens); break;
    case 96: launch<96>(call, p, t, tokens); break;
    case 128: launch<128>(call, p, t, tokens); break;
    default: launch<256>(call, p, t, tokens);
  }
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("paged_attention", "flash", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
