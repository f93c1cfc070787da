// attention: o[T, Hq, Dv], lse[T, Hq] from q, k, v and the documents' starts, by blocks with an online softmax
// (Milakov and Gimelshein, 2018; Dao et al., 2022). A task is one query block of one document and one key-value head.
#pragma once

#include "attention_common.h"
#include "attention_softmax.h"

namespace sg::cpu::SG_ISA {

struct QueryBlock {
  int32_t doc_begin, doc_end, begin, end;  // tokens of the batch
};

template <class A>
struct ForwardScratch {
  using Elem = typename A::Elem;
  Columns columns;
  Elem *q, *k, *v, *weights;  // B [columns/W][D][W], A [keys][D], A [Dv][keys], B [keys][W]
  float *logits, *o;          // [keys][W], [columns/W][Dv][W]
  float *peak, *total;        // [columns]
  ForwardScratch(Bump &bump, const AttentionDims &dims)
      : columns(bump, dims),
        q(bump.take<Elem>(static_cast<int64_t>(dims.padded_columns) * dims.padded_head_dim)),
        k(bump.take<Elem>(kKeyBlock * dims.padded_head_dim)),
        v(bump.take<Elem>(kKeyBlock * dims.padded_value_dim)),
        weights(bump.take<Elem>(kKeyBlock * kWidth)),
        logits(bump.take<float>(kKeyBlock * kWidth)),
        o(bump.take<float>(static_cast<int64_t>(dims.padded_columns) * dims.padded_value_dim)),
        peak(bump.take<float>(dims.padded_columns)),
        total(bump.take<float>(dims.padded_columns)) {}
};

inline AttentionDims forward_dims(const sg_call *call) {
  return AttentionDims(call, input(call, 0), input(call, 1), input(call, 2));
}

inline int64_t max_query_blocks(const AttentionDims &dims, const sg_tensor *doc_starts) {
  return dims.tokens / dims.query_block + std::min<int64_t>(doc_starts->shape[0], dims.tokens) + 1;
}

template <class A>
size_t forward_scratch_size(const AttentionDims &dims) {
  Bump bump(nullptr);
  ForwardScratch<A> scratch(bump, dims);
  return bump.used();
}

template <class A>
size_t forward_workspace(const sg_call *call) {
  const AttentionDims dims = forward_dims(call);
  const size_t blocks = static_cast<size_t>(round_up(max_query_blocks(dims, input(call, 3)) * sizeof(QueryBlock), 64));
  return blocks + static_cast<size_t>(num_workers(call)) * forward_scratch_size<A>(dims);
}

template <class A, class T>
class Forward {
 public:
  using Elem = typename A::Elem;
  explicit Forward(const sg_call *call)
      : call_(call),
        dims_(forward_dims(call)),
        q_(input(call, 0)),
        k_(input(call, 1)),
        v_(input(call, 2)),
        o_(output(call, 0)),
        lse_(data<float>(output(call, 1))) {}

  int32_t run() {
    const sg_tensor *doc_starts = input(call_, 3);
    if (int32_t status = check_documents(call_, doc_starts, dims_.tokens); status != SG_OK) return status;
    QueryBlock *blocks = static_cast<QueryBlock *>(call_->workspace);
    const int64_t max_blocks = max_query_blocks(dims_, doc_starts);
    char *scratch = static_cast<char *>(call_->workspace) + round_up(max_blocks * sizeof(QueryBlock), 64);
    const size_t scratch_size = forward_scratch_size<A>(dims_);

    int64_t num_blocks = 0;
    const int32_t *starts = data<const int32_t>(doc_starts);
    for (int64_t i = 0; i + 1 < doc_starts->shape[0]; ++i) {
      for (int32_t begin = starts[i]; begin < starts[i + 1]; begin += dims_.query_block) {
        blocks[num_blocks++] = {starts[i], starts[i + 1], begin, std::min(begin + dims_.query_block, starts[i + 1])};
      }
    }
    // Late blocks of a causal document are the longest: they go first, so that no worker is left with one at the end.
    parallel_for(call_, num_blocks * dims_.kv_heads, [&](int64_t task, int worker) {
      Bump bump(scratch + static_cast<size_t>(worker) * scratch_size);
      ForwardScratch<A> s(bump, dims_);
      A::begin_task();
      run_block(s, blocks[num_blocks - 1 - task / dims_.kv_heads], static_cast<int>(task % dims_.kv_heads));
      A::end_task();
    });
    return SG_OK;
  }

 private:
  void run_block(ForwardScratch<A> &s, const QueryBlock &block, int kv_head) {
    const int length = block.doc_end - block.doc_begin;
    const int begin = block.begin - block.doc_begin, end = block.end - block.doc_begin;
    s.columns.set(dims_, begin, end, length);
    const Columns &columns = s.columns;
    const T *rows[kMaxGroup];
    const T *query_rows[kMaxGroup];
    q_.columns(query_rows, block.begin, columns.count, kv_head * dims_.group, dims_.group);
    pack_b_transposed(s.q, query_rows, columns.count, columns.padded, dims_.head_dim, dims_.padded_head_dim);
    std::fill(s.o, s.o + static_cast<int64_t>(columns.padded) * dims_.padded_value_dim, 0.0f);
    std::fill(s.peak, s.peak + columns.padded, kLowestPeak);
    std::fill(s.total, s.total + columns.padded, 0.0f);

    const int end_key = dims_.end_key(end, length);
    for (int key = dims_.first_key(begin); key < end_key; key += kKeyBlock) {
      const int keys = std::min(kKeyBlock, end_key - key), padded = static_cast<int>(round_up(keys, kPad));
      k_.columns(rows, block.doc_begin + key, keys, kv_head, 1);
      pack_a(s.k, rows, keys, padded, dims_.head_dim, dims_.padded_head_dim);
      v_.columns(rows, block.doc_begin + key, keys, kv_head, 1);
      pack_a_transposed(s.v, kKeyBlock, rows, keys, padded, dims_.value_dim, dims_.padded_value_dim);
      for (int strip = 0; strip < columns.padded; strip += kWidth) run_strip(s, strip, key, padded);
    }
    finish(s, block, kv_head);
  }

  void run_strip(ForwardScratch<A> &s, int strip, int key, int padded_keys) {
    const StripRange range(s.columns, strip, key, padded_keys);
    if (range.empty()) return;
    A::product(s.logits, kWidth, s.k + range.begin * dims_.padded_head_dim, dims_.padded_head_dim,
               s.q + strip * dims_.padded_head_dim, range.size(), dims_.padded_head_dim, false);
    if (dims_.softcap > 0.0f) tanh_rows(s.logits, range.size(), dims_.tanh_factor());
    float *o = s.o + strip * dims_.padded_value_dim;
    softmax_strip(s.logits, s.weights, range.size(), dims_.logit_factor(), range.masked,
                  static_cast<float>(key + range.begin), s.columns.low + strip, s.columns.high + strip, s.peak + strip,
                  s.total + strip, o, dims_.padded_value_dim);
    A::product(o, kWidth, s.v + range.begin, kKeyBlock, s.weights, dims_.padded_value_dim, range.size(), true);
  }

  void finish(ForwardScratch<A> &s, const QueryBlock &block, int kv_head) {
    const int count = s.columns.count;
    float inverse[kWidth];
    T *rows[kWidth];
    for (int strip = 0; strip < count; strip += kWidth) {
      const int width = std::min(kWidth, count - strip);
      for (int c = 0; c < kWidth; ++c) inverse[c] = 1.0f / s.total[strip + c];
      for (int c = 0; c < width; ++c) {
        const int column = strip + c, head = kv_head * dims_.group + column % dims_.group;
        const int64_t token = block.begin + column / dims_.group;
        rows[c] = o_.row(token, head);
        lse_[token * dims_.heads + head] = s.peak[column] * kLn2 + std::log(s.total[column]);
      }
      store_transposed(rows, width, s.o + strip * dims_.padded_value_dim, inverse, dims_.value_dim);
    }
  }

  const sg_call *call_;
  AttentionDims dims_;
  TokenRows<const T> q_, k_, v_;
  TokenRows<T> o_;
  float *lse_;
};

inline bool forward_supported(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *doc_starts = input(call, 3);
  const sg_tensor *o = output(call, 0), *lse = output(call, 1);
  if (!attention_supported(call, q, k, v) || doc_starts == nullptr || o == nullptr || lse == nullptr) return false;
  return k->shape[0] == q->shape[0] && is_document_list(doc_starts) && o->dtype == q->dtype && has_dense_heads(o) &&
         o->shape[0] == q->shape[0] && o->shape[1] == q->shape[1] && o->shape[2] == v->shape[2] && is_lse(lse, q);
}

}  // namespace sg::cpu::SG_ISA
