// banked_lora(x[T, K], a[slots, r, K], b[slots, N, r], adapter_slots[T], addend[T, N]) -> y = addend + b[s] (a[s] x).
//
// Tokens are put together by slot, in units of up to 32. A first round of tasks forms a[s] x, dot products of four
// tokens with four rows of a; a second adds b[s] times that to a unit's rows of y, some columns at a time: a square
// of b is transposed once for all tokens of the unit. Every sum is formed in an order that its length alone decides,
// so a token has the same bits alone and in any company.
#include <algorithm>

#include "gemm.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kUnitTokens = 32, kUnitRows = 8, kUnitColumns = 256;
constexpr int64_t kMaxRank = 256;

struct Unit {
  int32_t slot, first, count;  // tokens order[first .. first + count)
};

struct Operands {
  const sg_tensor *x, *a, *b, *addend, *y;
  const int32_t *slots;
  int64_t tokens, width, num_slots, rank, padded_rank, out, x_stride, addend_stride, y_stride;

  explicit Operands(const sg_call *call)
      : x(call->inputs[0]), a(call->inputs[1]), b(call->inputs[2]), addend(call->inputs[4]), y(call->outputs[0]),
        slots(data<int32_t>(call->inputs[3])), tokens(x->shape[0]), width(x->shape[1]), num_slots(a->shape[0]),
        rank(a->shape[1]), padded_rank((rank + kLanes - 1) / kLanes * kLanes), out(y->shape[1]),
        x_stride(stride_of(x)), addend_stride(stride_of(addend)), y_stride(stride_of(y)) {}
  static int64_t stride_of(const sg_tensor *t) { return t->shape[0] > 1 ? t->strides[0] : t->shape[1]; }
};

struct Workspace {
  float *low;      // [T, padded_rank]
  int32_t *order;  // tokens that have an adapter, by slot
  Unit *units;     // at most T
  int32_t *begin;  // [slots + 1]

  Workspace(const Operands &o, void *memory)
      : low(static_cast<float *>(memory)), order(reinterpret_cast<int32_t *>(low + o.tokens * o.padded_rank)),
        units(reinterpret_cast<Unit *>(order + o.tokens)), begin(reinterpret_cast<int32_t *>(units + o.tokens)) {}
  static size_t size(const Operands &o) {
    return static_cast<size_t>(o.tokens * (o.padded_rank + 4) + o.num_slots + 1) * 4;
  }
};

// Fills order and units; returns how many units there are.
int64_t group_tokens(const Operands &o, const Workspace &w) {
  std::fill(w.begin, w.begin + o.num_slots + 1, 0);
  for (int64_t t = 0; t < o.tokens; ++t) {
    if (o.slots[t] >= 0) ++w.begin[o.slots[t] + 1];
  }
  int64_t units = 0;
  for (int64_t slot = 0; slot < o.num_slots; ++slot) {
    const int32_t end = w.begin[slot] + w.begin[slot + 1];
    for (int32_t first = w.begin[slot]; first < end; first += kUnitTokens) {
      w.units[units++] = {static_cast<int32_t>(slot), first, std::min<int32_t>(kUnitTokens, end - first)};
    }
    w.begin[slot + 1] = end;
  }
  for (int64_t t = 0; t < o.tokens; ++t) {
    if (o.slots[t] >= 0) w.order[w.begin[o.slots[t]]++] = static_cast<int32_t>(t);
  }
  return units;
}

// to[i][j] = x[i] . a[j] for M rows of either.
template <int M, class X, class A>
void dot_rows(const X *const (&x)[4], const A *a, int64_t width, int rows, float *const (&to)[4]) {
  vf sums[M][4];
  for (auto &of_token : sums) {
    for (vf &sum : of_token) sum = vzero();
  }
  const A *row[4];
  for (int j = 0; j < 4; ++j) row[j] = a + std::min(j, rows - 1) * width;
  for_vectors(width, [&](int64_t k, int m) SG_FLATTEN {
    vf of_row[4];
    for (int j = 0; j < 4; ++j) of_row[j] = vload_upto(row[j] + k, m);
    for (int i = 0; i < M; ++i) {
      const vf of_token = vload_upto(x[i] + k, m);
      for (int j = 0; j < 4; ++j) sums[i][j] = vfma(of_token, of_row[j], sums[i][j]);
    }
  });
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < rows; ++j) to[i][j] = vsum(sums[i][j]);
  }
}

template <class X, class A>
void shrink(const Operands &o, const Workspace &w, const Unit &unit, int64_t first_row) {
  const A *a = data<A>(o.a) + unit.slot * o.rank * o.width;
  const int64_t end_row = std::min(first_row + kUnitRows, o.rank);
  for (int64_t row = first_row; row < end_row; row += 4) {
    const int rows = static_cast<int>(std::min<int64_t>(4, end_row - row));
    for (int i = 0; i < unit.count; i += 4) {
      const int count = std::min(4, unit.count - i);
      const X *x[4];
      float *to[4];
      for (int j = 0; j < 4; ++j) {
        const int64_t token = w.order[unit.first + i + std::min(j, count - 1)];
        x[j] = data<X>(o.x) + token * o.x_stride;
        to[j] = w.low + token * o.padded_rank + row;
      }
      if (count == 1) {
        dot_rows<1>(x, a + row * o.width, o.width, rows, to);
      } else {
        dot_rows<4>(x, a + row * o.width, o.width, rows, to);
      }
    }
  }
}

// to[r][i] = b[i][r] for `columns` <= kLanes rows of b, zeros beyond them.
template <class B>
void transpose_columns(const Operands &o, const B *b, int columns, float *square, float *to) {
  for (int64_t r = 0; r < o.padded_rank; r += kLanes) {
    const int m = static_cast<int>(std::min<int64_t>(kLanes, o.rank - r));
    for (int i = 0; i < kLanes; ++i) {
      vstore(square + i * kLanes, i < columns ? vload_upto(b + i * o.rank + r, m) : vzero());
    }
    transpose_square(square, kLanes, to + r * kLanes, kLanes);
  }
}

template <class B, class Y>
void expand(const Operands &o, const Workspace &w, const Unit &unit, int64_t first, float *square, float *columns) {
  const B *b = data<B>(o.b) + unit.slot * o.out * o.rank;
  const int64_t end = std::min(first + kUnitColumns, o.out);
  for (int64_t column = first; column < end; column += kLanes) {
    const int m = static_cast<int>(std::min<int64_t>(kLanes, end - column));
    transpose_columns(o, b + column * o.rank, m, square, columns);
    for (int i = 0; i < unit.count; i += 4) {
      const int count = std::min(4, unit.count - i);
      int64_t token[4];
      vf sums[4];
      for (int j = 0; j < 4; ++j) {
        token[j] = w.order[unit.first + i + std::min(j, count - 1)];
        sums[j] = vzero();
      }
      for (int64_t r = 0; r < o.rank; ++r) {
        const vf of_rank = vload(columns + r * kLanes);
        for (int j = 0; j < 4; ++j) sums[j] = vfma(vset(w.low[token[j] * o.padded_rank + r]), of_rank, sums[j]);
      }
      for (int j = 0; j < count; ++j) {
        const vf before = vload_upto(data<Y>(o.addend) + token[j] * o.addend_stride + column, m);
        vstore_upto(data<Y>(o.y) + token[j] * o.y_stride + column, vadd(before, sums[j]), m);
      }
    }
  }
}

// Rows without an adapter, where y is not the addend itself.
void copy_others(const sg_call *call, const Operands &o) {
  if (o.addend->data == o.y->data) return;
  const int64_t size = o.y->dtype == SG_F32 ? 4 : 2;
  parallel_rows(call, o.tokens, o.out, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (o.slots[t] >= 0) continue;
      std::memcpy(data<char>(o.y) + t * o.y_stride * size, data<char>(o.addend) + t * o.addend_stride * size,
                  static_cast<size_t>(o.out * size));
    }
  });
}

int32_t run(const sg_call *call) {
  const Operands o(call);
  for (int64_t t = 0; t < o.tokens; ++t) {
    if (o.slots[t] < o.num_slots) continue;
    return fail(call, "adapter slot %d of token %lld is outside the bank, which has %lld slots", o.slots[t],
                static_cast<long long>(t), static_cast<long long>(o.num_slots));
  }
  const Workspace w(o, call->workspace);
  copy_others(call, o);
  const int64_t units = group_tokens(o, w);
  if (units == 0) return SG_OK;
  const int64_t parts = (o.rank + kUnitRows - 1) / kUnitRows, stripes = (o.out + kUnitColumns - 1) / kUnitColumns;
  with_type(o.a, [&]<class A>(A) {
    with_type(o.x, [&]<class X>(X) {
      parallel_for(call, units * parts, [&](int64_t task, int) {
        shrink<X, A>(o, w, w.units[task / parts], task % parts * kUnitRows);
      });
    });
    with_type(o.y, [&]<class Y>(Y) {
      parallel_for(call, units * stripes, [&](int64_t task, int) {
        float square[kLanes * kLanes], columns[kMaxRank * kLanes];
        expand<A, Y>(o, w, w.units[task / stripes], task % stripes * kUnitColumns, square, columns);
      });
    });
  });
  return SG_OK;
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *a = input(call, 1), *b = input(call, 2), *slots = input(call, 3);
  const sg_tensor *addend = input(call, 4), *y = output(call, 0);
  if (!x || !a || !b || !slots || !addend || !y) return 0;
  if (x->rank != 2 || a->rank != 3 || b->rank != 3 || y->rank != 2) return 0;
  if (!is_activation(x) || !is_activation(a) || a->dtype != b->dtype || !is_activation(y)) return 0;
  if (addend->dtype != y->dtype || !same_shape(addend, y) || slots->dtype != SG_I32 || slots->rank != 1) return 0;
  if (!has_dense_rows(x) || !has_dense_rows(addend) || !has_dense_rows(y)) return 0;
  if (!is_dense(a) || !is_dense(b) || !is_dense(slots)) return 0;
  const int64_t rank = a->shape[1];
  if (rank < 1 || rank > kMaxRank || a->shape[2] != x->shape[1] || x->shape[0] > INT32_MAX) return 0;
  if (b->shape[0] != a->shape[0] || b->shape[1] != y->shape[1] || b->shape[2] != rank) return 0;
  return slots->shape[0] == x->shape[0] && y->shape[0] == x->shape[0] ? isa_score(SG_ISA_NAME) : 0;
}

size_t workspace(const sg_call *call) { return Workspace::size(Operands(call)); }

constexpr sg_kernel kernel = describe_row_kernel("banked_lora", 4, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
