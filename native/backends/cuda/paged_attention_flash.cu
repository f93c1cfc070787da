// paged_attention in bf16, heads of 64, 80, 96, 128 or 256. Floor: the cached rows that tokens see, once for every
// key-value head, or the multiplications of paged_attention_runs.cuh, whichever is more.
//
// Which token is what is only known on the device: blocks of lone tokens (paged_attention_decode.cuh) and of runs
// (paged_attention_runs.cuh) both look, and each takes its own. Calls of few tokens have the former only, and so have
// those that say that every token is of another sequence (attribute `lone`). So a token's bits are the same in all
// calls in which it stands alone, and in all in which it belongs to a run or to none.
#include "paged_attention.h"
#include "paged_attention_batches.cuh"
#include "paged_attention_runs.cuh"

namespace sg::cuda {
namespace {

constexpr int kMostGroup = 16;       // query heads of a key-value head
constexpr int kMostTokens = 1 << 24;
constexpr int kMostStride = 1 << 24;  // from row to row of a cache, in elements
constexpr int kMostLoneTokens = 16;  // of a call whose tokens are all taken as standing alone
constexpr int kTokenBlocks = 128;    // that share the lone tokens of a call with one of many heads, if it has more
constexpr int kEnoughBlocks = 512;   // for the device, of one token and key-value head each
static_assert(kWindowTokens == kDecodeThreads);

// Blocks of one key-value head that share the lone tokens of a call, where it has more tokens.
inline int token_blocks(int64_t kv_heads) {
  return std::max<int>(kTokenBlocks, static_cast<int>(ceil_div(kEnoughBlocks, kv_heads)));
}

// Whether a block makes a whole token of one key-value head. The workspace then holds no batches.
inline bool makes_whole_tokens(int tokens, int64_t kv_heads) {
  return tokens > kTokenBlocks || (tokens > kMostLoneTokens && tokens * kv_heads >= kEnoughBlocks);
}

// Batches that a block folded, in shared memory: each thread owns four neighbours out of every 512, which nobody else
// reads.
struct Folded {
  float4 *sums;  // [group, head_dim / 4]
  Fold *folds;   // one for each of those

  __device__ Folded(const PagedProblem &p, unsigned char *shared) {
    sums = reinterpret_cast<float4 *>(shared);
    folds = reinterpret_cast<Fold *>(sums + p.group * p.head_dim / 4);
  }
};
__host__ __device__ inline int folded_bytes(const PagedProblem &p) {
  const int bytes = p.group * p.head_dim / 4 * static_cast<int>(sizeof(float4) + sizeof(Fold));
  return (bytes + 15) / 16 * 16;
}

// A token whose batches are made by one block, in one of two buffers by turns.
template <int DIM, int COLUMNS>
__device__ __forceinline__ void make_token(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                           int token, int kv_head, unsigned char *shared, float4 *halves) {
  using Warp = DecodeWarp<DIM, COLUMNS>;
  const int own_split = Warp::own_split(), elements = p.group * DIM;
  const int stride = split_bytes(p);
  const int sequence = at.sequence_ids[token];
  const KeySplits cut(p, at.positions[token]);
  const PagedHead head = t.head(p, at, kv_head, sequence);
  Warp warp;
  warp.load_queries(t.q + token * p.q_stride + kv_head * p.group * DIM, p.group);
  if (own_split < cut.splits) warp.start(head, cut, own_split, Warp::kSplits);
  const Folded all(p, shared);
  shared += folded_bytes(p);
  for (int i = threadIdx.x; i < elements / 4; i += kDecodeThreads) {
    all.sums[i] = float4{};
    all.folds[i] = Fold{};
  }
  for (int first = 0; first < cut.splits; first += Warp::kSplits) {
    unsigned char *const buffer = shared + first / Warp::kSplits % 2 * Warp::kSplits * stride;
    if (first + own_split < cut.splits) {
      warp.see(t.factors, head, cut, first + own_split, Warp::kSplits, halves);
      float *const left = reinterpret_cast<float *>(buffer + own_split * stride);
      warp.leave(left, reinterpret_cast<SplitWeights *>(left + elements), p.group, t.factors);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < elements / 4; i += kDecodeThreads) {
      SplitWeights of_batch;
      const float4 sum = fold_batch<DIM>(p, buffer, min(Warp::kSplits, cut.splits - first), i, &of_batch);
      float before, after;
      all.folds[i].add(of_batch, &before, &after);
      all.sums[i] = folded(all.sums[i], before, sum, after);
    }
  }
  bf16 *const to = t.o + token * p.o_stride + kv_head * elements;
  for (int i = threadIdx.x; i < elements / 4; i += kDecodeThreads) {
    const float total = all.folds[i].total;
    const float4 sum = all.sums[i];
    const float mean[4] = {sum.x / total, sum.y / total, sum.z / total, sum.w / total};
    store<4>(to + 4 * i, mean);
  }
}

// The result of one token and key-value head: its mean, 0 for padding, NaN where it is not known.
template <int DIM, int COLUMNS>
__device__ __forceinline__ void make_any_token(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                               int token, int kv_head, unsigned char *shared, float4 *halves) {
  if (is_known(p, at.sequence_ids[token], at.positions[token])) {
    make_token<DIM, COLUMNS>(p, at, t, token, kv_head, shared, halves);
  } else {
    leave_nothing<DIM>(p, at, t, token, kv_head);
  }
}

// Those of the tokens first, first + step, ... that stand alone, or all of them where no token belongs to a run, for
// one key-value head. Each thread looks at one of these: where no token stands alone, a block is done after a look.
template <int DIM, int COLUMNS>
__device__ __forceinline__ void make_lone_tokens(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                                 int tokens, bool has_runs, int first, int step, int kv_head,
                                                 unsigned char *shared) {
  __shared__ float4 halves[DecodeWarp<DIM, COLUMNS>::kShared];
  __shared__ TokenBits own;
  for (; first < tokens; first += kDecodeThreads * step) {
    const int token = first + static_cast<int>(threadIdx.x) * step;
    own.put(token < tokens && (!has_runs || is_alone(p, at, tokens, token)));  // padding goes with runs
    __syncthreads();
    for (int i = own.find(0, true); i < kDecodeThreads; i = own.find(i + 1, true)) {
      make_any_token<DIM, COLUMNS>(p, at, t, first + i * step, kv_head, shared, halves);
      __syncthreads();  // shared memory is free
    }
    __syncthreads();  // every warp has seen that there is no further one
  }
}

// Tokens that are all taken as standing alone: block (kv head, y) makes tokens y, y + gridDim.y, ...
template <int DIM, int COLUMNS>
__global__ void __launch_bounds__(kDecodeThreads, COLUMNS == 1 ? 3 : 2)
    paged_tokens(PagedProblem p, PagedIndices at, PagedTensors t, int tokens) {
  extern __shared__ __align__(16) unsigned char shared[];
  wait_for_kernels_ahead();
  make_lone_tokens<DIM, COLUMNS>(p, at, t, tokens, false, blockIdx.y, gridDim.y, blockIdx.x, shared);
}

// Lone tokens and runs side by side, as the former wait for memory and the latter multiply: of `lone_blocks` blocks (kv
// head, those that share its lone tokens), then those of paged_attention_runs.cuh.
template <int DIM, int COLUMNS, bool CAPPED>
__global__ void __launch_bounds__(kAttentionThreads, ForwardTile<padded_dim(DIM)>::kBlocks)
    paged_mixed(PagedProblem p, PagedIndices at, PagedTensors t, HeadRows<const bf16> q, HeadRows<bf16> o, int tokens,
                int lone_blocks) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  wait_for_kernels_ahead();
  const int block = static_cast<int>(blockIdx.x), kv_heads = p.heads / p.group;
  if (block < lone_blocks) {
    make_lone_tokens<DIM, COLUMNS>(p, at, t, tokens, true, block / kv_heads, lone_blocks / kv_heads, block % kv_heads,
                                   tiles);
  } else {
    make_runs<DIM, CAPPED>(p, at, t, q, o, tokens, block - lone_blocks, tiles);
  }
}

// Bytes of shared memory that make_lone_tokens needs.
template <int DIM>
int lone_bytes(const PagedProblem &p) {
  return folded_bytes(p) + 2 * batch_splits(DIM) * split_bytes(p);
}

template <int DIM, int COLUMNS>
void launch_tokens(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens) {
  const auto kernel = paged_tokens<DIM, COLUMNS>;
  const int shared = lone_bytes<DIM>(p), kv_heads = p.heads / p.group;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  const dim3 blocks(static_cast<unsigned>(kv_heads), static_cast<unsigned>(std::min(tokens, token_blocks(kv_heads))));
  launch_ahead(call, blocks, kDecodeThreads, static_cast<size_t>(shared), kernel, p, paged_indices(call), t, tokens);
}

// `with_lone`: with blocks for lone tokens, no more than the device holds at once, as most tend to find nothing.
template <int DIM, int COLUMNS>
void launch_mixed(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens, bool with_lone) {
  constexpr int kBlocks = ForwardTile<padded_dim(DIM)>::kBlocks;
  const auto kernel = p.softcap > 0.0f ? paged_mixed<DIM, COLUMNS, true> : paged_mixed<DIM, COLUMNS, false>;
  const int shared = std::max(static_cast<int>(RunTiles<DIM, false>::kBytes), with_lone ? lone_bytes<DIM>(p) : 0);
  const int64_t kv_heads = p.heads / p.group, most = ceil_div(kBlocks * device().units, kv_heads);
  const int lone = with_lone ? static_cast<int>(std::min<int64_t>(tokens, most) * kv_heads) : 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  launch_ahead(call, static_cast<unsigned>(lone + run_blocks<DIM>(p, tokens)), kAttentionThreads,
               static_cast<size_t>(shared), kernel, p, paged_indices(call), t, HeadRows<const bf16>(input(call, 0)),
               HeadRows<bf16>(output(call, 0)), tokens, lone);
}

template <int DIM, int COLUMNS>
void launch(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens) {
  const bool has_runs = tokens > kMostLoneTokens && attr_int(call, "lone", 0) == 0;
  const bool whole = makes_whole_tokens(tokens, p.heads / p.group);
  if (!whole) launch_batches<DIM, COLUMNS>(call, p, t, tokens, has_runs);
  if (has_runs) {
    launch_mixed<DIM, COLUMNS>(call, p, t, tokens, whole);
  } else if (whole) {
    launch_tokens<DIM, COLUMNS>(call, p, t, tokens);
  }
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
  return makes_whole_tokens(tokens, p.heads / p.group) ? 0 : batches_workspace(p, tokens);
}

int32_t run(const sg_call *call) {
  if (num_elements(output(call, 0)) == 0) return SG_OK;
  const PagedProblem p = paged_problem(call);
  const PagedTensors t = {data<const bf16>(input(call, 0)),
                          data<const bf16>(input(call, 1)),
                          data<const bf16>(input(call, 2)),
                          data<bf16>(output(call, 0)),
                          static_cast<int>(p.block_size / kTileKeys),
                          static_cast<int>(p.cache_rows / kTileKeys),
                          LogitFactors(p)};
  // The planner may place an operand where 16 bytes cannot be moved at once.
  if (!is_aligned<8>(t.q) || !is_aligned<8>(t.keys) || !is_aligned<8>(t.values) || !is_aligned<8>(t.o)) {
    return run_paged_attention(call);
  }
  const int tokens = static_cast<int>(input(call, 0)->shape[0]);
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
