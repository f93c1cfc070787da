// glu(gate, up) -> h = activation(gate) * up, and glu_grad(dh, gate, up) -> dgate, dup: [T, N], f32 or bf16, every
// operand's rows possibly apart, so that gate and up can be two halves of one product.
//
// The floor is bytes: each operand crosses memory once, 3 or 5 elements for each of h. A thread moves 16 bytes of every
// operand at a time; all its loads are under way before it computes. Operands without gaps are taken as one long row.
#include "activation.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;

const sg_tensor *operand(const sg_call *call, int i) {
  return i < call->num_inputs ? input(call, i) : output(call, i - call->num_inputs);
}
int num_operands(const sg_call *call) { return call->num_inputs + call->num_outputs; }

// Operands are all [T, N] of one dtype, with dense rows.
bool all_alike(const sg_call *call) {
  const sg_tensor *first = input(call, 0);
  if (first == nullptr || first->rank != 2 || !is_activation(first)) return false;
  for (int i = 0; i < num_operands(call); ++i) {
    const sg_tensor *t = operand(call, i);
    if (t == nullptr || t->dtype != first->dtype || !same_shape(t, first) || !has_packable_rows(t)) return false;
  }
  return true;
}

// Rows of n elements, or one row of all of them where nothing has gaps.
struct Extent {
  int64_t rows, n;
};

Extent extent_of(const sg_call *call) {
  const sg_tensor *first = input(call, 0);
  return all_dense(call) ? Extent{1, num_elements(first)} : Extent{first->shape[0], first->shape[1]};
}

// V for bf16 and f32: 16 bytes, or single elements where some operand's rows cannot be moved so.
template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));
template <class T>
bool can_pack_all(const sg_call *call, const Extent &extent) {
  bool packs = extent.n % kPack<T> == 0;
  for (int i = 0; i < num_operands(call); ++i) {
    packs = packs && can_pack_rows<kPack<T>>(rows_of<T>(operand(call, i), extent.n));
  }
  return packs;
}

// A block has kThreads * U packs of V elements of one row; a thread's are kThreads packs apart.
template <int V, int U>
struct Blocks {
  unsigned per_row;
  int64_t n;

  static Blocks of(const Extent &extent) {
    return {static_cast<unsigned>(ceil_div(extent.n, kThreads * V * U)), extent.n};
  }
  __device__ int64_t row() const { return blockIdx.x / per_row; }
  __device__ int64_t column() const {
    return (static_cast<int64_t>(blockIdx.x % per_row) * (kThreads * U) + threadIdx.x) * V;
  }
};
template <class T>
__device__ inline T *at(const Rows<T> &rows, int64_t row, int64_t column) {
  return rows.data + row * rows.stride + column;
}

template <class Activation, class T, int V, int U>
__global__ void __launch_bounds__(kThreads)
    glu_packs(Blocks<V, U> blocks, Rows<const T> gate, Rows<const T> up, Rows<T> h) {
  wait_for_kernels_ahead();
  const int64_t row = blocks.row(), first = blocks.column();
  Pack<T, V> gate_packs[U], up_packs[U];
#pragma unroll
  for (int j = 0; j < U; ++j) {
    const int64_t column = first + j * (kThreads * V);
    gate_packs[j] = column < blocks.n ? load_pack<V>(at(gate, row, column)) : Pack<T, V>{};
    up_packs[j] = column < blocks.n ? load_pack<V>(at(up, row, column)) : Pack<T, V>{};
  }
#pragma unroll
  for (int j = 0; j < U; ++j) {
    const int64_t column = first + j * (kThreads * V);
    if (column >= blocks.n) break;
    float g[V], u[V];
    to_floats<V>(gate_packs[j], g);
    to_floats<V>(up_packs[j], u);
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = Activation::value(g[i]) * u[i];
    store<V>(at(h, row, column), g);
  }
}

template <class Activation, class T, int V>
__global__ void __launch_bounds__(kThreads)
    glu_grad_packs(Blocks<V, 1> blocks, Rows<const T> dh, Rows<const T> gate, Rows<const T> up, Rows<T> dgate,
                   Rows<T> dup) {
  wait_for_kernels_ahead();
  const int64_t row = blocks.row(), column = blocks.column();
  if (column >= blocks.n) return;
  const Pack<T, V> dh_pack = load_pack<V>(at(dh, row, column)), gate_pack = load_pack<V>(at(gate, row, column));
  const Pack<T, V> up_pack = load_pack<V>(at(up, row, column));
  float d[V], g[V], u[V];
  to_floats<V>(dh_pack, d);
  to_floats<V>(gate_pack, g);
  to_floats<V>(up_pack, u);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const ValueAndSlope a = Activation::value_and_slope(g[i]);
    g[i] = d[i] * u[i] * a.slope;
    d[i] *= a.value;
  }
  store<V>(at(dgate, row, column), g);
  store<V>(at(dup, row, column), d);
}

template <class Activation, class T, int V, int U>
void launch(const sg_call *call, const Extent &extent) {
  const sg_tensor *gate = input(call, 0), *up = input(call, 1), *h = output(call, 0);
  const Blocks<V, U> blocks = Blocks<V, U>::of(extent);
  launch_ahead(call, static_cast<unsigned>(extent.rows * blocks.per_row), kThreads, 0, glu_packs<Activation, T, V, U>,
               blocks, rows_of<const T>(gate, extent.n), rows_of<const T>(up, extent.n), rows_of<T>(h, extent.n));
}

template <class Activation, class T, int V>
void launch_grad(const sg_call *call, const Extent &extent) {
  const sg_tensor *dh = input(call, 0), *gate = input(call, 1), *up = input(call, 2);
  const sg_tensor *dgate = output(call, 0), *dup = output(call, 1);
  const Blocks<V, 1> blocks = Blocks<V, 1>::of(extent);
  launch_ahead(call, static_cast<unsigned>(extent.rows * blocks.per_row), kThreads, 0, glu_grad_packs<Activation, T, V>,
               blocks, rows_of<const T>(dh, extent.n), rows_of<const T>(gate, extent.n),
               rows_of<const T>(up, extent.n), rows_of<T>(dgate, extent.n), rows_of<T>(dup, extent.n));
}

int32_t supports(const sg_call *call) {
  return call->num_inputs == 2 && call->num_outputs == 1 && all_alike(call) && known_activation(call) ? 10 : 0;
}

int32_t run(const sg_call *call) {
  const Extent extent = extent_of(call);
  if (extent.rows * extent.n == 0) return SG_OK;
  with_activation(call, [&]<class Activation>(Activation) {
    with_type(input(call, 0), [&]<class T>(T) {
      if (can_pack_all<T>(call, extent)) {
        launch<Activation, T, kPack<T>, 2>(call, extent);
      } else {
        launch<Activation, T, 1, 4>(call, extent);
      }
    });
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("glu", "cuda", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

int32_t grad_supports(const sg_call *call) {
  return call->num_inputs == 3 && call->num_outputs == 2 && all_alike(call) && known_activation(call) ? 10 : 0;
}

int32_t grad_run(const sg_call *call) {
  const Extent extent = extent_of(call);
  if (extent.rows * extent.n == 0) return SG_OK;
  with_activation(call, [&]<class Activation>(Activation) {
    with_type(input(call, 0), [&]<class T>(T) {
      if (can_pack_all<T>(call, extent)) {
        launch_grad<Activation, T, kPack<T>>(call, extent);
      } else {
        launch_grad<Activation, T, 1>(call, extent);
      }
    });
  });
  return launched(call);
}

constexpr sg_kernel grad_kernel = describe_kernel("glu_grad", "cuda", 0, grad_supports, nullptr, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

}  // namespace
}  // namespace sg::cuda
