// gather_rows(x[T, D], rows[R]) -> y[R, D], and argmax(logits[R, V]) -> ids[R].
#include "best.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t gather_supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *rows = input(call, 1), *y = output(call, 0);
  if (!x || !rows || !y || !all_dense(call) || x->rank != 2 || y->rank != 2 || rows->rank != 1) return 0;
  if (!is_activation(x) || x->dtype != y->dtype || rows->dtype != SG_I32) return 0;
  return y->shape[0] == rows->shape[0] && y->shape[1] == x->shape[1] ? isa_score(SG_ISA_NAME) : 0;
}

int32_t gather_run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *rows = input(call, 1), *y = output(call, 0);
  const int32_t *picked = data<int32_t>(rows);
  if (int64_t r = find_outside(picked, rows->shape[0], x->shape[0]); r >= 0) {
    return fail(call, "row %d (entry %lld of rows) is outside x, which has %lld rows", picked[r],
                static_cast<long long>(r), static_cast<long long>(x->shape[0]));
  }
  const int64_t bytes = x->shape[1] * (x->dtype == SG_F32 ? 4 : 2);
  parallel_rows(call, rows->shape[0], x->shape[1], [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(data<char>(y) + r * bytes, data<char>(x) + picked[r] * bytes, static_cast<size_t>(bytes));
    }
  });
  return SG_OK;
}

constexpr sg_kernel gather_kernel = describe_row_kernel("gather_rows", -1, gather_supports, nullptr, gather_run);
SG_REGISTER_KERNEL(gather_kernel);

// ---- argmax: each task takes a piece of a row; the pieces of a row are then compared in order, so that the first wins

constexpr int64_t kPiece = 16384;

int64_t pieces_of_row(const sg_tensor *logits) { return (logits->shape[1] + kPiece - 1) / kPiece; }

int32_t argmax_supports(const sg_call *call) {
  const sg_tensor *logits = input(call, 0), *ids = output(call, 0);
  if (!logits || !ids || !all_dense(call) || logits->rank != 2 || !is_activation(logits)) return 0;
  if (logits->shape[1] < 1 || logits->shape[1] > INT32_MAX) return 0;
  return ids->dtype == SG_I32 && num_elements(ids) == logits->shape[0] ? isa_score(SG_ISA_NAME) : 0;
}
size_t argmax_workspace(const sg_call *call) {
  const sg_tensor *logits = call->inputs[0];
  return static_cast<size_t>(logits->shape[0] * pieces_of_row(logits)) * sizeof(Best);
}

int32_t argmax_run(const sg_call *call) {
  const sg_tensor *logits = input(call, 0);
  const int64_t rows = logits->shape[0], n = logits->shape[1], pieces = pieces_of_row(logits);
  Best *found = static_cast<Best *>(call->workspace);
  with_type(logits, [&]<class T>(T) {
    parallel_for(call, rows * pieces, [&](int64_t task, int) {
      const int64_t begin = task % pieces * kPiece, left = n - begin;
      Best best = best_of(data<T>(logits) + task / pieces * n + begin, left < kPiece ? left : kPiece);
      best.index += static_cast<int32_t>(begin);
      found[task] = best;
    });
  });
  int32_t *ids = data<int32_t>(output(call, 0));
  for (int64_t row = 0; row < rows; ++row) {
    Best best = found[row * pieces];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      if (found[row * pieces + piece].value > best.value) best = found[row * pieces + piece];
    }
    ids[row] = best.index;
  }
  return SG_OK;
}

constexpr sg_kernel argmax_kernel = describe_row_kernel("argmax", -1, argmax_supports, argmax_workspace, argmax_run);
SG_REGISTER_KERNEL(argmax_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
