// low_rank_grad's kernel for compute capability 9.0, `tiles`: how a call is cut into blocks, and its launch.
#include <algorithm>

#include "low_rank_tiles.cuh"

namespace sg::cuda {
namespace {

using namespace low_rank;

constexpr int kMostBlocks = 132;   // that are wanted at once: the multiprocessors of an H100 or H200
constexpr int kManyColumns = 512;  // of dy: with fewer `one_pass` is ahead

// How the work is cut, by shape alone.
struct Cut {
  int rank, columns, chunks, row_tiles, strip, strips;
};

int chunks_of(const Branch &branch, const Cut &k) { return static_cast<int>(ceil_div(branch.features, k.columns)); }

Cut cut(const Call &c) {
  Cut k{};
  k.rank = c.rank <= 16 ? 16 : c.rank <= 32 ? 32 : 64;
  k.columns = kTile * 128 / k.rank;
  for (int i = 0; i < c.branches; ++i) k.chunks += chunks_of(c.branch[i], k);
  k.row_tiles = static_cast<int>(ceil_div(c.tokens, kTile));
  k.strip = static_cast<int>(ceil_div(k.row_tiles, std::max(kMostBlocks / k.chunks, 1)));
  k.strips = static_cast<int>(ceil_div(k.row_tiles, k.strip));
  return k;
}

int64_t low_floats(const Call &c, const Cut &k) { return int64_t{k.row_tiles} * kTile * c.rank; }  // of a chunk
int64_t weight_floats(const Branch &branch, const Cut &k) {                                        // of a strip
  return int64_t{chunks_of(branch, k)} * k.columns * branch.rank;
}

int32_t tiles_supports(const sg_call *call) {
  Call c;
  if (device().architecture != 90 || !read_call(call, &c) || c.branch[0].dy.dtype != SG_BF16) return 0;
  if (c.tokens == 0 || c.tokens > INT32_MAX / 2 || c.rank == 0 || c.rank % 8 != 0 || c.rank > 64) return 0;
  if (row_stride(*input(call, 0)) % 8 != 0 || !can_map_tiles(input(call, 1)) || row_stride(c.branch[0].dlow) % 2 != 0) return 0;
  for (int i = 0; i < c.branches; ++i) {
    const Branch &branch = c.branch[i];
    if (!can_map_tiles(&branch.b) || row_stride(branch.db) % 2 != 0 || branch.features % 8 != 0) return 0;
  }
  return input(call, 0)->shape[1] >= kManyColumns ? 30 : 15;
}

size_t tiles_workspace(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return 0;
  const Cut k = cut(c);
  int64_t floats = k.chunks * low_floats(c, k);
  for (int i = 0; i < c.branches; ++i) floats += k.strips * weight_floats(c.branch[i], k);
  return static_cast<size_t>(floats) * sizeof(float);
}

template <int rank>
void launch_tiles(const sg_call *call, const Cut &k, const TileProblem &p, const TileMaps &maps) {
  constexpr int bytes = TileLayout<rank>::kBytes;
  static_assert(TileLayout<rank>::kColumns == kTile * 128 / rank);
  cudaFuncSetAttribute(tiles_kernel<rank>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  launch_ahead(call, dim3(static_cast<unsigned>(k.chunks), static_cast<unsigned>(k.strips)), kTileThreads, bytes,
               tiles_kernel<rank>, p, maps);
}

int32_t tiles_run(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const Cut k = cut(c);
  const sg_tensor &dlow = c.branch[0].dlow;
  TileProblem p{};
  TileMaps maps;
  SumList sums;
  p.branches = c.branches, p.rank = static_cast<int>(c.rank), p.tokens = static_cast<int>(c.tokens);
  p.row_tiles = k.row_tiles, p.strip = k.strip;
  p.dy = data<bf16>(input(call, 0)), p.dy_stride = row_stride(*input(call, 0));
  p.goes_first = 2 * c.tokens * input(call, 0)->shape[1] > kCacheBytes;
  p.low_parts = static_cast<float *>(call->workspace);
  float *weight_parts = p.low_parts + k.chunks * low_floats(c, k);
  bool mapped = is_aligned(*input(call, 0), 16) && map_tiles(input(call, 1), kTile, &maps.low, 2 * k.rank);
  int column = 0, chunk = 0;
  for (int i = 0; i < c.branches; ++i) {
    const Branch &branch = c.branch[i];
    const int64_t chunks = chunks_of(branch, k), fours = low_floats(c, k) / 4;
    mapped = mapped && map_tiles(&branch.b, kTile, &maps.b[i], 2 * k.rank) && is_aligned(branch.db, 8);
    p.branch[i] = {weight_parts, column, static_cast<int>(branch.features), chunk, static_cast<int>(chunks)};
    sums.add_low(p.low_parts + 4 * fours * chunk, fours, chunks, branch);
    sums.add_weight(weight_parts, weight_floats(branch, k) / 4, k.strips, 1, branch);
    column += static_cast<int>(branch.features), chunk += static_cast<int>(chunks);
    weight_parts += k.strips * weight_floats(branch, k);
  }
  if (!mapped || !is_aligned(dlow, 4)) {  // rows that are whole packs, but begin within one
    for (int i = 0; i < c.branches; ++i) run_tiled(call, c.branch[i]);
    return launched(call);
  }
  k.rank == 16   ? launch_tiles<16>(call, k, p, maps)
  : k.rank == 32 ? launch_tiles<32>(call, k, p, maps)
                 : launch_tiles<64>(call, k, p, maps);
  launch_add_parts(call, sums);
  return launched(call);
}

#ifdef SUROGATE_HOPPER
constexpr sg_kernel low_rank_grad_tiles =
    describe_kernel("low_rank_grad", "tiles", -1, tiles_supports, tiles_workspace, tiles_run);
SG_REGISTER_KERNEL(low_rank_grad_tiles);
#endif

}  // namespace
}  // namespace sg::cuda
