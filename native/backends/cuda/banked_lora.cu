// banked_lora(x[T, K], a[slots, r, K], b[slots, N, r], adapter_slots[T], addend[T, N]) -> y = addend + b[s] (a[s] x).
//
// Floor: x, addend and y once and, where few tokens are decoded, the adapters that they use, which is most of it then.
// Two kernels of tensor core products; the low-rank rows a x lie between them in the workspace, in fp32.
//   shrink  a block takes 16 rows of a and up to 32 tokens; its four warps take 256 columns each of 1024. Where that
//           makes too few blocks, each takes one such chunk of K, and the second kernel adds the chunks.
//   expand  a block takes columns of y and up to 32 tokens. The low rows are split into bf16 numbers whose sum they are
//           (two for y in bf16, three for fp32), so that only b and x have been rounded.
// In both a tile of tokens is gone over once for each adapter in it, and what other adapters' tokens get is left out.
// The order of every sum depends on K and r alone: a token has the same bits in any company. Fragments are read
// straight from device memory, 16 bytes a lane: the order of the columns in a product is free as long as both sides
// have the same. Other dtypes and odd shapes take plain kernels.
#include "attention_ptx.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kSlice = 256, kChunk = kWarps * kSlice;  // columns of a that a warp, a block multiplies before it adds
constexpr int kMaxRank = 128;                          // of the products on tensor cores
constexpr int kMaxTile = 32;                           // tokens
constexpr int kNone = -1, kUnknown = -2;               // in place of a slot

struct Shape {
  int64_t tokens, width, out, x_stride, addend_stride, y_stride;
  int rank, padded_rank, slots;  // padded_rank: a multiple of 16
  int chunks, parts;             // of K; parts: `chunks`, or 1 where a block goes over all of them
  int ways;                      // blocks that share the adapters of a tile

  __device__ float *low_row(float *low, int64_t part, int64_t token) const {
    return low + (part * tokens + token) * padded_rank;
  }
};

// The adapters of a block's tokens.
template <int TOKENS, int GROUP>
struct Tile {
  int slot[TOKENS];
  uint32_t groups[TOKENS];  // at the first token of each adapter: which groups of GROUP tokens have it; 0 elsewhere

  __device__ void read(const Shape &shape, const int32_t *slots, int64_t first) {
    const int t = static_cast<int>(threadIdx.x);
    if (t < TOKENS) {
      const int given = first + t < shape.tokens ? slots[first + t] : kNone;
      slot[t] = given < 0 ? kNone : given < shape.slots ? given : kUnknown;
    }
    __syncthreads();
    if (t < TOKENS) {
      uint32_t with = 0;
      bool is_first = slot[t] >= 0;
      for (int other = 0; other < TOKENS; ++other) {
        if (slot[other] != slot[t]) continue;
        with |= 1u << other / GROUP;
        is_first = is_first && other >= t;
      }
      groups[t] = is_first ? with : 0;
    }
    __syncthreads();
  }
  // body(slot, groups) for the adapters that fall to the block. Every thread comes along.
  template <class Body>
  __device__ void for_adapters(int ways, int way, Body &&body) const {
    int ordinal = 0;
    for (int t = 0; t < TOKENS; ++t) {
      if (groups[t] != 0 && ordinal++ % ways == way) body(slot[t], groups[t]);
    }
  }
};

__device__ inline uint4 load_16(const bf16 *from, bool valid) {
  return valid ? *reinterpret_cast<const uint4 *>(from) : uint4{0, 0, 0, 0};
}
// c += the products of 32 columns, of which every lane holds 8 of rows `first` and `second` of A and of its column of
// B.
__device__ inline void multiply_32(float (&c)[4], const uint4 &first, const uint4 &second, const uint4 &b) {
  multiply_fragments(c, {first.x, second.x, first.y, second.y}, b.x, b.y);
  multiply_fragments(c, {first.z, second.z, first.w, second.w}, b.z, b.w);
}

// ---- low = a x. Rows of a are the rows of the product, tokens its columns, 8 in a group.

template <int GROUPS>
__global__ void __launch_bounds__(kThreads)
    shrink(Shape shape, const bf16 *x, const bf16 *a, const int32_t *slots, float *low) {
  wait_for_kernels_ahead();
  constexpr int kTokens = 8 * GROUPS, kUnroll = GROUPS == 1 ? 4 : 2;
  __shared__ Tile<kTokens, 8> tile;
  __shared__ float of_warp[kWarps][kTokens][16 + 1];
  const int warp = threadIdx.x / 32, lane = lane_index(), group = lane / 4, quad = lane % 4;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTokens;
  const int row = static_cast<int>(blockIdx.x) * 16;
  const int part = static_cast<int>(blockIdx.z) / shape.ways, way = static_cast<int>(blockIdx.z) % shape.ways;
  const int first_chunk = shape.parts > 1 ? part : 0, end_chunk = shape.parts > 1 ? part + 1 : shape.chunks;
  tile.read(shape, slots, first);
  tile.for_adapters(shape.ways, way, [&](int slot, uint32_t groups) {
    const bf16 *upper = a + (static_cast<int64_t>(slot) * shape.rank + row + group) * shape.width + 8 * quad;
    const bf16 *lower = upper + 8 * shape.width;
    const bf16 *of_token = x + (first + group) * shape.x_stride + 8 * quad;
    const bool has_upper = row + group < shape.rank, has_lower = row + group + 8 < shape.rank;
    float totals[GROUPS] = {};
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      const int64_t begin = static_cast<int64_t>(chunk) * kChunk + warp * kSlice;
      const int64_t end = begin + kSlice < shape.width ? begin + kSlice : shape.width;
      float sums[GROUPS][4] = {};
#pragma unroll kUnroll
      for (int64_t k = begin; k < end; k += 32) {
        const bool within = k + 8 * quad < shape.width;
        const uint4 a0 = load_16(upper + k, within && has_upper), a1 = load_16(lower + k, within && has_lower);
        uint4 b[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          b[g] = load_16(of_token + 8 * g * shape.x_stride + k,
                         within && groups >> g & 1 && first + 8 * g + group < shape.tokens);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          if (groups >> g & 1) multiply_32(sums[g], a0, a1, b[g]);
        }
      }
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) of_warp[warp][8 * g + 2 * quad + i % 2][group + i / 2 * 8] = sums[g][i];
      }
      __syncthreads();
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const int token = 8 * g + static_cast<int>(threadIdx.x) / 16, r = static_cast<int>(threadIdx.x) % 16;
        float sum = of_warp[0][token][r];
        for (int w = 1; w < kWarps; ++w) sum += of_warp[w][token][r];
        totals[g] += sum;
      }
      __syncthreads();
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int token = 8 * g + static_cast<int>(threadIdx.x) / 16, r = static_cast<int>(threadIdx.x) % 16;
      if (tile.slot[token] == slot) shape.low_row(low, part, first + token)[row + r] = totals[g];
    }
  });
}

// ---- y = addend + b low. Tokens are the rows of the product, 16 in a group; a warp takes 32 columns of y, in four
// products of 8: column c of product j is column 8 (c / 2) + 2 j + c % 2 of the 32, so that a lane's results are 8
// columns in a row.

// Elements from row to row of the low-rank rows in shared memory: an odd number of times 64 bytes, so that the eight
// lanes of a 16-byte load meet all banks.
__device__ __host__ constexpr int low_stride(int rank) { return ((rank + 31) / 32 * 4 | 4) * 8; }
template <class Y>
constexpr int split_of() {
  return sizeof(Y) == 4 ? 3 : 2;
}

// Tokens first .. first + count of the tile, split, into rows of shared memory.
template <int SPLIT, int TOKENS>
__device__ void stage_low(const Shape &shape, const Tile<TOKENS, 16> &tile, float *low, int64_t first, bf16 *staged) {
  const int stride = low_stride(shape.rank), width = (shape.rank + 31) / 32 * 32;
  for (int i = static_cast<int>(threadIdx.x); i < TOKENS * width; i += kThreads) {
    const int token = i / width, r = i % width;
    float rest = 0.0f;
    if (tile.slot[token] >= 0 && r < shape.rank) {
      for (int part = 0; part < shape.parts; ++part) rest += shape.low_row(low, part, first + token)[r];
    }
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      const bf16 rounded = __float2bfloat16_rn(rest);
      staged[(s * TOKENS + token) * stride + r] = rounded;
      rest -= __bfloat162float(rounded);
    }
  }
  __syncthreads();
}

template <class Y>
struct Output {
  const Y *addend;
  Y *y;
};

// Rows without an adapter, and rows whose adapter does not exist.
template <bool packed, int TOKENS, class Y>
__device__ void write_others(const Shape &shape, const Tile<TOKENS, 16> &tile, int64_t first, int64_t begin,
                             int64_t end, Output<Y> output) {
  for (int token = 0; token < TOKENS && first + token < shape.tokens; ++token) {
    if (tile.slot[token] >= 0 || (tile.slot[token] == kNone && output.addend == output.y)) continue;
    for (int64_t n = begin + 8 * threadIdx.x; n < end; n += 8 * kThreads) {
      float values[8];
      load_upto<8, packed>(output.addend + (first + token) * shape.addend_stride + n, shape.out - n, values);
#pragma unroll
      for (float &value : values) value = tile.slot[token] == kNone ? value : not_a_number();
      store_upto<8, packed>(output.y + (first + token) * shape.y_stride + n, shape.out - n, values);
    }
  }
}

template <int GROUPS, bool packed, class Y>
__global__ void __launch_bounds__(kThreads, 3)
    expand(Shape shape, float *low, const bf16 *b, const int32_t *slots, Output<Y> output, int64_t columns) {
  wait_for_kernels_ahead();
  constexpr int kTokens = 16 * GROUPS, kSplit = split_of<Y>();
  extern __shared__ uint4 dynamic_shared[];
  bf16 *staged = reinterpret_cast<bf16 *>(dynamic_shared);
  __shared__ Tile<kTokens, 16> tile;
  const int warp = threadIdx.x / 32, lane = lane_index(), group = lane / 4, quad = lane % 4;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTokens, begin = blockIdx.x * columns;
  const int64_t end = begin + columns < shape.out ? begin + columns : shape.out;
  const int stride = low_stride(shape.rank);
  tile.read(shape, slots, first);
  if (blockIdx.z == 0) write_others<packed>(shape, tile, first, begin, end, output);
  bool is_staged = false;
  tile.for_adapters(shape.ways, static_cast<int>(blockIdx.z), [&](int slot, uint32_t groups) {
    if (!is_staged) stage_low<kSplit, kTokens>(shape, tile, low, first, staged);
    is_staged = true;
    for (int64_t n = begin + 32 * warp; n < end; n += 32 * kWarps) {
      const int64_t column = n + 8 * quad;
      float values[GROUPS][2][8], sums[GROUPS][4][4] = {};
      bool mine[GROUPS][2];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int token = 16 * g + 8 * h + group;
          mine[g][h] = tile.slot[token] == slot;
          load_upto<8, packed>(output.addend + (first + token) * shape.addend_stride + column,
                               mine[g][h] ? shape.out - column : 0, values[g][h]);
        }
      }
      for (int first_rank = 0; first_rank < shape.rank; first_rank += 32) {
        const int r = first_rank + 8 * quad;
        uint4 weights[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int64_t at = n + group / 2 * 8 + 2 * j + group % 2;
          weights[j] = load_16(b + (slot * shape.out + at) * shape.rank + r, at < shape.out && r < shape.rank);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          if (!(groups >> g & 1)) continue;
#pragma unroll
          for (int s = 0; s < kSplit; ++s) {
            const bf16 *rows = staged + (s * kTokens + 16 * g + group) * stride + r;
            const uint4 upper = *reinterpret_cast<const uint4 *>(rows);
            const uint4 lower = *reinterpret_cast<const uint4 *>(rows + 8 * stride);
#pragma unroll
            for (int j = 0; j < 4; ++j) multiply_32(sums[g][j], upper, lower, weights[j]);
          }
        }
      }
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!mine[g][h]) continue;
#pragma unroll
          for (int i = 0; i < 8; ++i) values[g][h][i] += sums[g][i / 2][2 * h + i % 2];
          const int64_t token = first + 16 * g + 8 * h + group;
          store_upto<8, packed>(output.y + token * shape.y_stride + column, shape.out - column, values[g][h]);
        }
      }
    }
  });
}

// ---- other dtypes, and shapes that don't suit 16-byte loads: a warp a dot product, then a thread an element

template <class X, class A>
__global__ void __launch_bounds__(kWarpTaskThreads)
    shrink_plain(Shape shape, const X *x, const A *a, const int32_t *slots, float *low) {
  wait_for_kernels_ahead();
  const int64_t token = warp_task() / shape.rank, r = warp_task() % shape.rank;
  if (token >= shape.tokens) return;
  const int slot = slots[token];
  if (slot < 0 || slot >= shape.slots) return;
  const A *row = a + (slot * static_cast<int64_t>(shape.rank) + r) * shape.width;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t k = lane_index(); k < shape.width; k += 32) {
    sum = fmaf(to_float(x[token * shape.x_stride + k]), to_float(row[k]), sum);
  }
  sum = warp_sum(sum);
  if (lane_index() == 0) shape.low_row(low, 0, token)[r] = sum;
}

template <class A, class Y>
__global__ void __launch_bounds__(kThreads)
    expand_plain(Shape shape, float *low, const A *b, const int32_t *slots, Output<Y> output, int64_t blocks_of_row) {
  wait_for_kernels_ahead();
  const int64_t token = blockIdx.x / blocks_of_row, n = blockIdx.x % blocks_of_row * kThreads + threadIdx.x;
  if (n >= shape.out) return;
  const int slot = slots[token];
  float sum = to_float(output.addend[token * shape.addend_stride + n]);
  if (slot >= shape.slots) sum = not_a_number();
  if (slot >= 0 && slot < shape.slots) {
    const float *of_token = shape.low_row(low, 0, token);
    const A *row = b + (slot * shape.out + n) * shape.rank;
    float product = 0.0f;
    for (int r = 0; r < shape.rank; ++r) product = fmaf(of_token[r], to_float(row[r]), product);
    sum += product;
  }
  output.y[token * shape.y_stride + n] = from_float<Y>(sum);
}

// ---- the call

constexpr int64_t tile_of(int64_t tokens) { return tokens <= 8 ? 8 : kMaxTile; }

Shape describe(const sg_call *call) {
  const sg_tensor *x = call->inputs[0], *a = call->inputs[1], *addend = call->inputs[4], *y = call->outputs[0];
  Shape shape{};
  shape.tokens = x->shape[0], shape.width = x->shape[1], shape.out = y->shape[1];
  shape.x_stride = row_stride(x, shape.width);
  shape.addend_stride = row_stride(addend, shape.out), shape.y_stride = row_stride(y, shape.out);
  shape.slots = static_cast<int>(a->shape[0]), shape.rank = static_cast<int>(a->shape[1]);
  shape.padded_rank = static_cast<int>(ceil_div(shape.rank, 16) * 16);
  shape.chunks = static_cast<int>(ceil_div(shape.width, kChunk));
  const int64_t blocks = ceil_div(shape.tokens, kMaxTile) * (shape.padded_rank / 16);
  shape.parts = blocks >= 2 * device().units ? 1 : shape.chunks;
  shape.ways = static_cast<int>(shape.tokens > 256 || shape.slots == 1 ? 1 : shape.slots < 4 ? shape.slots : 4);
  return shape;
}

bool suits_products(const sg_call *call, const Shape &shape) {
  if (input(call, 0)->dtype != SG_BF16 || input(call, 1)->dtype != SG_BF16) return false;
  if (shape.rank > kMaxRank || shape.rank % 8 != 0) return false;
  return can_pack<8>(data<bf16>(input(call, 0)), shape.x_stride) &&
         can_pack<8>(data<bf16>(input(call, 1)), shape.width) && can_pack<8>(data<bf16>(input(call, 2)), shape.rank);
}

template <class Y>
void launch_expand(const sg_call *call, const Shape &shape, float *low, const bf16 *b, const int32_t *slots) {
  const Output<Y> result{data<const Y>(input(call, 4)), data<Y>(output(call, 0))};
  const bool packed = can_pack<8>(result.addend, shape.addend_stride) && can_pack<8>(result.y, shape.y_stride);
  const bool few = shape.tokens <= 16;
  const int64_t tile = few ? 16 : kMaxTile, tiles = ceil_div(shape.tokens, tile);
  // As many columns a block as leave each multiprocessor some blocks.
  int64_t columns = 32 * kWarps;
  while (columns < 1024 && ceil_div(shape.out, 2 * columns) * tiles >= 4 * device().units) columns *= 2;
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.out, columns)), static_cast<unsigned>(tiles),
                    static_cast<unsigned>(shape.ways));
  const size_t shared = static_cast<size_t>(split_of<Y>() * tile * low_stride(shape.rank)) * sizeof(bf16);
  auto kernel = packed ? (few ? expand<1, true, Y> : expand<2, true, Y>)
                       : (few ? expand<1, false, Y> : expand<2, false, Y>);
  launch_ahead(call, blocks, kThreads, shared, kernel, shape, low, b, slots, result, columns);
}

void run_products(const sg_call *call, const Shape &shape) {
  const bf16 *x = data<const bf16>(input(call, 0)), *a = data<const bf16>(input(call, 1));
  const int32_t *slots = data<const int32_t>(input(call, 3));
  float *low = static_cast<float *>(call->workspace);
  const int64_t tile = tile_of(shape.tokens);
  const dim3 blocks(static_cast<unsigned>(shape.padded_rank / 16), static_cast<unsigned>(ceil_div(shape.tokens, tile)),
                    static_cast<unsigned>(shape.parts * shape.ways));
  launch_ahead(call, blocks, kThreads, 0, tile == 8 ? shrink<1> : shrink<kMaxTile / 8>, shape, x, a, slots, low);
  with_type(output(call, 0), [&]<class Y>(Y) {
    launch_expand<Y>(call, shape, low, data<const bf16>(input(call, 2)), slots);
  });
}

void run_plain(const sg_call *call, Shape shape) {
  shape.parts = 1;
  const int32_t *slots = data<const int32_t>(input(call, 3));
  float *low = static_cast<float *>(call->workspace);
  const int64_t blocks_of_row = ceil_div(shape.out, kThreads);
  const auto blocks = static_cast<unsigned>(shape.tokens * blocks_of_row);
  with_type(input(call, 1), [&]<class A>(A) {
    with_type(input(call, 0), [&]<class X>(X) {
      launch_ahead(call, warp_task_blocks(shape.tokens * shape.rank), kWarpTaskThreads, 0, shrink_plain<X, A>, shape,
                   data<const X>(input(call, 0)), data<const A>(input(call, 1)), slots, low);
    });
    with_type(output(call, 0), [&]<class Y>(Y) {
      const Output<Y> result{data<const Y>(input(call, 4)), data<Y>(output(call, 0))};
      launch_ahead(call, blocks, kThreads, 0, expand_plain<A, Y>, shape, low, data<const A>(input(call, 2)), slots,
                   result, blocks_of_row);
    });
  });
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *a = input(call, 1), *b = input(call, 2), *slots = input(call, 3);
  const sg_tensor *addend = input(call, 4), *y = output(call, 0);
  if (!x || !a || !b || !slots || !addend || !y) return 0;
  if (x->rank != 2 || a->rank != 3 || b->rank != 3 || y->rank != 2) return 0;
  if (!is_activation(x) || !is_activation(a) || a->dtype != b->dtype || !is_activation(y)) return 0;
  if (addend->dtype != y->dtype || !same_shape(addend, y) || slots->dtype != SG_I32 || slots->rank != 1) return 0;
  if (!has_packable_rows(x) || !has_packable_rows(addend) || !has_packable_rows(y)) return 0;
  if (!is_dense(a) || !is_dense(b) || !is_dense(slots)) return 0;
  const int64_t tokens = x->shape[0], rank = a->shape[1];
  if (rank < 1 || rank > 65535 || a->shape[0] > INT32_MAX) return 0;
  if (a->shape[2] != x->shape[1] || x->shape[1] > (1 << 22)) return 0;
  if (b->shape[0] != a->shape[0] || b->shape[1] != y->shape[1] || b->shape[2] != rank) return 0;
  if (slots->shape[0] != tokens || y->shape[0] != tokens || tokens > 65535 * 8) return 0;
  return tokens * ceil_div(y->shape[1], kThreads) <= INT32_MAX && tokens * rank <= INT32_MAX ? 10 : 0;
}

size_t workspace(const sg_call *call) {
  const Shape shape = describe(call);
  return static_cast<size_t>(shape.parts * shape.tokens * shape.padded_rank) * sizeof(float);
}

int32_t run(const sg_call *call) {
  const Shape shape = describe(call);
  if (shape.tokens == 0 || shape.out == 0) return SG_OK;
  if (suits_products(call, shape)) {
    run_products(call, shape);
  } else {
    run_plain(call, shape);
  }
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("banked_lora", "cuda", 4, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
