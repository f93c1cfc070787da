// sample(logits[R, V], sampling[R, 8], draw[R, 8], row_places[R], mask, bias; last_ids[B], counts[B, V]) -> sampled[R].
// surogate_core/ops/sample.py says what a row may ask for, and in which order.
//
// A batch of rows goes through three steps. In the first two a task is a piece of a row, so that one row already
// employs every core: (1) penalties, bias and mask, and the largest logit, which ends a greedy row; (2) the weights'
// sum and, of rows that are truncated, how many elements and how much weight lie above a few levels. In (3) a task is
// a row: the highest level that holds all that is kept gives the candidates, among whose bits the thresholds of
// top_k, top_p and min_p are found, eleven at a time; then the token is drawn.
#include <algorithm>

#include "logits.h"
#include "philox.h"

namespace sg::cpu::SG_ISA {
namespace {

enum { kMasked = 1, kBiased = 2, kPenalised = 4 };
constexpr int32_t kTimes = (1 << 30) - 1;  // bits of a count that say how often an id was generated
// Logarithms of shares of the largest weight.
constexpr int kLevels = 6;
constexpr float kLevel[kLevels] = {-1.0f, -2.0f, -4.0f, -6.0f, -9.0f, -13.0f};
constexpr int64_t kBatchBytes = 16 << 20, kBatchRows = 16;

struct Sampling {
  float temperature, top_p, min_p, presence, frequency, repetition, unused[2];
};
struct Draw {
  uint32_t seed[2], position, choice;
  int32_t top_k, flags, logprobs, target;
};
static_assert(sizeof(Sampling) == 32 && sizeof(Draw) == 32);

struct Sums {
  double weight;
  float count_of[kLevels], weight_of[kLevels];  // of what is at least at the level; of truncated rows only
};

struct Candidates {
  float *logits, *weights;
  int32_t *ids;
};

// One row of the batch, and its part of the workspace.
struct Row {
  int64_t index, place;  // place -1: not sampled
  Sampling sampling;
  Draw draw;
  bool modified, truncated;
  Softmax softmax;
  float *adjusted;  // [V], where modified
  Candidates candidates;  // room for [V]
  Best *best;             // of every piece
  Sums *sums;

  bool is_greedy() const { return !(sampling.temperature > 0.0f); }
  bool limits_count(int64_t width) const { return draw.top_k > 0 && draw.top_k < width; }
  bool limits_mass() const { return sampling.top_p < 1.0f; }
};

struct Operands {
  const sg_tensor *logits, *mask, *bias;
  const Sampling *sampling;
  const Draw *draw;
  const int32_t *row_places;
  int32_t *sampled, *last_ids, *counts;
  int64_t rows, width, places, pieces;

  explicit Operands(const sg_call *call)
      : logits(input(call, 0)), mask(input(call, 4)), bias(input(call, 5)), sampling(data<Sampling>(input(call, 1))),
        draw(data<Draw>(input(call, 2))), row_places(data<int32_t>(input(call, 3))),
        sampled(data<int32_t>(output(call, 0))), last_ids(data<int32_t>(output(call, 1))),
        counts(data<int32_t>(output(call, 2))), rows(logits->shape[0]), width(logits->shape[1]),
        places(output(call, 1)->shape[0]), pieces(logit_pieces(width)) {}
  int64_t begin(int64_t piece) const { return piece * kLogitPiece; }
  int64_t size(int64_t piece) const { return std::min(kLogitPiece, width - begin(piece)); }
  // body(pointer to the row's logits as they are drawn from)
  template <class Body>
  auto with_row(const Row &row, Body &&body) const {
    if (row.modified) return body(static_cast<const float *>(row.adjusted));
    if (logits->dtype == SG_BF16) return body(static_cast<const bf16 *>(data<bf16>(logits) + row.index * width));
    return body(static_cast<const float *>(data<float>(logits) + row.index * width));
  }
};

int64_t bytes_of_row(int64_t width) {
  const int64_t of_pieces = logit_pieces(width) * static_cast<int64_t>(sizeof(Sums) + sizeof(Best));
  return (width * 16 + of_pieces + 127) / 64 * 64;
}
int64_t batch_of(int64_t rows, int64_t width) {
  return std::min(rows, std::clamp<int64_t>(kBatchBytes / bytes_of_row(width), 1, kBatchRows));
}

// `memory` is bytes_of_row, aligned to 8 bytes.
Row open_row(const Operands &o, int64_t index, char *memory) {
  Row row{};
  row.index = index;
  row.sampling = o.sampling[index];
  row.draw = o.draw[index];
  const int flags = row.draw.flags, place = o.row_places[index];
  const bool lacks = (flags & kMasked && o.mask == nullptr) || (flags & kBiased && o.bias == nullptr) ||
                     (flags & kPenalised && o.counts == nullptr);
  row.place = place >= 0 && place < o.places && !lacks ? place : -1;
  row.modified = (flags & (kMasked | kBiased | kPenalised)) != 0;
  row.truncated = row.limits_count(o.width) || row.limits_mass() || row.sampling.min_p > 0.0f;
  row.sums = reinterpret_cast<Sums *>(memory);
  row.best = reinterpret_cast<Best *>(row.sums + o.pieces);
  row.adjusted = reinterpret_cast<float *>(row.best + o.pieces);
  row.candidates = {row.adjusted + o.width, row.adjusted + 2 * o.width,
                    reinterpret_cast<int32_t *>(row.adjusted + 3 * o.width)};
  return row;
}

// ---- (1)

void penalise(float *x, const int32_t *counts, int64_t n, const Sampling &sampling) {
  for (int64_t i = 0; i < n; ++i) {
    if (counts[i] == 0) continue;
    x[i] = x[i] > 0.0f ? x[i] / sampling.repetition : x[i] * sampling.repetition;
    const int32_t times = counts[i] & kTimes;
    if (times > 0) x[i] = x[i] - sampling.presence - sampling.frequency * static_cast<float>(times);
  }
}

void apply_mask(float *x, const uint32_t *words, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += 32) {
    const uint32_t word = words[begin / 32];
    if (word == ~0u) continue;
    const int64_t count = std::min<int64_t>(32, n - begin);
    for (int64_t i = 0; i < count; ++i) x[begin + i] = word >> i & 1 ? x[begin + i] : -INFINITY;
  }
}

void prepare(const Operands &o, const Row &row, int64_t piece) {
  const int64_t begin = o.begin(piece), n = o.size(piece);
  if (row.modified) {
    float *x = row.adjusted + begin;
    with_type(o.logits, [&]<class T>(T) {
      const T *from = data<T>(o.logits) + row.index * o.width + begin;
      for_vectors(n, [&](int64_t i, int m) SG_FLATTEN { vstore_upto(x + i, vload_upto(from + i, m), m); });
    });
    if (row.draw.flags & kPenalised) penalise(x, o.counts + row.place * o.width + begin, n, row.sampling);
    if (row.draw.flags & kBiased) {
      const float *bias = data<float>(o.bias) + row.place * o.width + begin;
      for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
        vstore_upto(x + i, vadd(vload_upto(x + i, m), vload_upto(bias + i, m)), m);
      });
    }
    if (row.draw.flags & kMasked) {
      apply_mask(x, data<uint32_t>(o.mask) + row.index * ((o.width + 31) / 32) + begin / 32, n);
    }
  }
  o.with_row(row, [&](auto *x) { row.best[piece] = best_of(x + begin, n); });
  row.best[piece].index += static_cast<int32_t>(begin);
}

// ---- (2)

void weigh(const Operands &o, const Row &row, int64_t piece) {
  const int64_t begin = o.begin(piece), n = o.size(piece);
  Sums &sums = row.sums[piece];
  o.with_row(row, [&](auto *x) {
    if (!row.truncated) {
      sums.weight = sum_weights(x + begin, n, row.softmax, [](int64_t, vf, vf) {});
      return;
    }
    vf count[kLevels], weight[kLevels], level[kLevels];
    for (int l = 0; l < kLevels; ++l) {
      count[l] = weight[l] = vzero();
      level[l] = vset(row.softmax.most + kLevel[l] * row.sampling.temperature);
    }
    sums.weight = sum_weights(x + begin, n, row.softmax, [&](int64_t, vf logits, vf weights) SG_FLATTEN {
      for (int l = 0; l < kLevels; ++l) {
        count[l] = vadd(count[l], where_at_least(logits, level[l], vset(1.0f)));
        weight[l] = vadd(weight[l], where_at_least(logits, level[l], weights));
      }
    });
    for (int l = 0; l < kLevels; ++l) {
      sums.count_of[l] = vsum(count[l]);
      sums.weight_of[l] = vsum(weight[l]);
    }
  });
}

// ---- (3)

double total_weight(const Operands &o, const Row &row) {
  double sum = 0.0;
  for (int64_t piece = 0; piece < o.pieces; ++piece) sum += row.sums[piece].weight;
  return sum;
}

float min_p_least(const Row &row) {
  return row.softmax.most + row.sampling.temperature * std::log(std::min(row.sampling.min_p, 1.0f));
}

// What candidates have at least: a matter of speed, as long as all that is kept has it.
float first_cut(const Operands &o, const Row &row, double total) {
  if (!row.limits_count(o.width) && !row.limits_mass()) return std::max(min_p_least(row), -FLT_MAX);
  const double wanted = row.sampling.top_p * total * (1.0 + 1e-5);
  for (int l = 0; l < kLevels; ++l) {
    double count = 0.0, weight = 0.0;
    for (int64_t piece = 0; piece < o.pieces; ++piece) {
      count += row.sums[piece].count_of[l];
      weight += row.sums[piece].weight_of[l];
    }
    const bool enough = row.limits_count(o.width) ? count >= row.draw.top_k : weight >= wanted;
    if (enough) return std::max(row.softmax.most + kLevel[l] * row.sampling.temperature, -FLT_MAX);
  }
  return -FLT_MAX;
}

// Takes what is at least at the cut, in order of ids; returns how many there are.
int64_t collect(const Operands &o, const Row &row, float cut) {
  const Candidates &c = row.candidates;
  const vf least = vset(cut);
  int64_t count = 0;
  o.with_row(row, [&](auto *x) {
    for_vectors(o.width, [&](int64_t i, int m) SG_FLATTEN {
      const vf logits = load_logits(x + i, m);
      uint32_t lanes = at_least(logits, least);
      if (lanes == 0) return;
      float of_logits[kLanes];
      vstore(of_logits, logits);
      for (; lanes != 0; lanes &= lanes - 1, ++count) {
        const int lane = __builtin_ctz(lanes);
        c.logits[count] = of_logits[lane];
        c.ids[count] = static_cast<int32_t>(i + lane);
      }
    });
  });
  for_vectors(count, [&](int64_t i, int m) SG_FLATTEN {
    vstore_upto(c.weights + i, row.softmax.weights(vload_upto(c.logits + i, m)), m);
  });
  return count;
}

// Unsigned integers in the order of floats.
inline uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}
inline float from_ordered(uint32_t key) {
  const uint32_t bits = key ^ (key >> 31 ? 0x80000000u : ~0u);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The largest t for which measure(i), summed over the x[i] >= t, is at least `wanted`; the smallest x where none is.
template <class Measure>
float threshold(const float *x, int64_t n, double wanted, Measure &&measure) {
  uint32_t prefix = 0;
  double sum = 0.0;
  for (int shift = 21, bits = 11; ; bits = shift < 11 ? shift : 11, shift -= bits) {
    double of_bucket[2048] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = ordered(x[i]);
      if (shift + bits < 32 && key >> (shift + bits) != prefix) continue;
      of_bucket[key >> shift & ((1u << bits) - 1)] += measure(i);
    }
    uint32_t last = 0;
    for (int bucket = (1 << bits) - 1; bucket >= 0; --bucket) {
      if (!(of_bucket[bucket] > 0.0)) continue;
      last = static_cast<uint32_t>(bucket);
      if (sum + of_bucket[bucket] >= wanted) break;
      sum += of_bucket[bucket];
    }
    prefix = prefix << bits | last;
    if (shift == 0) return from_ordered(prefix);
  }
}

double uniform(const Draw &draw) {
  uint32_t words[4];
  philox_words({draw.position, draw.choice, 0, 1}, draw.seed[0], draw.seed[1], words);
  return (words[0] + words[1] * 0x1p-32) * 0x1p-32;
}

// Sets *least to what a candidate must have to be kept; false where the candidates don't hold all that is kept.
bool find_least(const Operands &o, const Row &row, int64_t count, double total, bool all, float *least) {
  const Candidates &c = row.candidates;
  *least = -INFINITY;
  if (row.limits_count(o.width)) {
    if (count < row.draw.top_k && !all) return false;
    *least = threshold(c.logits, count, row.draw.top_k, [](int64_t) { return 1.0; });
  }
  if (row.limits_mass()) {
    double kept = 0.0;
    for (int64_t i = 0; i < count; ++i) kept += c.logits[i] >= *least ? c.weights[i] : 0.0f;
    const double wanted = std::max(row.sampling.top_p, 0.0f) * (row.limits_count(o.width) ? kept : total);
    if (kept < wanted && !all) return false;
    const float counted = *least;
    const float likely = threshold(c.logits, count, wanted, [&](int64_t i) {
      return c.logits[i] >= counted ? static_cast<double>(c.weights[i]) : 0.0;
    });
    *least = std::max(*least, likely);
  }
  if (row.sampling.min_p > 0.0f) *least = std::max(*least, min_p_least(row));
  return true;
}

int32_t draw_truncated(const Operands &o, const Row &row) {
  const Candidates &c = row.candidates;
  const double total = total_weight(o, row);
  int64_t count = collect(o, row, first_cut(o, row, total));
  float least;
  if (!find_least(o, row, count, total, false, &least)) {  // as where less than top_k elements are finite
    count = collect(o, row, -FLT_MAX);
    find_least(o, row, count, total, true, &least);
  }
  double kept = 0.0, sum = 0.0;
  for (int64_t i = 0; i < count; ++i) kept += c.logits[i] >= least ? c.weights[i] : 0.0f;
  const double target = uniform(row.draw) * kept;
  int32_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (c.logits[i] < least || c.weights[i] == 0.0f) continue;
    last = c.ids[i];
    sum += c.weights[i];
    if (sum > target) break;
  }
  return last;
}

// The first id of the piece at which the sum from its begin on exceeds `target`; the last that has a weight where
// rounding keeps the sum below it.
template <class T>
int32_t draw_within(const T *x, int64_t begin, int64_t n, Softmax softmax, double target) {
  double sum = 0.0;
  int64_t last = begin;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int m = static_cast<int>(std::min<int64_t>(kLanes, n - i));
    const vf weights = softmax.weights(load_logits(x + begin + i, m));
    const double of_vector = vsum(weights);
    if (of_vector == 0.0) continue;
    float lanes[kLanes];
    vstore(lanes, weights);
    double within = sum;
    for (int lane = 0; lane < m; ++lane) {
      if (lanes[lane] == 0.0f) continue;
      last = begin + i + lane;
      within += lanes[lane];
      if (within > target) return static_cast<int32_t>(last);
    }
    sum = within;
  }
  return static_cast<int32_t>(last);
}

int32_t draw_row(const Operands &o, const Row &row) {
  if (row.truncated) return draw_truncated(o, row);
  const double target = uniform(row.draw) * total_weight(o, row);
  double before = 0.0, sum = 0.0;
  int64_t chosen = 0;
  for (int64_t piece = 0; piece < o.pieces; ++piece) {
    if (row.sums[piece].weight == 0.0) continue;
    chosen = piece;
    before = sum;
    sum += row.sums[piece].weight;
    if (sum > target) break;
  }
  return o.with_row(row, [&](auto *x) {
    return draw_within(x, o.begin(chosen), o.size(chosen), row.softmax, target - before);
  });
}

// ---- the call

// What is known of a row once its largest logit is: its id, or how it is drawn. Returns whether it is to be drawn.
bool settle(const Operands &o, Row &row) {
  o.sampled[row.index] = -1;
  if (row.place < 0) return false;
  Best best = row.best[0];
  for (int64_t piece = 1; piece < o.pieces; ++piece) {
    if (row.best[piece].value > best.value) best = row.best[piece];
  }
  if (best.value == -INFINITY) return false;
  o.sampled[row.index] = best.index;
  row.softmax.most = std::min(best.value, FLT_MAX);
  row.softmax.factor = std::clamp(1.0f / row.sampling.temperature, FLT_MIN, FLT_MAX);
  return !row.is_greedy();
}

int32_t run(const sg_call *call) {
  const Operands o(call);
  Row rows[kBatchRows], *drawn[kBatchRows];
  const int64_t batch = batch_of(o.rows, o.width), bytes = bytes_of_row(o.width);
  for (int64_t first = 0; first < o.rows; first += batch) {
    const int64_t count = std::min(batch, o.rows - first);
    for (int64_t i = 0; i < count; ++i) {
      rows[i] = open_row(o, first + i, static_cast<char *>(call->workspace) + i * bytes);
    }
    parallel_for(call, count * o.pieces, [&](int64_t task, int) {
      if (rows[task / o.pieces].place >= 0) prepare(o, rows[task / o.pieces], task % o.pieces);
    });
    int64_t num_drawn = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (settle(o, rows[i])) drawn[num_drawn++] = &rows[i];
    }
    if (num_drawn > 0) {
      parallel_for(call, num_drawn * o.pieces, [&](int64_t task, int) {
        weigh(o, *drawn[task / o.pieces], task % o.pieces);
      });
      parallel_for(call, num_drawn, [&](int64_t task, int) {
        o.sampled[drawn[task]->index] = draw_row(o, *drawn[task]);
      });
    }
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = o.sampled[rows[i].index];
      if (rows[i].place >= 0) o.last_ids[rows[i].place] = id;
      if (id >= 0 && rows[i].draw.flags & kPenalised) ++o.counts[rows[i].place * o.width + id];
    }
  }
  return SG_OK;
}

bool is_matrix(const sg_tensor *t, int32_t dtype, int64_t rows, int64_t columns) {
  return t->dtype == dtype && t->rank == 2 && t->shape[0] == rows && t->shape[1] == columns;
}

int32_t supports(const sg_call *call) {
  const sg_tensor *logits = input(call, 0), *sampling = input(call, 1), *draw = input(call, 2), *at = input(call, 3);
  const sg_tensor *mask = input(call, 4), *bias = input(call, 5), *counts = output(call, 2);
  const sg_tensor *sampled = output(call, 0), *last_ids = output(call, 1);
  if (!logits || !sampling || !draw || !at || !sampled || !last_ids || !all_dense(call)) return 0;
  if (logits->rank != 2 || !is_activation(logits) || logits->shape[1] < 1 || logits->shape[1] > INT32_MAX) return 0;
  const int64_t rows = logits->shape[0], width = logits->shape[1];
  if (!is_matrix(sampling, SG_F32, rows, 8) || !is_matrix(draw, SG_I32, rows, 8)) return 0;
  if (at->dtype != SG_I32 || at->rank != 1 || at->shape[0] != rows || !same_shape(at, sampled)) return 0;
  if (sampled->dtype != SG_I32 || last_ids->dtype != SG_I32 || last_ids->rank != 1) return 0;
  const int64_t places = last_ids->shape[0];
  if (mask && !is_matrix(mask, SG_I32, rows, (width + 31) / 32)) return 0;
  if (bias && !is_matrix(bias, SG_F32, places, width)) return 0;
  if (counts && !is_matrix(counts, SG_I32, places, width)) return 0;
  return isa_score(SG_ISA_NAME);
}

size_t workspace(const sg_call *call) {
  const sg_tensor *logits = call->inputs[0];
  return static_cast<size_t>(batch_of(logits->shape[0], logits->shape[1]) * bytes_of_row(logits->shape[1]));
}

constexpr sg_kernel kernel = describe_row_kernel("sample", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
