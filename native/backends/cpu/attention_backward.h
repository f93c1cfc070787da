// attention_grad: dq, dk, dv from do, o, lse and q, k, v. The weights are recomputed from lse, block by block.
//
// A task is one chunk of the queries of one document and one key-value head. It owns its part of dq, and sums dk and dv
// over its queries in fp32. A document of one chunk is done then; longer ones keep one partial sum a chunk in the
// workspace, added in the order of the chunks by a second sweep. Chunks are cut by the number of tokens of the call, so
// the partial sums stay below about 4.5 times dk and dv in fp32 (causal), and results do not depend on the workers.
#pragma once

#include "attention_common.h"

namespace sg::cpu::SG_ISA {

struct QueryChunk {
  int32_t doc_begin, doc_end, begin, end;  // tokens of the batch
  int32_t first_key, num_keys;             // of the document, the keys that the chunk's queries see
  int64_t partial_row;                     // where its partial sums begin, or -1 if the document has one chunk
};

struct BackwardPlan {
  AttentionDims dims;
  int64_t chunk;  // tokens
  int64_t max_chunks;
  int64_t partial_rows;  // for each key-value head
  int64_t row_floats;    // of a partial sum: dk's row, then dv's
  int64_t single_rows;   // of the sums of a one-chunk document, in a worker's scratch

  explicit BackwardPlan(const sg_call *call) : dims(call, input(call, 1), input(call, 2), input(call, 3)) {
    const int64_t tokens = dims.tokens, documents = input(call, 6)->shape[0];
    chunk = std::max<int64_t>(128, round_up((tokens + 7) / 8, 64));
    const int64_t full = (tokens + chunk - 1) / chunk;
    max_chunks = full + std::min(documents, tokens) + 1;
    row_floats = dims.padded_head_dim + dims.padded_value_dim;
    single_rows = round_up(std::min(chunk, tokens), kPad);
    // Most rows are needed when all tokens are one document; several shorter ones add their padding.
    partial_rows = full <= 1 ? 0 : 2 * full * kPad + (dims.causal ? full * (full + 1) / 2 * chunk : full * tokens);
  }
};

template <class A>
struct BackwardScratch {
  using Elem = typename A::Elem;
  Columns columns;
  Elem *q, *q_rows, *dout, *dout_rows;  // B [columns/W][D][W], B [D/W][columns][W], and the same with Dv
  Elem *k, *k_transposed, *v;           // A [keys][D], A [D][keys], A [keys][Dv]
  Elem *weights, *dlogits;              // A [keys][columns]
  Elem *dlogits_strip;                  // B [keys][W]
  float *logits, *dweights;             // [keys][W]
  float *dq;                            // [columns/W][D][W]
  float *minus_lse, *delta;             // [columns]: -lse in base 2; sum of do * o
  float *sums;                          // [single_rows][D + Dv]
  int summed_keys = 0;                  // rows of the chunk's sums that hold something; the rest is still undefined

  BackwardScratch(Bump &bump, const BackwardPlan &plan) : columns(bump, plan.dims) {
    const int64_t columns_max = plan.dims.padded_columns;
    const int64_t head_dim = plan.dims.padded_head_dim, value_dim = plan.dims.padded_value_dim;
    q = bump.take<Elem>(columns_max * head_dim);
    q_rows = bump.take<Elem>(columns_max * head_dim);
    dout = bump.take<Elem>(columns_max * value_dim);
    dout_rows = bump.take<Elem>(columns_max * value_dim);
    k = bump.take<Elem>(kKeyBlock * head_dim);
    k_transposed = bump.take<Elem>(kKeyBlock * head_dim);
    v = bump.take<Elem>(kKeyBlock * value_dim);
    weights = bump.take<Elem>(kKeyBlock * columns_max);
    dlogits = bump.take<Elem>(kKeyBlock * columns_max);
    dlogits_strip = bump.take<Elem>(kKeyBlock * kWidth);
    logits = bump.take<float>(kKeyBlock * kWidth);
    dweights = bump.take<float>(kKeyBlock * kWidth);
    dq = bump.take<float>(columns_max * head_dim);
    minus_lse = bump.take<float>(columns_max);
    delta = bump.take<float>(columns_max);
    sums = bump.take<float>(plan.single_rows * plan.row_floats);
  }
};

template <class A>
size_t backward_scratch_size(const BackwardPlan &plan) {
  Bump bump(nullptr);
  BackwardScratch<A> scratch(bump, plan);
  return bump.used();
}

// The parts of the workspace that all workers share.
struct BackwardShared {
  QueryChunk *chunks;
  float *partial;  // [partial_rows][kv_heads][row_floats]
  BackwardShared(Bump &bump, const BackwardPlan &plan)
      : chunks(bump.take<QueryChunk>(plan.max_chunks)),
        partial(bump.take<float>(plan.partial_rows * plan.dims.kv_heads * plan.row_floats)) {}
};

template <class A>
size_t backward_workspace(const sg_call *call) {
  const BackwardPlan plan(call);
  Bump bump(nullptr);
  BackwardShared shared(bump, plan);
  return bump.used() + static_cast<size_t>(num_workers(call)) * backward_scratch_size<A>(plan);
}

// The gradient of the weights turned into that of the logits (before `scale`), on rows of one half strip. Both are
// written as A operands (depth: columns) and the latter also as a B panel (depth: keys).
template <class Elem>
void softmax_grad_strip(const float *logits, const float *dweights, int rows, float factor, bool capped, bool masked,
                        float first_key, const float *low, const float *high, const float *minus_lse,
                        const float *delta, Elem *weights_a, Elem *dlogits_a, int ld, Elem *dlogits_b) {
  const vf f = vset(factor), one = vset(1.0f), most = vset(127.0f);
  for (int r = 0; r < rows; r += 2) {
    vf w[2][2], g[2][2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const int at = (r + i) * kWidth + half * kLanes, column = half * kLanes;
        const vf x = vload(logits + at);
        vf weight = vexp2(vmin(most, vfma(x, f, vload(minus_lse + column))));
        if (masked) {
          weight = vwithin(weight, vset(first_key + static_cast<float>(r + i)), vload(low + column),
                           vload(high + column), vzero());
        }
        vf grad = vmul(weight, vsub(vload(dweights + at), vload(delta + column)));
        if (capped) grad = vmul(grad, vfnma(x, x, one));
        w[i][half] = weight;
        g[i][half] = grad;
      }
      store_a(weights_a + static_cast<int64_t>(r + i) * ld, w[i][0], w[i][1]);
      store_a(dlogits_a + static_cast<int64_t>(r + i) * ld, g[i][0], g[i][1]);
    }
    store_b_pair(dlogits_b, r, 0, g[0][0], g[1][0]);
    store_b_pair(dlogits_b, r, 1, g[0][1], g[1][1]);
  }
}

template <class T>
inline float dot_rows(const T *a, const T *b, int n) {
  vf sum = vzero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = vfma(vload(a + i), vload(b + i), sum);
  if (i < n) sum = vfma(vload_n(a + i, n - i), vload_n(b + i, n - i), sum);
  return vsum(sum);
}

template <class A, class T>
class Backward {
 public:
  using Elem = typename A::Elem;
  explicit Backward(const sg_call *call)
      : call_(call),
        plan_(call),
        dims_(plan_.dims),
        do_(input(call, 0)),
        q_(input(call, 1)),
        k_(input(call, 2)),
        v_(input(call, 3)),
        o_(input(call, 4)),
        lse_(data<const float>(input(call, 5))),
        dq_(output(call, 0)),
        dk_(output(call, 1)),
        dv_(output(call, 2)) {}

  int32_t run() {
    const sg_tensor *doc_starts = input(call_, 6);
    if (int32_t status = check_documents(call_, doc_starts, dims_.tokens); status != SG_OK) return status;
    Bump bump(call_->workspace);
    const BackwardShared shared(bump, plan_);
    char *scratch = static_cast<char *>(call_->workspace) + bump.used();
    const size_t scratch_size = backward_scratch_size<A>(plan_);
    int64_t partial_rows = 0;
    const int64_t num_chunks = list_chunks(shared.chunks, doc_starts, &partial_rows);
    if (partial_rows > plan_.partial_rows) return fail(call_, "attention_grad: internal error: workspace too small");

    parallel_for(call_, num_chunks * dims_.kv_heads, [&](int64_t task, int worker) {
      Bump worker_bump(scratch + static_cast<size_t>(worker) * scratch_size);
      BackwardScratch<A> s(worker_bump, plan_);
      A::begin_task();
      run_chunk(s, shared.chunks[num_chunks - 1 - task / dims_.kv_heads], static_cast<int>(task % dims_.kv_heads),
                shared.partial);
      A::end_task();
    });
    if (partial_rows > 0) {
      parallel_for(call_, num_chunks, [&](int64_t task, int) { add_partials(shared, num_chunks, task); });
    }
    return SG_OK;
  }

 private:
  int64_t list_chunks(QueryChunk *chunks, const sg_tensor *doc_starts, int64_t *partial_rows) const {
    const int32_t *starts = data<const int32_t>(doc_starts);
    const int32_t chunk = static_cast<int32_t>(plan_.chunk);
    int64_t count = 0;
    for (int64_t i = 0; i + 1 < doc_starts->shape[0]; ++i) {
      const int32_t doc_begin = starts[i], doc_end = starts[i + 1], length = doc_end - doc_begin;
      for (int32_t begin = 0; begin < length; begin += chunk) {
        const int32_t end = std::min(begin + chunk, length), first_key = dims_.first_key(begin);
        const int32_t num_keys = dims_.end_key(end, length) - first_key;
        chunks[count++] = {doc_begin,
                           doc_end,
                           doc_begin + begin,
                           doc_begin + end,
                           first_key,
                           num_keys,
                           length > chunk ? *partial_rows : -1};
        if (length > chunk) *partial_rows += round_up(num_keys, kPad);
      }
    }
    return count;
  }

  void run_chunk(BackwardScratch<A> &s, const QueryChunk &chunk, int kv_head, float *partial) {
    const bool single = chunk.partial_row < 0;
    const int64_t ld = single ? plan_.row_floats : plan_.row_floats * dims_.kv_heads;
    float *sums = single ? s.sums : partial + chunk.partial_row * ld + kv_head * plan_.row_floats;
    s.summed_keys = 0;
    for (int32_t begin = chunk.begin; begin < chunk.end; begin += dims_.query_block) {
      run_block(s, chunk, begin, std::min(begin + dims_.query_block, chunk.end), kv_head, sums, static_cast<int>(ld));
    }
    if (single) {
      const int64_t token0 = chunk.doc_begin + chunk.first_key;
      for (int64_t r = 0; r < chunk.num_keys; ++r) store_sums(sums + r * ld, token0 + r, kv_head);
    }
  }

  // One row of dk and dv from its sums.
  void store_sums(const float *sums, int64_t token, int kv_head) {
    store_row(dk_.row(token, kv_head), sums, dims_.head_dim, dims_.scale);
    store_row(dv_.row(token, kv_head), sums + dims_.padded_head_dim, dims_.value_dim, 1.0f);
  }
  static void store_row(T *out, const float *x, int n, float factor) {
    const vf f = vset(factor);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store_rounded(out + i, vmul(vload(x + i), f));
    if (i < n) vstore_n(out + i, vmul(vload(x + i), f), n - i);
  }

  void run_block(BackwardScratch<A> &s, const QueryChunk &chunk, int32_t begin, int32_t end, int kv_head, float *sums,
                 int ld) {
    const int length = chunk.doc_end - chunk.doc_begin;
    const int local_begin = begin - chunk.doc_begin, local_end = end - chunk.doc_begin;
    s.columns.set(dims_, local_begin, local_end, length);
    load_columns(s, begin, kv_head);
    const T *rows[kKeyBlock];
    const int end_key = dims_.end_key(local_end, length);
    for (int key = dims_.first_key(local_begin); key < end_key; key += kKeyBlock) {
      const int keys = std::min(kKeyBlock, end_key - key), padded = static_cast<int>(round_up(keys, kPad));
      k_.columns(rows, chunk.doc_begin + key, keys, kv_head, 1);
      pack_a(s.k, rows, keys, padded, dims_.head_dim, dims_.padded_head_dim);
      pack_a_transposed(s.k_transposed, kKeyBlock, rows, keys, padded, dims_.head_dim, dims_.padded_head_dim);
      v_.columns(rows, chunk.doc_begin + key, keys, kv_head, 1);
      pack_a(s.v, rows, keys, padded, dims_.value_dim, dims_.padded_value_dim);
      for (int strip = 0; strip < s.columns.padded; strip += kWidth) run_strip(s, strip, key, padded);
      add_key_sums(s, key - chunk.first_key, padded, sums, static_cast<int>(ld));
    }
    store_dq(s, begin, kv_head);
  }

  // Packs q and do of the block's columns, and their lse and delta.
  void load_columns(BackwardScratch<A> &s, int32_t begin, int kv_head) {
    const Columns &columns = s.columns;
    const T *rows[kMaxGroup];
    const int first_head = kv_head * dims_.group;
    q_.columns(rows, begin, columns.count, first_head, dims_.group);
    pack_b_transposed(s.q, rows, columns.count, columns.padded, dims_.head_dim, dims_.padded_head_dim);
    pack_b(s.q_rows, rows, columns.count, columns.padded, dims_.head_dim, dims_.padded_head_dim);
    do_.columns(rows, begin, columns.count, first_head, dims_.group);
    pack_b_transposed(s.dout, rows, columns.count, columns.padded, dims_.value_dim, dims_.padded_value_dim);
    pack_b(s.dout_rows, rows, columns.count, columns.padded, dims_.value_dim, dims_.padded_value_dim);
    for (int c = 0; c < columns.padded; ++c) {
      s.minus_lse[c] = -1e30f;  // a column of padding has no weights
      s.delta[c] = 0.0f;
      if (c >= columns.count) continue;
      const int64_t token = begin + c / dims_.group;
      const int head = first_head + c % dims_.group;
      s.minus_lse[c] = lse_[token * dims_.heads + head] * -kLog2e;
      s.delta[c] = dot_rows(do_.row(token, head), o_.row(token, head), dims_.value_dim);
    }
    std::fill(s.dq, s.dq + static_cast<int64_t>(columns.padded) * dims_.padded_head_dim, 0.0f);
  }

  void run_strip(BackwardScratch<A> &s, int strip, int key, int padded_keys) {
    const int ld = s.columns.padded;
    const StripRange range(s.columns, strip, key, padded_keys);
    const int first = range.empty() ? padded_keys : range.begin, last = range.empty() ? padded_keys : range.end;
    for (int r = 0; r < padded_keys; ++r) {
      if (r >= first && r < last) continue;
      zero_a(s.weights + r * ld + strip);
      zero_a(s.dlogits + r * ld + strip);
    }
    if (range.empty()) return;
    A::product(s.logits, kWidth, s.k + first * dims_.padded_head_dim, dims_.padded_head_dim,
               s.q + strip * dims_.padded_head_dim, range.size(), dims_.padded_head_dim, false);
    A::product(s.dweights, kWidth, s.v + first * dims_.padded_value_dim, dims_.padded_value_dim,
               s.dout + strip * dims_.padded_value_dim, range.size(), dims_.padded_value_dim, false);
    if (dims_.softcap > 0.0f) tanh_rows(s.logits, range.size(), dims_.tanh_factor());
    softmax_grad_strip(s.logits, s.dweights, range.size(), dims_.logit_factor(), dims_.softcap > 0.0f, range.masked,
                       static_cast<float>(key + first), s.columns.low + strip, s.columns.high + strip,
                       s.minus_lse + strip, s.delta + strip, s.weights + first * ld + strip,
                       s.dlogits + first * ld + strip, ld, s.dlogits_strip);
    A::product(s.dq + strip * dims_.padded_head_dim, kWidth, s.k_transposed + first, kKeyBlock, s.dlogits_strip,
               dims_.padded_head_dim, range.size(), true);
  }

  // dk += dlogits * q, dv += weights * do for the keys of a block. Rows that no earlier query saw are set.
  void add_key_sums(BackwardScratch<A> &s, int first_row, int rows, float *sums, int ld) {
    const int known = std::clamp(s.summed_keys - first_row, 0, rows);
    float *at = sums + static_cast<int64_t>(first_row) * ld;
    if (known > 0) add_rows(s, 0, known, at, ld, true);
    if (known < rows) add_rows(s, known, rows - known, at + static_cast<int64_t>(known) * ld, ld, false);
    s.summed_keys = std::max(s.summed_keys, first_row + rows);
  }
  void add_rows(BackwardScratch<A> &s, int row, int rows, float *sums, int ld, bool accumulate) {
    const int depth = s.columns.padded;
    for (int d = 0; d < dims_.padded_head_dim; d += kWidth) {
      A::product(sums + d, ld, s.dlogits + row * depth, depth, s.q_rows + d * depth, rows, depth, accumulate);
    }
    for (int d = 0; d < dims_.padded_value_dim; d += kWidth) {
      A::product(sums + dims_.padded_head_dim + d, ld, s.weights + row * depth, depth, s.dout_rows + d * depth, rows,
                 depth, accumulate);
    }
  }

  void store_dq(BackwardScratch<A> &s, int32_t begin, int kv_head) {
    float factor[kWidth];
    std::fill(factor, factor + kWidth, dims_.scale);
    T *rows[kWidth];
    for (int strip = 0; strip < s.columns.count; strip += kWidth) {
      const int width = std::min(kWidth, s.columns.count - strip);
      for (int c = 0; c < width; ++c) {
        const int column = strip + c;
        rows[c] = dq_.row(begin + column / dims_.group, kv_head * dims_.group + column % dims_.group);
      }
      store_transposed(rows, width, s.dq + strip * dims_.padded_head_dim, factor, dims_.head_dim);
    }
  }

  // dk and dv of the tokens of chunk `index`, if its document has several: the sum over the chunks that see them, in
  // order.
  void add_partials(const BackwardShared &shared, int64_t num_chunks, int64_t index) {
    const QueryChunk &own = shared.chunks[index];
    if (own.partial_row < 0) return;
    int64_t first = index, last = index + 1;
    while (first > 0 && shared.chunks[first - 1].doc_begin == own.doc_begin) --first;
    while (last < num_chunks && shared.chunks[last].doc_begin == own.doc_begin) ++last;
    const int64_t ld = plan_.row_floats * dims_.kv_heads;
    for (int32_t token = own.begin; token < own.end; ++token) {
      const int32_t key = token - own.doc_begin;
      float *sums = nullptr;
      for (int64_t i = first; i < last; ++i) {
        const QueryChunk &chunk = shared.chunks[i];
        if (key < chunk.first_key || key >= chunk.first_key + chunk.num_keys) continue;
        float *part = shared.partial + (chunk.partial_row + key - chunk.first_key) * ld;
        if (sums == nullptr) {
          sums = part;
        } else {
          for (int64_t j = 0; j < ld; j += kLanes) vstore(sums + j, vadd(vload(sums + j), vload(part + j)));
        }
      }
      for (int head = 0; head < dims_.kv_heads; ++head) store_sums(sums + head * plan_.row_floats, token, head);
    }
  }

  const sg_call *call_;
  BackwardPlan plan_;
  const AttentionDims &dims_;
  TokenRows<const T> do_, q_, k_, v_, o_;
  const float *lse_;
  TokenRows<T> dq_, dk_, dv_;
};

inline bool backward_supported(const sg_call *call) {
  for (int i = 0; i < 7; ++i) {
    if (input(call, i) == nullptr) return false;
  }
  for (int i = 0; i < 3; ++i) {
    const sg_tensor *out = output(call, i), *of = input(call, i + 1);
    if (out == nullptr || out->dtype != of->dtype || !same_shape(out, of) || !has_dense_heads(out)) return false;
  }
  const sg_tensor *dout = input(call, 0), *q = input(call, 1), *k = input(call, 2), *v = input(call, 3);
  const sg_tensor *o = input(call, 4), *lse = input(call, 5);
  if (!attention_supported(call, q, k, v) || k->shape[0] != q->shape[0]) return false;
  return dout->dtype == q->dtype && o->dtype == q->dtype && same_shape(dout, o) && has_dense_heads(dout) &&
         has_dense_heads(o) && o->shape[0] == q->shape[0] && o->shape[1] == q->shape[1] && o->shape[2] == v->shape[2] &&
         is_lse(lse, q) && is_document_list(input(call, 6));
}

}  // namespace sg::cpu::SG_ISA
