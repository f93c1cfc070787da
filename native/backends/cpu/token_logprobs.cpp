// token_logprobs(logits[R, V], sampled[R], draw[R, 8]) -> logprob[R], top_ids[R, 20], top_logprobs[R, 20].
//
// A task is a piece of a row that asks: its largest logits in order, with a sorted list that few elements get into,
// then its weights' sum beside its own largest. The pieces of a row are joined in order.
#include <algorithm>

#include "logits.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int kMost = 20;
constexpr float kLeast = -9999.0f;
constexpr int kDraw = 8, kWanted = 6, kTarget = 7;  // columns of draw

struct Piece {
  double mass;  // of e^(x - best[0].value)
  Best best[kMost];
};

// The list keeps its order: larger first, lower index first of equals. `kept` is how many it may hold.
void insert(Best *list, int kept, Best candidate) {
  int at = kept - 1;
  for (; at > 0 && list[at - 1].value < candidate.value; --at) list[at] = list[at - 1];
  list[at] = candidate;
}

// `wanted` >= 1 and at most n. Where all are -infinity the mass is 0.
template <class T>
void scan(const T *p, int64_t begin, int64_t n, int wanted, Piece *piece) {
  int held = 0;
  for_vectors(n, [&](int64_t i, int m) {
    const vf x = load_logits(p + begin + i, m);
    // Equal to the last of a full list is too late: its index is lower.
    if (held == wanted && above(x, vset(piece->best[held - 1].value)) == 0) return;
    float lanes[kLanes];
    vstore(lanes, x);
    for (int lane = 0; lane < m; ++lane) {
      const Best candidate{lanes[lane], static_cast<int32_t>(begin + i + lane)};
      if (held < wanted) {
        insert(piece->best, ++held, candidate);
      } else if (candidate.value > piece->best[held - 1].value) {
        insert(piece->best, held, candidate);
      }
    }
  });
  const float most = piece->best[0].value;
  piece->mass = most == -INFINITY ? 0.0 : sum_weights(p + begin, n, {most, 1.0f}, [](int64_t, vf, vf) {});
}

// The lists of a row's pieces as one, in `merged`; returns how many it holds.
int merge(const Piece *pieces, int64_t num_pieces, int64_t width, int wanted, Best *merged) {
  int held = 0;
  for (int64_t p = 0; p < num_pieces; ++p) {
    const int64_t size = std::min(kLogitPiece, width - p * kLogitPiece);
    for (int i = 0; i < std::min<int64_t>(wanted, size); ++i) {
      const Best candidate = pieces[p].best[i];
      if (held < wanted) {
        insert(merged, ++held, candidate);
      } else if (candidate.value > merged[held - 1].value) {
        insert(merged, held, candidate);
      }
    }
  }
  return held;
}

float clean(float x) { return x == x ? std::min(x, FLT_MAX) : -INFINITY; }

struct Operands {
  const sg_tensor *logits;
  const int32_t *sampled, *draw;
  float *logprob, *top_logprobs;
  int32_t *top_ids;
  int64_t rows, width, pieces;

  explicit Operands(const sg_call *call)
      : logits(input(call, 0)), sampled(data<int32_t>(input(call, 1))), draw(data<int32_t>(input(call, 2))),
        logprob(data<float>(output(call, 0))), top_logprobs(data<float>(output(call, 2))),
        top_ids(data<int32_t>(output(call, 1))), rows(logits->shape[0]), width(logits->shape[1]),
        pieces(logit_pieces(width)) {}
  int wanted(int64_t row) const { return std::min(draw[row * kDraw + kWanted], kMost); }
  float at(int64_t row, int64_t column) const {
    const int64_t i = row * width + column;
    return clean(logits->dtype == SG_BF16 ? to_float(data<bf16>(logits)[i]) : data<float>(logits)[i]);
  }
};

void finish(const Operands &o, int64_t row, const Piece *pieces) {
  int32_t *ids = o.top_ids + row * kMost;
  float *top = o.top_logprobs + row * kMost;
  o.logprob[row] = 0.0f;
  std::fill(ids, ids + kMost, -1);
  std::fill(top, top + kMost, 0.0f);
  if (o.wanted(row) < 0) return;
  Best best[kMost];
  const int held = merge(pieces, o.pieces, o.width, std::max(o.wanted(row), 1), best);
  double mass = 0.0;
  for (int64_t p = 0; p < o.pieces; ++p) {
    const double most = pieces[p].best[0].value;
    if (pieces[p].mass > 0.0) mass += pieces[p].mass * std::exp(most - best[0].value);
  }
  const double log_mass = std::log(mass), most = best[0].value;
  auto logprob = [&](float x) {  // -9999 for -infinity, which a row may consist of
    return x == -INFINITY ? kLeast : std::max(static_cast<float>(x - most - log_mass), kLeast);
  };
  const int32_t asked = o.draw[row * kDraw + kTarget], target = asked >= 0 ? asked : o.sampled[row];
  o.logprob[row] = target >= 0 && target < o.width ? logprob(o.at(row, target)) : kLeast;
  for (int i = 0; i < std::min(held, o.wanted(row)); ++i) {
    ids[i] = best[i].index;
    top[i] = logprob(best[i].value);
  }
}

int32_t run(const sg_call *call) {
  const Operands o(call);
  Piece *pieces = static_cast<Piece *>(call->workspace);
  with_type(o.logits, [&]<class T>(T) {
    parallel_for(call, o.rows * o.pieces, [&](int64_t task, int) {
      const int64_t row = task / o.pieces, begin = task % o.pieces * kLogitPiece;
      if (o.wanted(row) < 0) return;
      const int64_t n = std::min(kLogitPiece, o.width - begin);
      const int listed = static_cast<int>(std::min<int64_t>(std::max(o.wanted(row), 1), n));
      scan(data<T>(o.logits) + row * o.width, begin, n, listed, pieces + task);
    });
  });
  for (int64_t row = 0; row < o.rows; ++row) finish(o, row, pieces + row * o.pieces);
  return SG_OK;
}

int32_t supports(const sg_call *call) {
  const sg_tensor *logits = input(call, 0), *sampled = input(call, 1), *draw = input(call, 2);
  const sg_tensor *logprob = output(call, 0), *ids = output(call, 1), *top = output(call, 2);
  if (!logits || !sampled || !draw || !logprob || !ids || !top || !all_dense(call)) return 0;
  if (logits->rank != 2 || !is_activation(logits) || logits->shape[1] < 1 || logits->shape[1] > INT32_MAX) return 0;
  const int64_t rows = logits->shape[0];
  if (sampled->dtype != SG_I32 || num_elements(sampled) != rows || draw->dtype != SG_I32) return 0;
  if (num_elements(draw) != rows * kDraw || logprob->dtype != SG_F32 || num_elements(logprob) != rows) return 0;
  if (ids->dtype != SG_I32 || top->dtype != SG_F32 || num_elements(ids) != rows * kMost) return 0;
  return same_shape(ids, top) ? isa_score(SG_ISA_NAME) : 0;
}

size_t workspace(const sg_call *call) {
  const sg_tensor *logits = call->inputs[0];
  return static_cast<size_t>(logits->shape[0] * logit_pieces(logits->shape[1])) * sizeof(Piece);
}

constexpr sg_kernel kernel = describe_row_kernel("token_logprobs", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
