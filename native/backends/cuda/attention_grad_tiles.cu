// attention_grad's kernel for compute capability 9.0, `tiles`: what it takes, how much memory lies between its kernels, and
// their launch.
#include <algorithm>

#include "attention_grad_call.cuh"
#include "attention_grad_keys.cuh"
#include "attention_grad_prepare.cuh"
#include "attention_grad_queries.cuh"

namespace sg::cuda {
namespace {

using namespace attention_tiles;

constexpr int64_t kGoodBytes = int64_t{3} << 29;  // of gradients: heads are taken in shares, no more of them than this takes
constexpr int64_t kMostBytes = int64_t{2} << 30;
constexpr int32_t kScore = 45, kUnbalancedScore = 25;  // cuDNN's are 30, and 40 where any order of sums will do

// How a call is cut, and where things are in its workspace.
struct Cut {
  int64_t padded, tiles, query_blocks, most, places, shares, stats_bytes, table_bytes, gradient_bytes;

  // A tile of keys is seen up to the end of its last document, or of a window. So from one tile to the next of the same document
  // it is a tile of queries less, from `most` down to two or one: most pairs are there where documents are as long as can be.
  Cut(const sg_call *call, const AttentionGradCall &c) {
    const int64_t tokens = c.q->shape[0], limit = attr_int(call, "max_length", 0), window = attr_int(call, "window", 0);
    const int64_t longest = limit > 0 ? std::min(limit, tokens) : tokens;
    padded = ceil_div(tokens, kBlockKeys) * kBlockKeys;
    tiles = ceil_div(tokens, kTile);
    query_blocks = ceil_div(tokens, kBlockQueries);
    most = std::max<int64_t>(ceil_div(longest + kTile - 1, kTile), 2);
    places = ceil_div(tiles, most - 1) * (most * (most + 1) / 2);
    if (window > 0) {
      most = std::min(most, ceil_div(kTile - 1 + std::min(window, tokens), kTile));
      places = std::min(places, tiles * most);
    }
    stats_bytes = 2 * c.q->shape[1] * padded * static_cast<int64_t>(sizeof(float));
    table_bytes = (tiles + 1 + 2 * key_blocks() + query_blocks) * static_cast<int64_t>(sizeof(int));
    const int64_t all = c.q->shape[1] * places * kPlaceBytes, kv_heads = c.k->shape[1];
    for (shares = 1; shares < kv_heads && (kv_heads % shares != 0 || all / shares > kGoodBytes);) ++shares;
    // Documents that do not ascend are nobody's to compute with, but what they lead to lies within so many more.
    gradient_bytes = all / shares + tiles * kPlaceBytes;
  }
  int64_t key_blocks() const { return padded / kBlockKeys; }
  int64_t bytes() const { return stats_bytes + table_bytes + gradient_bytes; }
};

bool packs(const sg_tensor *t) { return t->shape[0] <= 1 || t->strides[0] % 8 == 0; }

// Whether the longest block, that of the first keys of a document for all heads of a group, is not what the others wait for:
// few key-value heads of long documents leave multiprocessors idle. Another kernel is ahead from 1.75 times the mean on.
bool is_balanced(const AttentionGradCall &c, const Cut &cut) {
  const int64_t group = c.q->shape[1] / c.k->shape[1], heads = c.q->shape[1] / cut.shares;
  const double longest = static_cast<double>(group * cut.most), all = static_cast<double>(heads * cut.places) / 2;
  return longest <= 1.75 * all / device().units;
}

int32_t supports(const sg_call *call) {
  const AttentionGradCall c(call);
  if (device().architecture != 90 || !attention_grad_supported(call, c)) return 0;
  const int64_t dim = c.q->shape[2];
  if (c.q->dtype != SG_BF16 || c.v->shape[2] != dim || (dim != 64 && dim != 128) || c.q->shape[0] < 1) return 0;
  if (attr_int(call, "causal", 1) == 0 || attr_float(call, "softcap", 0.0) > 0.0) return 0;
  for (const sg_tensor *t : {c.grad, c.q, c.k, c.v, c.o, c.dq, c.dk, c.dv}) {
    if (!packs(t)) return 0;
  }
  const Cut cut(call, c);
  if (cut.gradient_bytes > kMostBytes || cut.places > INT_MAX / 2) return 0;
  return is_balanced(c, cut) ? kScore : kUnbalancedScore;
}

size_t workspace(const sg_call *call) { return static_cast<size_t>(Cut(call, AttentionGradCall(call)).bytes()); }

sg_tensor share_of(const sg_tensor *t, int64_t share, int64_t shares) {
  sg_tensor part = *t;
  part.shape[1] /= shares;
  part.data = static_cast<char *>(t->data) + share * part.shape[1] * t->shape[2] * 2;
  return part;
}

template <int DIM>
int32_t run_tiles(const sg_call *call, const AttentionGradCall &c) {
  using Keys = KeyTiles<DIM>;
  using Queries = QueryTiles<DIM>;
  for (const sg_tensor *t : {c.grad, c.q, c.k, c.v, c.o, c.dq, c.dk, c.dv}) {
    if (reinterpret_cast<uintptr_t>(t->data) % 16 == 0) continue;
    return fail(call, "attention_grad by tiles: an operand begins at an address that is no multiple of 16; align it, or choose "
                "another kernel");
  }
  const Cut cut(call, c);
  const AttentionShape shape(call, c.q, c.k, c.starts);
  char *const memory = static_cast<char *>(call->workspace);
  Between between{};
  between.gradients = reinterpret_cast<unsigned char *>(memory);
  between.stats = reinterpret_cast<float *>(memory + cut.gradient_bytes);
  between.first_place = reinterpret_cast<int *>(memory + cut.gradient_bytes + cut.stats_bytes);
  between.key_order = between.first_place + cut.tiles + 1;
  between.query_order = between.key_order + cut.key_blocks();
  between.lengths = between.query_order + cut.query_blocks;
  between.padded = static_cast<int>(cut.padded), between.tiles = static_cast<int>(cut.tiles);
  between.query_blocks = static_cast<int>(cut.query_blocks), between.places = cut.places;

  constexpr int kGroups = kPrepareThreads / (DIM / 8);
  const int64_t groups = cut.padded / kPrepareTokens * shape.heads;
  launch_ahead(call, static_cast<unsigned>(1 + ceil_div(groups, kGroups)), kPrepareThreads, 0, prepare<DIM>, shape, between,
               HeadRows<const bf16>(c.grad), HeadRows<const bf16>(c.o), data<const float>(c.lse));
  cudaFuncSetAttribute(key_gradients<DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, Keys::kBytes);
  cudaFuncSetAttribute(query_gradients<DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, Queries::kBytes);
  const int kv_heads = static_cast<int>(shape.kv_heads / cut.shares), heads = kv_heads * shape.group;
  for (int64_t share = 0; share < cut.shares; ++share) {
    const auto part = [&](const sg_tensor *t) { return share_of(t, share, cut.shares); };
    const sg_tensor grad = part(c.grad), q = part(c.q), k = part(c.k), v = part(c.v);
    const sg_tensor dq = part(c.dq), dk = part(c.dk), dv = part(c.dv);
    KeyMaps maps;
    CUtensorMap keys;
    if (!map_heads(&q, 1, Keys::kStep, &maps.q) || !map_heads(&grad, 1, Keys::kStep, &maps.grad) ||
        !map_heads(&k, 1, kBlockKeys, &maps.k) || !map_heads(&v, 1, kBlockKeys, &maps.v) || !map_heads(&k, 1, kTile, &keys)) {
      return fail(call, "attention_grad by tiles: the driver refuses a map of an operand");
    }
    launch_ahead(call, static_cast<unsigned>(cut.key_blocks() * kv_heads), kKeyThreads, Keys::kBytes, key_gradients<DIM>,
                 shape, between, maps, HeadRows<bf16>(&dk), HeadRows<bf16>(&dv), kv_heads);
    const int64_t blocks = std::min<int64_t>(cut.query_blocks * heads, device().units);
    launch_ahead(call, static_cast<unsigned>(blocks), kQueryThreads, Queries::kBytes, query_gradients<DIM>, shape, between, keys,
                 HeadRows<bf16>(&dq), heads);
    between.stats += 2 * heads * cut.padded;
  }
  return launched(call);
}

int32_t run(const sg_call *call) {
  const AttentionGradCall c(call);
  return c.q->shape[2] == 64 ? run_tiles<64>(call, c) : run_tiles<128>(call, c);
}

#ifdef SUROGATE_HOPPER
constexpr sg_kernel kernel = describe_kernel("attention_grad", "tiles", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);
#endif

}  // namespace
}  // namespace sg::cuda
