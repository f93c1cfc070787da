// rms_norm, rms_norm_grad, rms_norm_weight_grad: see surogate_core/ops/rms_norm.py for the formulas.
//
// Shapes: rows of N elements, f32 or bf16 in any mixture; the weight f32, bf16 or f16; rstd f32. The floor is bytes:
// rms_norm reads x and writes y, rms_norm_grad reads dy, x and the addend and writes dx, the weight's gradient reads dy
// and x, each once.
//
// A row is held in registers between its sum and its use, so it crosses memory once. Short rows (a head) are shared by
// 1 to 32 lanes, a block working on many of them; long rows by a block or a part of one. Rows that cannot be moved in
// packs, or are too long for registers, are read twice, the second time from the caches.
//
// rms_norm has one task a thread: 64 bytes of a long row, all under way at once; as blocks end, others begin, so that
// some always wait for memory while others add and store. The weight comes from the first-level cache, after the sum:
// the cache is several times as fast as memory, and registers are worth more as bytes in flight. The gradient's blocks
// walk over rows, with the weight in registers; while they add up a row the next one comes to the second-level cache,
// as the first rows of both do while the kernel ahead ends.
#include <initializer_list>

#include "bits.cuh"
#include "norm_weight.cuh"
#include "prefetch.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kGroupedThreads = 256;  // of a block that works on several rows, or on rows of any form
constexpr int kMaxThreads = 1024;

bool is_rstd(const sg_tensor *rstd, const sg_tensor *x) {
  return rstd->dtype == SG_F32 && num_elements(rstd) == num_rows(x) && is_dense(rstd);
}
bool is_rows_like(const sg_tensor *t, const sg_tensor *x) {
  return is_activation(t) && same_shape(t, x) && has_packable_rows(t);
}

// Row r is row r % inner of the first axis' index r / inner.
struct RowGrid {
  int64_t rows, inner, n;
};

// `inner` is 1, and every stride n, unless some operand has gaps.
RowGrid row_grid(std::initializer_list<const sg_tensor *> operands) {
  const sg_tensor *x = *operands.begin();
  RowGrid grid{num_rows(x), 1, last_dim(x)};
  for (const sg_tensor *t : operands) {
    if (t != nullptr && grid.rows > 0 && !is_dense(t)) grid.inner = grid.rows / x->shape[0];
  }
  return grid;
}
template <class T>
Rows<T> rows_on(const RowGrid &grid, const sg_tensor *t) {
  if (t == nullptr) return {nullptr, 0};
  return rows_of<T>(t, grid.inner * grid.n);
}

struct Place {
  int64_t outer, inner;
};
__device__ inline Place locate(const RowGrid &grid, int64_t row) {
  if (grid.inner == 1) return {row, 0};
  const int64_t outer = row / grid.inner;
  return {outer, row - outer * grid.inner};
}
template <class T>
__device__ inline T *row_at(const Rows<T> &rows, const Place &place, const RowGrid &grid) {
  return rows.data + place.outer * rows.stride + place.inner * grid.n;
}

// How the block's threads share rows: those of its first axis a row, a power of two up to 32 or else whole warps.
struct Share {
  int threads, lane, row, rows;

  __device__ Share()
      : threads(static_cast<int>(blockDim.x)), lane(static_cast<int>(threadIdx.x)),
        row(static_cast<int>(threadIdx.y)), rows(static_cast<int>(blockDim.y)) {}
  template <int V>
  __device__ int column(int pack) const {
    return (pack * threads + lane) * V;
  }
  // Sum over the threads of a row; all of the block call it.
  __device__ float sum(float value, float *scratch) const {
    if (threads <= 32) {
      for (int offset = threads / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
      return value;
    }
    const int warps = threads / 32, in_warp = lane % 32;
    value = warp_sum(value);
    __syncthreads();  // the sums of the rows before have been read
    if (in_warp == 0) scratch[row * warps + lane / 32] = value;
    __syncthreads();
    return warp_sum(in_warp < warps ? scratch[row * warps + in_warp] : 0.0f);
  }
};

// Asks for the block's rows from `first` on: one thread where they lie behind one another, else one for each index of
// the first axis that begins there. Packs of a narrow operand may begin at half of what can be asked for: then nobody.
template <class T>
__device__ inline void bring_block(const RowGrid &grid, const Share &share, const Rows<T> &rows, int64_t first) {
  if (share.lane != 0 || rows.data == nullptr) return;
  const bool together = rows.stride == grid.inner * grid.n;
  const int64_t left = grid.rows - first, row = together ? first : first + share.row;
  const int64_t count = !together ? grid.inner : left < share.rows ? left : share.rows;
  if (row >= grid.rows || (together && share.row != 0)) return;
  const Place place = together ? Place{0, row} : locate(grid, row);
  if (!together && place.inner != 0) return;
  const T *from = row_at(rows, place, grid);
  const auto bytes = static_cast<uint32_t>(count * grid.n * sizeof(T));
  if ((reinterpret_cast<uintptr_t>(from) | bytes) % 16 == 0) bring_closer(from, bytes);
}

// One block asks for a vector that all of them read.
__device__ inline void bring_vector(const void *data, int64_t bytes) {
  if (blockIdx.x != 0 || threadIdx.x != 0 || threadIdx.y != 0) return;
  if ((reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(bytes)) % 16 == 0) {
    bring_closer(data, static_cast<uint32_t>(bytes));
  }
}

// A thread's packs of the row; zeros from column n on. Loads of several operands go before the first `floats`, so that
// they are under way together.
template <class T, int V, int P>
struct Held {
  Bits<T, V> packs[P];

  __device__ Held(const T *row, const Share &share, int n) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = share.column<V>(p);
      if (column < n) packs[p].load(row + column);
    }
  }
  __device__ void floats(float (&to)[P][V]) const {
#pragma unroll
    for (int p = 0; p < P; ++p) packs[p].floats(to[p]);
  }
};
template <int V, int P>
__device__ inline void load_weight(const Weight &weight, const Share &share, int n, float (&to)[P][V]) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int column = share.column<V>(p);
    if (column < n) weight.load_pack<V>(column, to[p]);
  }
}

// Threads of a row of n elements where each holds up to `elements`.
int threads_for_row(int64_t n, int elements) {
  const int64_t threads = ceil_div(n, elements);
  if (threads > 32) return static_cast<int>(32 * ceil_div(threads, 32));
  int power = 1;
  while (power < threads) power *= 2;
  return power;
}
bool fits_registers(int64_t n, int elements) { return n <= static_cast<int64_t>(kMaxThreads) * elements; }

struct Launch {
  dim3 block;  // threads of a row, rows
  unsigned blocks;
};
Launch plan_rows(const RowGrid &grid, int elements) {
  const int threads = threads_for_row(grid.n, elements), rows = threads > 32 ? 1 : kGroupedThreads / threads;
  const int64_t needed = ceil_div(grid.rows, rows);
  const int64_t most = static_cast<int64_t>(device().units) * (2048 / (threads * rows));
  return {dim3(threads, rows), static_cast<unsigned>(needed < most ? needed : most)};
}
// One task a thread: as many blocks as it takes, of at least 128 threads.
Launch plan_tasks(const RowGrid &grid, int elements) {
  const int threads = threads_for_row(grid.n, elements);
  const int rows = threads <= 32 ? kGroupedThreads / threads : threads < 128 ? 128 / threads : 1;
  return {dim3(threads, rows), static_cast<unsigned>(ceil_div(grid.rows, rows))};
}
unsigned blocks_for_any(const RowGrid &grid) {
  const int64_t most = static_cast<int64_t>(device().units) * (2048 / kGroupedThreads);
  return static_cast<unsigned>(grid.rows < most ? grid.rows : most);
}

// Elements that are moved together: 16 bytes of the widest operand.
template <class... T>
constexpr int pack_size() {
  return ((sizeof(T) == 4) || ...) ? 4 : 8;
}

// ---- rms_norm(x[..., N], weight[N]) -> y[..., N], rstd[...]?

// y = held * rstd * (weight + offset). The weights of half of the packs are under way together: registers go no
// further.
template <class Y, class X, class W, int V, int P>
__device__ inline void store_scaled(const Held<X, V, P> &held, const W *weight, float offset, float rstd,
                                    const Share &share, int limit, Y *y) {
  constexpr int kTogether = P / 2;
#pragma unroll
  for (int first = 0; first < P; first += kTogether) {
    Pack<W, V> packs[kTogether];
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const int column = share.column<V>(first + p);
      packs[p] = column < limit ? load_pack<V>(weight + column) : Pack<W, V>{};
    }
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const int column = share.column<V>(first + p);
      float values[V], factors[V];
      held.packs[first + p].floats(values);
      to_floats<V>(packs[p], factors);
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] *= rstd * (factors[i] + offset);
      if (column < limit) store<V>(y + column, values);
    }
  }
}

template <class X, class Y, int V, int P>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_packs(RowGrid grid, Rows<const X> x, Weight weight, float eps, Rows<Y> y, float *rstd_out) {
  __shared__ float scratch[32];
  const Share share;
  bring_block(grid, share, x, static_cast<int64_t>(blockIdx.x) * share.rows);
  bring_vector(weight.data, grid.n * weight.element_bytes());
  const int64_t row = static_cast<int64_t>(blockIdx.x) * share.rows + share.row;
  const int limit = row < grid.rows ? static_cast<int>(grid.n) : 0;
  const Place place = locate(grid, row);
  const X *in = row_at(x, place, grid);
  wait_for_kernels_ahead();
  const Held<X, V, P> held(in, share, limit);
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    float values[V];
    held.packs[p].floats(values);
#pragma unroll
    for (int i = 0; i < V; ++i) squares = fmaf(values[i], values[i], squares);
  }
  const float rstd = rsqrtf(share.sum(squares, scratch) * (1.0f / static_cast<float>(static_cast<int>(grid.n))) + eps);
  if (limit == 0) return;
  Y *out = row_at(y, place, grid);
  weight.with_data([&](const auto *from) { store_scaled(held, from, weight.offset, rstd, share, limit, out); });
  if (rstd_out != nullptr && share.lane == 0) rstd_out[row] = rstd;
}

template <class X, class Y>
__global__ void __launch_bounds__(kGroupedThreads)
    rms_norm_any(RowGrid grid, Rows<const X> x, Weight weight, float eps, Rows<Y> y, float *rstd_out) {
  __shared__ float scratch[32];
  for (int64_t row = blockIdx.x; row < grid.rows; row += gridDim.x) {
    const Place place = locate(grid, row);
    const X *in = row_at(x, place, grid);
    Y *out = row_at(y, place, grid);
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < grid.n; i += blockDim.x) {
      const float value = to_float(in[i]);
      squares = fmaf(value, value, squares);
    }
    const float rstd = rsqrtf(block_sum(squares, scratch) / static_cast<float>(grid.n) + eps);
    for (int64_t i = threadIdx.x; i < grid.n; i += blockDim.x) {
      float factor[1];
      weight.load_pack<1>(i, factor);
      out[i] = from_float<Y>(to_float(in[i]) * (rstd * factor[0]));
    }
    if (rstd_out != nullptr && threadIdx.x == 0) rstd_out[row] = rstd;
  }
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *weight = input(call, 1), *y = output(call, 0), *rstd = output(call, 1);
  if (x == nullptr || weight == nullptr || y == nullptr || x->rank < 1 || last_dim(x) < 1) return 0;
  if (!is_rows_like(x, x) || !is_rows_like(y, x) || !is_weight_vector(weight, x)) return 0;
  if (rstd != nullptr && !is_rstd(rstd, x)) return 0;
  return 10;
}

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  if (num_rows(x) == 0) return SG_OK;
  const RowGrid grid = row_grid({x, y});
  const Weight weight = weight_of(call, 1);
  const float eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  float *rstd = data<float>(output(call, 1));
  with_type(x, [&]<class X>(X) {
    with_type(y, [&]<class Y>(Y) {
      constexpr int V = pack_size<X, Y>();
      const Rows<const X> in = rows_on<const X>(grid, x);
      const Rows<Y> out = rows_on<Y>(grid, y);
      constexpr int kPacks = 4;
      const bool packs = grid.n % V == 0 && can_pack_rows<V>(in) && can_pack_rows<V>(out) && weight.packable<V>();
      if (packs && fits_registers(grid.n, kPacks * V)) {
        const Launch plan = plan_tasks(grid, kPacks * V);
        launch_ahead(call, plan.blocks, plan.block, 0, rms_norm_packs<X, Y, V, kPacks>, grid, in, weight, eps,
                     out, rstd);
      } else {
        rms_norm_any<X, Y>
            <<<blocks_for_any(grid), kGroupedThreads, 0, stream(call)>>>(grid, in, weight, eps, out, rstd);
      }
    });
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("rms_norm", "cuda", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

// ---- rms_norm_grad(dy, x, weight, rstd, addend?) -> dx
// dx = rstd * g - c * x + addend with g = dy * weight and c = rstd^3 * mean(g * x).

template <class G, class X, class Out, int V, int P>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_grad_packs(RowGrid grid, Rows<const G> dy, Rows<const X> x, Weight weight, const float *rstd,
                        Rows<const Out> addend, Rows<Out> dx) {
  // Where registers suffice the weight stays in them and the addend comes with the rest; else the weight is read from
  // the caches for each row, and the addend after the sum.
  constexpr bool roomy = P * V <= 8;
  __shared__ float scratch[32];
  const Share share;
  const int n = static_cast<int>(grid.n);
  const float inverse_n = 1.0f / static_cast<float>(n);
  const auto bring = [&](int64_t first) {
    bring_block(grid, share, dy, first);
    bring_block(grid, share, x, first);
    bring_block(grid, share, addend, first);
  };
  bring(static_cast<int64_t>(blockIdx.x) * share.rows);
  bring_vector(weight.data, grid.n * weight.element_bytes());
  bring_vector(rstd, grid.rows * static_cast<int64_t>(sizeof(float)));
  wait_for_kernels_ahead();
  float factor[P][V];
  if constexpr (roomy) load_weight<V, P>(weight, share, n, factor);
  const int64_t step = static_cast<int64_t>(gridDim.x) * share.rows;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * share.rows; first < grid.rows; first += step) {
    const int64_t row = first + share.row;
    const int limit = row < grid.rows ? n : 0, addend_limit = addend.data != nullptr ? limit : 0;
    const Place place = locate(grid, row);
    const float scale = limit > 0 ? rstd[row] : 0.0f;
    const Held<G, V, P> held_dy(row_at(dy, place, grid), share, limit);
    const Held<X, V, P> held_x(row_at(x, place, grid), share, limit);
    Held<Out, V, P> held_addend(row_at(addend, place, grid), share, roomy ? addend_limit : 0);
    if constexpr (roomy) bring(first + step);
    float g[P][V], values[P][V], dot = 0.0f;
    held_dy.floats(g);
    held_x.floats(values);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = share.column<V>(p);
      if (column >= limit) continue;
      if constexpr (!roomy) weight.load_pack<V>(column, factor[p]);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        g[p][i] *= factor[p][i];
        dot = fmaf(g[p][i], values[p][i], dot);
      }
    }
    const float c = scale * scale * scale * (share.sum(dot, scratch) * inverse_n);
    if constexpr (!roomy) held_addend = Held<Out, V, P>(row_at(addend, place, grid), share, addend_limit);
    float added[P][V];
    held_addend.floats(added);
    Out *out = row_at(dx, place, grid);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int column = share.column<V>(p);
      if (column >= limit) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) g[p][i] = fmaf(-c, values[p][i], scale * g[p][i]) + added[p][i];
      store<V>(out + column, g[p]);
    }
  }
}

template <class G, class X, class Out>
__global__ void __launch_bounds__(kGroupedThreads)
    rms_norm_grad_any(RowGrid grid, Rows<const G> dy, Rows<const X> x, Weight weight, const float *rstd,
                      Rows<const Out> addend, Rows<Out> dx) {
  __shared__ float scratch[32];
  for (int64_t row = blockIdx.x; row < grid.rows; row += gridDim.x) {
    const Place place = locate(grid, row);
    const G *g = row_at(dy, place, grid);
    const X *in = row_at(x, place, grid);
    const Out *added = addend.data != nullptr ? row_at(addend, place, grid) : nullptr;
    Out *out = row_at(dx, place, grid);
    float dot = 0.0f, factor[1];
    for (int64_t i = threadIdx.x; i < grid.n; i += blockDim.x) {
      weight.load_pack<1>(i, factor);
      dot = fmaf(to_float(g[i]) * factor[0], to_float(in[i]), dot);
    }
    const float scale = rstd[row];
    const float c = scale * scale * scale * (block_sum(dot, scratch) / static_cast<float>(grid.n));
    for (int64_t i = threadIdx.x; i < grid.n; i += blockDim.x) {
      weight.load_pack<1>(i, factor);
      const float value = fmaf(-c, to_float(in[i]), scale * (to_float(g[i]) * factor[0]));
      out[i] = from_float<Out>(value + (added != nullptr ? to_float(added[i]) : 0.0f));
    }
  }
}

int32_t grad_supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *weight = input(call, 2), *rstd = input(call, 3);
  const sg_tensor *addend = input(call, 4), *dx = output(call, 0);
  if (!dy || !x || !weight || !rstd || !dx || x->rank < 1 || last_dim(x) < 1) return 0;
  if (!is_rows_like(x, x) || !is_rows_like(dy, x) || !is_rows_like(dx, x)) return 0;
  if (!is_weight_vector(weight, x) || !is_rstd(rstd, x)) return 0;
  if (addend != nullptr && (addend->dtype != dx->dtype || !is_rows_like(addend, x))) return 0;
  return 10;
}

int32_t grad_run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *addend = input(call, 4), *dx = output(call, 0);
  if (num_rows(x) == 0) return SG_OK;
  const RowGrid grid = row_grid({x, dy, addend, dx});
  const Weight weight = weight_of(call, 2);
  const float *rstd = data<float>(input(call, 3));
  with_type(dy, [&]<class G>(G) {
    with_type(x, [&]<class X>(X) {
      with_type(dx, [&]<class Out>(Out) {
        constexpr int V = pack_size<G, X, Out>();
        const Rows<const G> g = rows_on<const G>(grid, dy);
        const Rows<const X> in = rows_on<const X>(grid, x);
        const Rows<const Out> added = rows_on<const Out>(grid, addend);
        const Rows<Out> out = rows_on<Out>(grid, dx);
        const auto go = [&](auto kernel, int elements) {
          const Launch plan = plan_rows(grid, elements);
          launch_ahead(call, plan.blocks, plan.block, 0, kernel, grid, g, in, weight, rstd, added, out);
        };
        const bool packs = grid.n % V == 0 && can_pack_rows<V>(g) && can_pack_rows<V>(in) && can_pack_rows<V>(added) &&
                           can_pack_rows<V>(out) && weight.packable<V>();
        if (!packs || !fits_registers(grid.n, 16)) {
          rms_norm_grad_any<G, X, Out>
              <<<blocks_for_any(grid), kGroupedThreads, 0, stream(call)>>>(grid, g, in, weight, rstd, added, out);
        } else if (fits_registers(grid.n, 8)) {
          go(rms_norm_grad_packs<G, X, Out, V, 8 / V>, 8);
        } else {
          go(rms_norm_grad_packs<G, X, Out, V, 16 / V>, 16);
        }
      });
    });
  });
  return launched(call);
}

constexpr sg_kernel grad_kernel = describe_kernel("rms_norm_grad", "cuda", 4, grad_supports, nullptr, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

// ---- rms_norm_weight_grad(dy, x, rstd) -> dweight[N] +=
// Rows are cut into chunks by shape. A block adds up a chunk for 32 V columns: each warp takes every eighth row, its
// columns in registers, and the warps' sums are added in order. The chunks' sums are then added in a fixed order.

constexpr int kWarps = kGroupedThreads / 32;

struct Chunks {
  int64_t count, rows;
};
// About 1024 blocks of 128 columns, but no chunk of fewer than 32 rows.
Chunks chunks_of(const sg_tensor *x) {
  const int64_t rows = num_rows(x), wanted = ceil_div(1024, ceil_div(last_dim(x), 128));
  const int64_t each = ceil_div(rows, wanted), taken = each > 32 ? each : 32;
  return {ceil_div(rows, taken), taken};
}

template <int V, int R, class G, class X>
__device__ inline void add_rows(const RowGrid &grid, const Rows<const G> &dy, const Rows<const X> &x, const float *rstd,
                                int64_t row, int64_t column, float (&sums)[V]) {
  float g[R][V], values[R][V], scale[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const Place place = locate(grid, row + r * kWarps);
    load<V>(row_at(dy, place, grid) + column, g[r]);
    load<V>(row_at(x, place, grid) + column, values[r]);
    scale[r] = rstd[row + r * kWarps];
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] = fmaf(g[r][i], values[r][i] * scale[r], sums[i]);
  }
}

template <class G, class X, int V>
__global__ void __launch_bounds__(kGroupedThreads)
    sum_chunks(RowGrid grid, int64_t chunk_rows, Rows<const G> dy, Rows<const X> x, const float *rstd,
               float *partials) {
  __shared__ float scratch[kWarps][32 * V];
  wait_for_kernels_ahead();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * (32 * V), column = base + lane * V;
  const int64_t begin = blockIdx.y * chunk_rows;
  const int64_t end = begin + chunk_rows < grid.rows ? begin + chunk_rows : grid.rows;
  float sums[V] = {};
  if (column < grid.n) {
    int64_t row = begin + warp;
    for (; row + 3 * kWarps < end; row += 4 * kWarps) add_rows<V, 4>(grid, dy, x, rstd, row, column, sums);
    for (; row < end; row += kWarps) add_rows<V, 1>(grid, dy, x, rstd, row, column, sums);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) scratch[warp][lane * V + i] = sums[i];
  __syncthreads();
  const int mine = threadIdx.x;
  if (mine >= 32 * V || base + mine >= grid.n) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += scratch[w][mine];
  partials[blockIdx.y * grid.n + base + mine] = sum;
}

// One block for 32 columns: warp w adds up the chunks w, w + 32, ...; then the warps' sums are added in order.
__global__ void __launch_bounds__(kMaxThreads)
    add_chunks(const float *partials, int64_t chunks, int64_t n, float *dweight) {
  __shared__ float scratch[32][32];
  wait_for_kernels_ahead();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float sum = 0.0f;
  if (column < n) {
#pragma unroll 4
    for (int64_t chunk = warp; chunk < chunks; chunk += 32) sum += partials[chunk * n + column];
  }
  scratch[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= n) return;
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 32; ++w) sum += scratch[w][lane];
  dweight[column] += sum;
}

int32_t weight_grad_supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *rstd = input(call, 2), *dweight = output(call, 0);
  if (!dy || !x || !rstd || !dweight || x->rank < 1 || last_dim(x) < 1) return 0;
  if (!is_rows_like(x, x) || !is_rows_like(dy, x) || !is_rstd(rstd, x)) return 0;
  if (dweight->dtype != SG_F32 || num_elements(dweight) != last_dim(x) || !is_dense(dweight)) return 0;
  return 10;
}

size_t weight_grad_workspace(const sg_call *call) {
  const sg_tensor *x = call->inputs[1];
  return static_cast<size_t>(chunks_of(x).count * last_dim(x)) * sizeof(float);
}

int32_t weight_grad_run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1);
  if (num_rows(x) == 0) return SG_OK;
  const RowGrid grid = row_grid({x, dy});
  const Chunks chunks = chunks_of(x);
  const float *rstd = data<float>(input(call, 2));
  float *partials = static_cast<float *>(call->workspace);
  with_type(dy, [&]<class G>(G) {
    with_type(x, [&]<class X>(X) {
      constexpr int V = pack_size<G, X>();
      const Rows<const G> g = rows_on<const G>(grid, dy);
      const Rows<const X> in = rows_on<const X>(grid, x);
      const auto go = [&](auto kernel, int columns) {
        const dim3 blocks(static_cast<unsigned>(ceil_div(grid.n, columns)), static_cast<unsigned>(chunks.count));
        launch_ahead(call, blocks, kGroupedThreads, 0, kernel, grid, chunks.rows, g, in, rstd, partials);
      };
      if (grid.n % V == 0 && can_pack_rows<V>(g) && can_pack_rows<V>(in)) {
        go(sum_chunks<G, X, V>, 32 * V);
      } else {
        go(sum_chunks<G, X, 1>, 32);
      }
    });
  });
  launch_ahead(call, static_cast<unsigned>(ceil_div(grid.n, 32)), kMaxThreads, 0, add_chunks, partials, chunks.count,
               grid.n, data<float>(output(call, 0)));
  return launched(call);
}

constexpr sg_kernel weight_grad_kernel = describe_kernel("rms_norm_weight_grad", "cuda", -1, weight_grad_supports,
                                                         weight_grad_workspace, weight_grad_run);
SG_REGISTER_KERNEL(weight_grad_kernel);

}  // namespace
}  // namespace sg::cuda
