// Tokens of their own, of which a block makes one batch of splits (paged_attention_decode.cuh): for calls with so few
// tokens that one block for each and key-value head would leave the device empty.
//
// Where they are no more than the device has multiprocessors, as for one token or two, the blocks of a token and key-value
// head are a cluster, and one kernel does it all: each block owns a share of the result's elements, of which every block
// sends it its batch's sums. With more tokens clusters are slow to come; then, and on devices that have none, the sums go
// through the workspace, and a second kernel folds them. Both fold batches in their order, with the same bits.
#pragma once

#include "cluster.cuh"
#include "paged_attention_decode.cuh"

namespace sg::cuda {

__host__ __device__ inline int most_batches(const PagedProblem &p) { return most_splits(p) / batch_splits(p.head_dim); }

// Batches of the most keys that a token may see.
inline int batches_of_table(const PagedProblem &p) {
  int64_t tiles = p.max_blocks * p.block_size / kTileKeys;
  if (p.window > 0) tiles = std::min(tiles, p.window / kTileKeys + 2);
  const int64_t splits = std::min<int64_t>(ceil_div(tiles, kLeastTiles), most_splits(p));
  return static_cast<int>(std::max<int64_t>(ceil_div(splits, batch_splits(p.head_dim)), 1));
}
template <int DIM>
__device__ inline int batches_of(const KeySplits &cut) {
  return static_cast<int>(static_cast<unsigned>(cut.splits + batch_splits(DIM) - 1) / batch_splits(DIM));
}

// Bytes of a split in shared memory: sums of every head, and their weights.
__host__ __device__ inline int split_bytes(const PagedProblem &p) {
  const int bytes = p.group * (p.head_dim * static_cast<int>(sizeof(float)) + static_cast<int>(sizeof(SplitWeights)));
  return (bytes + 15) / 16 * 16;
}

// A batch of `splits`, which the block's warps left in shared memory, folded: elements [4 i, 4 i + 4) of its sums.
template <int DIM>
__device__ __forceinline__ float4 fold_batch(const PagedProblem &p, const unsigned char *left, int splits, int i,
                                             SplitWeights *weights) {
  Fold fold;
  float4 sum = {};
  for (int split = 0; split < splits; ++split, left += split_bytes(p)) {
    const float *const sums = reinterpret_cast<const float *>(left);
    const SplitWeights *const of_split = reinterpret_cast<const SplitWeights *>(sums + p.group * DIM);
    float before, after;
    fold.add(of_split[4 * i / DIM], &before, &after);
    sum = folded(sum, before, reinterpret_cast<const float4 *>(sums)[i], after);
  }
  *weights = {fold.peak, fold.total};
  return sum;
}

// A batch of a token, by one block: take(i, sum, weights) gets elements [4 i, 4 i + 4) of its sums from the thread that
// folded them. `left`: batch_bytes of shared memory, read until the end.
template <int DIM, int COLUMNS, class Tiles, class Take>
__device__ __forceinline__ void make_batch(const PagedProblem &p, const PagedTensors &t, const PagedHead &head,
                                           const bf16 *q, const KeySplits &cut, int batch, Tiles &tiles,
                                           unsigned char *left, float4 *halves, Take &&take) {
  using Warp = DecodeWarp<DIM, COLUMNS, Tiles>;
  const int splits = min(cut.splits - batch * Warp::kSplits, Warp::kSplits), own = Warp::own_split();
  const int split = batch * Warp::kSplits + own;
  int number = 0;
  Warp warp(tiles, number);
  warp.walk_over(cut, split, false);
  if (t.early && own < splits) warp.start(head, cut, cut.own_tile());
  wait_for_kernels_ahead();
  if (own < splits) {
    warp.load_queries(q, p.group);
    warp.start(head, cut, cut.end);
    warp.see(t.factors, head, cut, split, halves);
    float *const sums = reinterpret_cast<float *>(left + own * split_bytes(p));
    warp.leave(sums, reinterpret_cast<SplitWeights *>(sums + p.group * DIM), p.group, t.factors);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.group * DIM / 4; i += kDecodeThreads) {
    SplitWeights of_batch;
    const float4 sum = fold_batch<DIM>(p, left, splits, i, &of_batch);
    take(i, sum, of_batch);
  }
}
__host__ __device__ inline int batch_bytes(const PagedProblem &p) { return batch_splits(p.head_dim) * split_bytes(p); }

// Of a token that sees nothing: 0 for padding, NaN where its keys are not known.
template <int DIM>
__device__ inline void leave_nothing(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t, int token,
                                     int kv_head) {
  bf16 *const to = t.o + token * p.o_stride + static_cast<int64_t>(kv_head) * p.group * DIM;
  const bf16 nothing = from_float<bf16>(at.sequence_ids[token] < 0 ? 0.0f : not_a_number());
#pragma unroll 1
  for (int i = threadIdx.x; i < p.group * DIM; i += kDecodeThreads) to[i] = nothing;
}

// ---- clusters

constexpr int kSentBytes = sizeof(float4) + sizeof(SplitWeights);  // of a batch, for four elements

// Which block of a cluster finishes what of a token with `batches`: 2^log2 neighbours of the `quads` of four elements
// each. Blocks that make a batch have such shares; those of the highest ranks may find nothing left.
struct BatchShares {
  int quads, batches, log2;

  __device__ BatchShares(const PagedProblem &p, int count) : quads(p.group * p.head_dim / 4), batches(count) {
    log2 = max(__clz(batches) - __clz(quads), 0);
    if (batches << log2 < quads) ++log2;
  }
  __device__ int share(int rank) const { return max(min(quads - (rank << log2), 1 << log2), 0); }
  // What is sent to a block: `batches` times its share.
  __device__ uint32_t bytes(int rank) const { return static_cast<uint32_t>(share(rank) * batches * kSentBytes); }
};
// Quads that a block has room for: batches << log2 of any token, which is less than twice a token's.
inline int sent_quads(const PagedProblem &p) { return 2 * (p.group * p.head_dim / 4); }

// What the blocks of the cluster sent of this block's share.
struct SentBatches {
  float4 *sums;  // [batches, 2^log2]
  SplitWeights *weights;

  __device__ SentBatches(unsigned char *shared, const BatchShares &of) {
    sums = reinterpret_cast<float4 *>(shared);
    weights = reinterpret_cast<SplitWeights *>(sums + (of.batches << of.log2));
  }
  // Folded: elements [4 i, 4 i + 4) of the share.
  __device__ void finish(const BatchShares &of, int i, float (&mean)[4]) const {
    Fold fold;
    float4 sum = {};
#pragma unroll 4
    for (int batch = 0; batch < of.batches; ++batch, i += 1 << of.log2) {
      float before, after;
      fold.add(weights[i], &before, &after);
      sum = folded(sum, before, sums[i], after);
    }
    mean[0] = sum.x / fold.total, mean[1] = sum.y / fold.total;
    mean[2] = sum.z / fold.total, mean[3] = sum.w / fold.total;
  }
};

// Beside the tiles.
inline int cluster_bytes(const PagedProblem &p) { return batch_bytes(p) + sent_quads(p) * kSentBytes; }
inline bool folds_in_clusters(const PagedProblem &p, int tokens) {
  constexpr int kOwn = (9 << 10) + RingTiles<256>::kBytes;  // of the kernel's own, and of its tiles, at most
  const int64_t batches = batches_of_table(p), blocks = batches * tokens * (p.heads / p.group);
  return has_clusters() && batches <= kMostCluster && blocks <= device().units &&
         static_cast<size_t>(cluster_bytes(p) + kOwn) <= device().shared_memory;
}

// Block (kv head, batch, token), of a cluster along the batches.
template <int DIM, int COLUMNS, class Tiles>
__global__ void __launch_bounds__(kDecodeThreads, COLUMNS == 1 ? 3 : 2)
    paged_cluster(const PagedProblem p, const PagedIndices at, const PagedTensors t,
                  const __grid_constant__ typename Tiles::Maps maps, int tokens, bool has_runs) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float4 halves[DecodeWarp<DIM, COLUMNS, Tiles>::kShared];
  __shared__ Inbox inbox;
  if (threadIdx.x == 0) open_inbox(&inbox);
  ready_for_sends();
  t.early ? bring_kernel_behind() : wait_for_kernels_ahead();
  wait_until_ready();
  const int kv_head = blockIdx.x, batch = blockIdx.y, token = blockIdx.z;
  const int sequence = at.sequence_ids[token], position = at.positions[token];
  const bool is_own = !has_runs || is_alone(p, at, tokens, token);
  if (!is_own || !is_known(p, sequence, position)) {
    wait_for_kernels_ahead();
    if (is_own && batch == 0) leave_nothing<DIM>(p, at, t, token, kv_head);
    return;
  }
  const KeySplits cut(p, position);
  const BatchShares shares(p, batches_of<DIM>(cut));
  if (batch >= shares.batches) return wait_for_kernels_ahead();  // and has no share
  const PagedHead head = t.head(p, at, kv_head, sequence);
  const int64_t first = kv_head * p.group * DIM;  // element of a token's heads
  Tiles tiles(maps, shared);
  unsigned char *const left = shared + Tiles::kBytes;
  const SentBatches sent(left + batch_bytes(p), shares);
  make_batch<DIM, COLUMNS>(p, t, head, t.q + token * p.q_stride + first, cut, batch, tiles, left, halves,
                           [&](int i, const float4 &sum, const SplitWeights &weights) {
                             const int owner = i >> shares.log2, place = i - (owner << shares.log2);
                             const int to = (batch << shares.log2) + place;
                             send(sum, sent.sums + to, &inbox, owner);
                             send(float2{weights.peak, weights.total},
                                  reinterpret_cast<const float2 *>(sent.weights + to), &inbox, owner);
                           });
  if (threadIdx.x == 0) expect_bytes(&inbox, shares.bytes(batch));
  bf16 *const o = t.o + token * p.o_stride + first + (4 * batch << shares.log2);
#pragma unroll 1
  for (int i = threadIdx.x; i < shares.share(batch); i += kDecodeThreads) {
    wait_for_inbox(&inbox);
    float mean[4];
    sent.finish(shares, i, mean);
    store<4>(o + 4 * i, mean);
  }
}

// ---- two kernels

inline size_t weights_bytes(const PagedProblem &p, int tokens) {
  const size_t bytes = static_cast<size_t>(tokens) * p.heads * most_batches(p) * sizeof(SplitWeights);
  return (bytes + 255) / 256 * 256;
}
inline size_t batches_workspace(const PagedProblem &p, int tokens) {
  if (folds_in_clusters(p, tokens)) return 0;
  const size_t batches = static_cast<size_t>(tokens) * p.heads * most_batches(p);
  return weights_bytes(p, tokens) + batches * p.head_dim * sizeof(float);
}

// Tokens whose batches are blocks: block (kv head, token, batch).
template <int DIM, int COLUMNS, class Tiles>
__global__ void __launch_bounds__(kDecodeThreads, COLUMNS == 1 ? 3 : 2)
    paged_splits(const PagedProblem p, const PagedIndices at, const PagedTensors t,
                 const __grid_constant__ typename Tiles::Maps maps, int tokens, bool has_runs, float *sums,
                 SplitWeights *weights) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float4 halves[DecodeWarp<DIM, COLUMNS, Tiles>::kShared];
  t.early ? bring_kernel_behind() : wait_for_kernels_ahead();
  const int kv_head = blockIdx.x, token = blockIdx.y, batch = blockIdx.z;
  const int sequence = at.sequence_ids[token], position = at.positions[token];
  if (!is_known(p, sequence, position) || (has_runs && !is_alone(p, at, tokens, token))) return wait_for_kernels_ahead();
  const KeySplits cut(p, position);
  if (batch >= batches_of<DIM>(cut)) return wait_for_kernels_ahead();
  const int64_t pair = static_cast<int64_t>(token) * gridDim.x + kv_head;
  const int64_t place = (pair * most_batches(p) + batch) * p.group;  // of the first head
  Tiles tiles(maps, shared);
  make_batch<DIM, COLUMNS>(p, t, t.head(p, at, kv_head, sequence), t.q + token * p.q_stride + kv_head * p.group * DIM,
                           cut, batch, tiles, shared + Tiles::kBytes, halves,
                           [&](int i, const float4 &sum, const SplitWeights &of_batch) {
                             reinterpret_cast<float4 *>(sums + place * DIM)[i] = sum;
                             if (4 * i % DIM == 0) weights[place + 4 * i / DIM] = of_batch;
                           });
}

// What paged_splits left, folded: block (head, token), a thread for each dimension.
template <int DIM>
__global__ void __launch_bounds__(DIM)
    paged_combine(PagedProblem p, PagedIndices at, int tokens, bool has_runs, const float *sums,
                  const SplitWeights *weights, bf16 *o) {
  constexpr int kTogether = 8;
  wait_for_kernels_ahead();
  const int head = blockIdx.x, token = blockIdx.y, d = threadIdx.x;
  const int sequence = at.sequence_ids[token], position = at.positions[token];
  if (has_runs && !is_alone(p, at, tokens, token)) return;
  bf16 *to = o + token * p.o_stride + head * DIM + d;
  if (!is_known(p, sequence, position)) {
    *to = from_float<bf16>(sequence < 0 ? 0.0f : not_a_number());
    return;
  }
  const int batches = batches_of<DIM>(KeySplits(p, position));
  const int64_t pair = static_cast<int64_t>(token) * (p.heads / p.group) + head / p.group;
  const int64_t place = pair * most_batches(p) * p.group + head % p.group;
  Fold fold;
  float sum = 0.0f;
  for (int first = 0; first < batches; first += kTogether) {
    SplitWeights of_batch[kTogether];
    float values[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t from = place + static_cast<int64_t>(min(first + i, batches - 1)) * p.group;
      of_batch[i] = weights[from];
      values[i] = sums[from * DIM + d];
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i < batches) {
        float before, after;
        fold.add(of_batch[i], &before, &after);
        sum = folded(sum, before, values[i], after);
      }
    }
  }
  *to = from_float<bf16>(sum / fold.total);
}

// Lone tokens of a call.
template <int DIM, int COLUMNS, class Tiles>
void launch_batches(const sg_call *call, const PagedProblem &p, const PagedTensors &t, const typename Tiles::Maps &maps,
                    int tokens, bool has_runs) {
  const PagedIndices at = paged_indices(call);
  const auto kv_heads = static_cast<unsigned>(p.heads / p.group), count = static_cast<unsigned>(tokens);
  const auto batches = static_cast<unsigned>(batches_of_table(p));
  const int64_t blocks = int64_t{kv_heads} * count * batches;
  if (folds_in_clusters(p, tokens)) {
    const auto kernel = paged_cluster<DIM, COLUMNS, Tiles>;
    const int shared = Tiles::kBytes + cluster_bytes(p);
    // The product behind one sequence's attention comes while it works, and its ring takes all of a multiprocessor's memory.
    take_shared(kernel, shared, has_ring() ? INT32_MAX : blocks);
    launch_clusters_ahead(call, dim3(kv_heads, batches, count), batches, kDecodeThreads, static_cast<size_t>(shared),
                          kernel, p, at, t, maps, tokens, has_runs);
    return;
  }
  SplitWeights *const weights = static_cast<SplitWeights *>(call->workspace);
  float *const sums = reinterpret_cast<float *>(static_cast<char *>(call->workspace) + weights_bytes(p, tokens));
  const auto kernel = paged_splits<DIM, COLUMNS, Tiles>;
  const int shared = Tiles::kBytes + batch_bytes(p);
  take_shared(kernel, shared, blocks);
  launch_ahead(call, dim3(kv_heads, count, batches), kDecodeThreads, static_cast<size_t>(shared), kernel, p, at, t, maps,
               tokens, has_runs, sums, weights);
  launch_ahead(call, dim3(static_cast<unsigned>(p.heads), count), DIM, 0, paged_combine<DIM>, p, at, tokens, has_runs,
               static_cast<const float *>(sums), static_cast<const SplitWeights *>(weights), t.o);
}

}  // namespace sg::cuda
