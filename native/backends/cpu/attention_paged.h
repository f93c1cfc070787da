// paged_attention: o[T, Hq, Dv] of tokens that attend to the cached keys and values of their sequence.
//
// Tokens that follow one another in a sequence form blocks, handled like the query blocks of attention_forward.h; a
// block of few columns (a decoded token) takes the path of attention_few.h. Keys are cut into chunks by absolute
// position; each chunk's result is merged into the sum of those before it. Chunks of a small block, or of a call's only
// one, are tasks of their own, so that several cores work on one long sequence. A second output, where there is one, is
// lse as `attention` has it.
//
// Large blocks multiply in arithmetic A, of attention_gemm.h, few columns always in fp32. Where A is fp32 too, none of
// these choices changes a bit of any token's result: it depends on the token, its position and the cache alone.
#pragma once

#include "attention_few.h"

namespace sg::cpu::SG_ISA {

constexpr int kKeyChunk = 2 * kKeyBlock;
constexpr int64_t kLoneBytes = 8 << 20;  // the most that results of a call's only block may take

struct PagedBlock {
  int32_t token, count;        // of the call
  int32_t sequence, position;  // of the first token
  int32_t first_chunk, num_chunks;
  int32_t slot;  // of partial results, or -1: one task runs all chunks
};
struct PagedTask {
  int32_t block, chunk;  // chunk: counted from the block's first; -1: all
};

struct PagedPlan {
  AttentionDims dims;
  int64_t block_size, max_blocks, sequences, cache_rows;
  int64_t max_chunks, slots;
  int64_t lone_chunks;  // of a call's only block: split if it has no more than these

  explicit PagedPlan(const sg_call *call) : dims(call, input(call, 0), input(call, 1), input(call, 2)) {
    dims.causal = 1;
    block_size = attr_int(call, "block_size", 0);
    cache_rows = input(call, 1)->shape[0];
    sequences = input(call, 5)->shape[0];
    max_blocks = input(call, 5)->shape[1];
    max_chunks = (max_blocks * block_size + kKeyChunk - 1) / kKeyChunk;
    slots = std::min<int64_t>(std::min<int64_t>(dims.tokens, 64),
                              std::max<int64_t>(1, 4096 / std::max<int64_t>(1, max_chunks)));
    lone_chunks = std::min(max_chunks, kLoneBytes / (4 * dims.kv_heads * result_floats(dims.padded_columns)));
  }
  bool is_few(const PagedBlock &block) const { return block.count * dims.group <= kFewColumns; }
  // Of one (chunk, head) result: o, peaks, totals.
  int64_t result_floats(int64_t columns) const { return columns * (dims.padded_value_dim + 2); }
  int64_t partial_floats() const {
    return dims.kv_heads * std::max(slots * max_chunks * result_floats(kFewColumns),
                                    lone_chunks * result_floats(dims.padded_columns));
  }

  struct Partial {
    float *o, *peak, *total;
  };
  Partial partial(float *partials, const PagedBlock &block, int chunk, int kv_head) const {
    const int64_t columns = is_few(block) ? kFewColumns : dims.padded_columns;
    float *o = partials + ((block.slot * max_chunks + chunk) * dims.kv_heads + kv_head) * result_floats(columns);
    float *peak = o + columns * dims.padded_value_dim;
    return {o, peak, peak + columns};
  }
};

struct PagedShared {
  PagedBlock *blocks;
  PagedTask *tasks;
  float *partials;
  PagedShared(Bump &bump, const PagedPlan &plan)
      : blocks(bump.take<PagedBlock>(plan.dims.tokens)),
        tasks(bump.take<PagedTask>(plan.dims.tokens + std::max(plan.slots * plan.max_chunks, plan.lone_chunks))),
        partials(bump.take<float>(plan.partial_floats())) {}
};

template <class A>
struct PagedScratch {
  using Elem = typename A::Elem;
  Columns columns;
  float *few_q;                            // rows of few columns
  Elem *q, *k, *v, *weights;               // of large blocks, as in ForwardScratch
  float *logits;
  float *o, *peak, *total;                 // of all chunks so far
  float *part_o, *part_peak, *part_total;  // of one chunk
  PagedScratch(Bump &bump, const AttentionDims &dims) : columns(bump, dims) {
    few_q = bump.take<float>(kFewColumns * dims.padded_head_dim);
    q = bump.take<Elem>(static_cast<int64_t>(dims.padded_columns) * dims.padded_head_dim);
    k = bump.take<Elem>(kKeyBlock * dims.padded_head_dim);
    v = bump.take<Elem>(kKeyBlock * dims.padded_value_dim);
    weights = bump.take<Elem>(kKeyBlock * kWidth);
    logits = bump.take<float>(kKeyBlock * std::max(kWidth, kFewColumns));
    for (float **x : {&o, &part_o})
      *x = bump.take<float>(static_cast<int64_t>(dims.padded_columns) * dims.padded_value_dim);
    for (float **x : {&peak, &total, &part_peak, &part_total}) *x = bump.take<float>(dims.padded_columns);
  }
};

template <class A>
size_t paged_scratch_size(const AttentionDims &dims) {
  Bump bump(nullptr);
  PagedScratch<A> scratch(bump, dims);
  return bump.used();
}

template <class A>
size_t paged_workspace(const sg_call *call) {
  const PagedPlan plan(call);
  Bump bump(nullptr);
  PagedShared shared(bump, plan);
  return bump.used() + static_cast<size_t>(num_workers(call)) * paged_scratch_size<A>(plan.dims);
}

inline bool is_index(const sg_tensor *t, int rank) {
  return t != nullptr && t->dtype == SG_I32 && t->rank == rank && is_dense(t);
}

inline bool paged_supported(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *o = output(call, 0);
  if (q == nullptr || k == nullptr || v == nullptr || o == nullptr) return false;
  sg_tensor as_cache = *q;  // q may differ from the caches in dtype and rows alone
  as_cache.dtype = k->dtype;
  if (!is_activation(q) || !attention_supported(call, &as_cache, k, v)) return false;
  if (!is_index(input(call, 3), 1) || !is_index(input(call, 4), 1) || !is_index(input(call, 5), 2)) return false;
  if (input(call, 3)->shape[0] != q->shape[0] || input(call, 4)->shape[0] != q->shape[0]) return false;
  if (attr_int(call, "block_size", 0) < 1 || o->dtype != q->dtype || !has_dense_heads(o)) return false;
  return o->shape[0] == q->shape[0] && o->shape[1] == q->shape[1] && o->shape[2] == v->shape[2];
}

// Operands in bf16 of a call that may have a large block: what arithmetic in bf16 is for.
inline bool paged_bf16_supported(const sg_call *call) {
  if (!paged_supported(call) || input(call, 0)->dtype != SG_BF16 || input(call, 1)->dtype != SG_BF16) return false;
  const AttentionDims dims(call, input(call, 0), input(call, 1), input(call, 2));
  return attr_int(call, "lone", 0) == 0 && dims.tokens * dims.group > kFewColumns;
}

// Adds a chunk's result to that of the chunks before it. Both are given for one column; o runs with stride `ld`.
// Merging with the result of no visible key changes nothing.
inline void merge_factors(float *peak, float *total, float part_peak, float part_total, float *keep, float *take) {
  const float new_peak = std::max(*peak, part_peak);
  alignas(64) float lanes[kLanes];
  const vf kept = vexp2(vset(*peak - new_peak)), taken = vexp2(vset(part_peak - new_peak));
  vstore(lanes, kept);
  *keep = lanes[0];
  vstore(lanes, taken);
  *take = lanes[0];
  vstore(lanes, vfma(vset(*total), kept, vmul(vset(part_total), taken)));
  *total = lanes[0];
  *peak = new_peak;
}

// A: the arithmetic of large blocks; T: q and o; C: the caches.
template <class A, class T, class C>
class Paged {
 public:
  using Scratch = PagedScratch<A>;
  explicit Paged(const sg_call *call)
      : call_(call),
        plan_(call),
        dims_(plan_.dims),
        q_(input(call, 0)),
        k_(input(call, 1)),
        v_(input(call, 2)),
        sequences_(data<const int32_t>(input(call, 3))),
        positions_(data<const int32_t>(input(call, 4))),
        tables_(data<const int32_t>(input(call, 5))),
        o_(output(call, 0)),
        lse_(output(call, 1) == nullptr ? nullptr : data<float>(output(call, 1))) {}

  int32_t run() {
    Bump bump(call_->workspace);
    const PagedShared shared(bump, plan_);
    char *scratch = static_cast<char *>(call_->workspace) + bump.used();
    const size_t scratch_size = paged_scratch_size<A>(dims_);
    int64_t num_blocks = 0, num_tasks = 0;
    if (int32_t status = list_blocks(shared.blocks, &num_blocks); status != SG_OK) return status;
    bool split = false;
    for (int64_t i = num_blocks - 1; i >= 0; --i) {  // late blocks see the most keys: they go first
      PagedBlock &block = shared.blocks[i];
      split = split || block.slot >= 0;
      if (block.slot < 0) shared.tasks[num_tasks++] = {static_cast<int32_t>(i), -1};
      for (int32_t chunk = 0; block.slot >= 0 && chunk < block.num_chunks; ++chunk) {
        shared.tasks[num_tasks++] = {static_cast<int32_t>(i), chunk};
      }
    }
    parallel_for(call_, num_tasks * dims_.kv_heads, [&](int64_t task, int worker) {
      Bump worker_bump(scratch + static_cast<size_t>(worker) * scratch_size);
      Scratch s(worker_bump, dims_);
      const int64_t index = task / dims_.kv_heads;
      const int kv_head = static_cast<int>(task % dims_.kv_heads);
      const PagedTask &t = shared.tasks[index];
      CacheAhead ahead = ahead_of(shared, index + 1 < num_tasks ? &shared.tasks[index + 1] : nullptr, kv_head);
      run_task(s, shared, shared.blocks[t.block], t.chunk, kv_head, &ahead);
    });
    if (split) {
      parallel_for(call_, num_blocks * dims_.kv_heads, [&](int64_t task, int) {
        finish_split(shared, shared.blocks[task / dims_.kv_heads], static_cast<int>(task % dims_.kv_heads));
      });
    }
    return SG_OK;
  }

 private:
  // Checks the operands, lists the blocks and clears the rows of padding tokens.
  int32_t list_blocks(PagedBlock *blocks, int64_t *num_blocks) const {
    int32_t slots = 0;
    for (int32_t t = 0; t < dims_.tokens;) {
      const int32_t sequence = sequences_[t], position = positions_[t];
      if (sequence < 0) {
        std::memset(static_cast<void *>(o_.row(t, 0)), 0,
                    static_cast<size_t>(dims_.heads) * dims_.value_dim * sizeof(T));
        ++t;
        continue;
      }
      int32_t count = 1;
      while (count < dims_.query_block && t + count < dims_.tokens && sequences_[t + count] == sequence &&
             positions_[t + count] == position + count) {
        ++count;
      }
      PagedBlock block{t, count, sequence, position, 0, 0, -1};
      if (int32_t status = check_block(block); status != SG_OK) return status;
      block.first_chunk = dims_.first_key(position) / kKeyChunk;
      block.num_chunks = (position + count - 1) / kKeyChunk + 1 - block.first_chunk;
      if (plan_.is_few(block) && block.num_chunks > 1 && slots < plan_.slots) block.slot = slots++;
      blocks[(*num_blocks)++] = block;
      t += count;
    }
    if (*num_blocks == 1 && blocks->num_chunks > 1 && blocks->num_chunks <= plan_.lone_chunks) blocks->slot = 0;
    return SG_OK;
  }

  int32_t check_block(const PagedBlock &block) const {
    const int64_t last = static_cast<int64_t>(block.position) + block.count - 1;
    if (block.sequence >= plan_.sequences || block.position < 0 || last >= plan_.max_blocks * plan_.block_size) {
      return fail(call_,
                  "paged_attention: token %d has sequence %d and position %d, but the block tables hold %lld "
                  "sequences of %lld positions",
                  block.token, block.sequence, block.position, static_cast<long long>(plan_.sequences),
                  static_cast<long long>(plan_.max_blocks * plan_.block_size));
    }
    const int32_t *table = tables_ + block.sequence * plan_.max_blocks;
    for (int64_t i = dims_.first_key(block.position) / plan_.block_size; i <= last / plan_.block_size; ++i) {
      if (table[i] < 0 || (table[i] + int64_t{1}) * plan_.block_size > plan_.cache_rows) {
        return fail(call_,
                    "paged_attention: block table of sequence %d names block %d, but the cache has %lld rows of "
                    "blocks of %lld",
                    block.sequence, table[i], static_cast<long long>(plan_.cache_rows),
                    static_cast<long long>(plan_.block_size));
      }
    }
    return SG_OK;
  }

  // Where a block's keys begin: those of few columns leave out what the window hides, by whole vectors. (Its weights are
  // zeros, which no sum notices.)
  int first_key(const PagedBlock &block) const {
    if (!plan_.is_few(block) || dims_.window == 0) return dims_.first_key(block.position);
    return std::max(0, block.position - dims_.window + 1) / kLanes * kLanes;
  }

  // keys[i], values[i] = the cache rows of position `first + i`.
  void cache_rows(const C **keys, const C **values, int32_t sequence, int64_t first, int count, int kv_head) const {
    const int32_t *table = tables_ + sequence * plan_.max_blocks;
    int64_t block = first / plan_.block_size, offset = first % plan_.block_size;
    for (int i = 0; i < count; ++block, offset = 0) {
      const int64_t row = table[block] * plan_.block_size + offset;
      const C *key = k_.row(row, kv_head), *value = v_.row(row, kv_head);
      for (; i < count && offset < plan_.block_size; ++i, ++offset, key += k_.stride, value += v_.stride) {
        keys[i] = key;
        values[i] = value;
      }
    }
  }

  // What the tasks of one chunk ask for of the next chunk's keys and values: each of them an equal share.
  CacheAhead ahead_of(const PagedShared &shared, const PagedTask *task, int kv_head) const {
    CacheAhead ahead{reinterpret_cast<const char *>(k_.base), reinterpret_cast<const char *>(v_.base),
                     plan_.block_size * k_.stride * static_cast<int64_t>(sizeof(C)),
                     plan_.block_size * v_.stride * static_cast<int64_t>(sizeof(C)), nullptr, nullptr, 0};
    if (task == nullptr || task->chunk < 0) return ahead;
    const PagedBlock &block = shared.blocks[task->block];
    const int64_t begin = static_cast<int64_t>(block.first_chunk + task->chunk) * kKeyChunk;
    const int64_t end = std::min<int64_t>(begin + kKeyChunk, block.position + block.count);
    const int64_t first = std::max<int64_t>(begin, first_key(block)) / plan_.block_size;
    const int64_t count = (end - 1) / plan_.block_size + 1 - first;
    const int32_t *table = tables_ + block.sequence * plan_.max_blocks + first;
    ahead.next = table + count * kv_head / dims_.kv_heads;
    ahead.end = table + count * (kv_head + 1) / dims_.kv_heads;
    const int64_t lines = (ahead.end - ahead.next) * std::max(ahead.key_bytes, ahead.value_bytes) / 64;
    const int64_t steps = kKeyChunk / kKeyBlock * few_steps<C>(block.count * dims_.group, dims_.head_dim, dims_.value_dim);
    ahead.lines = (lines + steps - 1) / steps;
    return ahead;
  }

  void run_task(Scratch &s, const PagedShared &shared, const PagedBlock &block, int chunk, int kv_head,
                CacheAhead *ahead) {
    s.columns.set(dims_, block.position, block.position + block.count, block.position + block.count);
    const T *rows[kMaxGroup];
    q_.columns(rows, block.token, s.columns.count, kv_head * dims_.group, dims_.group);
    const bool few = plan_.is_few(block);
    if (few) {
      pack_a(s.few_q, rows, s.columns.count, s.columns.count, dims_.head_dim, dims_.padded_head_dim);
    } else {
      A::begin_task();
      pack_b_transposed(s.q, rows, s.columns.count, s.columns.padded, dims_.head_dim, dims_.padded_head_dim);
    }
    run_chunks(s, shared, block, chunk, kv_head, few, ahead);
    if (!few) A::end_task();
  }

  // Chunk `chunk` of a block that is split, into its place among the partial results, or all chunks of one that is not.
  void run_chunks(Scratch &s, const PagedShared &shared, const PagedBlock &block, int chunk, int kv_head, bool few,
                  CacheAhead *ahead) {
    if (chunk >= 0) {
      const auto part = plan_.partial(shared.partials, block, chunk, kv_head);
      s.part_o = part.o, s.part_peak = part.peak, s.part_total = part.total;
      run_chunk(s, block, chunk, kv_head, few, ahead);
      return;
    }
    for (int i = 0; i < block.num_chunks; ++i) {
      run_chunk(s, block, i, kv_head, few, ahead);
      if (i == 0) {
        std::swap(s.o, s.part_o);
        std::swap(s.peak, s.part_peak);
        std::swap(s.total, s.part_total);
      } else if (few) {
        merge_rows(s.o, s.peak, s.total, s.part_o, s.part_peak, s.part_total, s.columns.count);
      } else {
        merge_strips(s.o, s.peak, s.total, s.part_o, s.part_peak, s.part_total, s.columns.padded);
      }
    }
    if (few) {
      store_rows(block, kv_head, s.o, s.peak, s.total);
    } else {
      store_strips(block, kv_head, s.o, s.peak, s.total);
    }
  }

  void run_chunk(Scratch &s, const PagedBlock &block, int chunk, int kv_head, bool few, CacheAhead *ahead) {
    const int columns = few ? s.columns.count : s.columns.padded;
    std::fill(s.part_o, s.part_o + static_cast<int64_t>(columns) * dims_.padded_value_dim, 0.0f);
    std::fill(s.part_peak, s.part_peak + columns, kLowestPeak);
    std::fill(s.part_total, s.part_total + columns, 0.0f);
    const int chunk_begin = (block.first_chunk + chunk) * kKeyChunk;
    const int begin = std::max(chunk_begin, first_key(block));
    const int end = std::min(chunk_begin + kKeyChunk, block.position + block.count);
    const C *keys[kKeyBlock], *values[kKeyBlock];
    for (int key = begin, count = 0; key < end; key += count) {
      count = std::min(kKeyBlock - key % kKeyBlock, end - key);
      cache_rows(keys, values, block.sequence, key, count, kv_head);
      if (few) {
        run_few(s, keys, values, key, count, ahead);
      } else {
        run_strips(s, keys, values, key, count);
      }
    }
  }

  void run_few(Scratch &s, const C *const *keys, const C *const *values, int key, int count, CacheAhead *ahead) {
    const int columns = s.columns.count;
    few_logits(s.logits, columns, s.few_q, keys, count, dims_.head_dim, dims_.padded_head_dim, ahead);
    float shrink[kFewColumns];
    for (int c = 0; c < columns; ++c) {
      float *logits = s.logits + c * kKeyBlock;
      if (dims_.softcap > 0.0f) {
        const vf f = vset(dims_.tanh_factor());
        for (int n = 0; n < count; n += kLanes) vstore(logits + n, vtanh(vmul(vload(logits + n), f)));
      }
      shrink[c] = few_softmax(logits, count, dims_.logit_factor(), static_cast<float>(key), s.columns.low[c],
                              s.columns.high[c], s.part_peak + c, s.part_total + c);
    }
    few_sum(s.part_o, columns, dims_.padded_value_dim, s.logits, shrink, values, count, dims_.value_dim, ahead);
  }

  void run_strips(Scratch &s, const C *const *keys, const C *const *values, int key, int count) {
    const int padded = static_cast<int>(round_up(count, kPad));
    pack_a(s.k, keys, count, padded, dims_.head_dim, dims_.padded_head_dim);
    pack_a_transposed(s.v, kKeyBlock, values, count, padded, dims_.value_dim, dims_.padded_value_dim);
    for (int strip = 0; strip < s.columns.padded; strip += kWidth) {
      const StripRange range(s.columns, strip, key, padded);
      if (range.empty()) continue;
      A::product(s.logits, kWidth, s.k + range.begin * dims_.padded_head_dim, dims_.padded_head_dim,
                 s.q + strip * dims_.padded_head_dim, range.size(), dims_.padded_head_dim, false);
      if (dims_.softcap > 0.0f) tanh_rows(s.logits, range.size(), dims_.tanh_factor());
      float *o = s.part_o + strip * dims_.padded_value_dim;
      softmax_strip(s.logits, s.weights, range.size(), dims_.logit_factor(), range.masked,
                    static_cast<float>(key + range.begin), s.columns.low + strip, s.columns.high + strip,
                    s.part_peak + strip, s.part_total + strip, o, dims_.padded_value_dim);
      A::product(o, kWidth, s.v + range.begin, kKeyBlock, s.weights, dims_.padded_value_dim, range.size(), true);
    }
  }

  void merge_rows(float *o, float *peak, float *total, const float *part_o, const float *part_peak,
                  const float *part_total, int columns) const {
    for (int c = 0; c < columns; ++c) {
      float keep, take;
      merge_factors(peak + c, total + c, part_peak[c], part_total[c], &keep, &take);
      float *row = o + c * dims_.padded_value_dim;
      const float *part = part_o + c * dims_.padded_value_dim;
      for (int d = 0; d < dims_.padded_value_dim; d += kLanes) {
        vstore(row + d, vfma(vload(row + d), vset(keep), vmul(vload(part + d), vset(take))));
      }
    }
  }

  void merge_strips(float *o, float *peak, float *total, const float *part_o, const float *part_peak,
                    const float *part_total, int columns) const {
    float keep[kWidth], take[kWidth];
    for (int strip = 0; strip < columns; strip += kWidth) {
      for (int c = strip; c < strip + kWidth; ++c) {
        merge_factors(peak + c, total + c, part_peak[c], part_total[c], keep + c - strip, take + c - strip);
      }
      float *sum = o + strip * dims_.padded_value_dim;
      const float *part = part_o + strip * dims_.padded_value_dim;
      for (int i = 0; i < dims_.padded_value_dim * kWidth; i += kLanes) {
        const int c = i % kWidth;
        vstore(sum + i, vfma(vload(sum + i), vload(keep + c), vmul(vload(part + i), vload(take + c))));
      }
    }
  }

  T *output_row(const PagedBlock &block, int kv_head, int column) const {
    const int64_t token = block.token + column / dims_.group;
    return o_.row(token, kv_head * dims_.group + column % dims_.group);
  }

  void store_lse(const PagedBlock &block, int kv_head, int column, float peak, float total) const {
    if (lse_ == nullptr) return;
    const int64_t token = block.token + column / dims_.group;
    lse_[token * dims_.heads + kv_head * dims_.group + column % dims_.group] = peak * kLn2 + std::log(total);
  }

  void store_rows(const PagedBlock &block, int kv_head, const float *o, const float *peak, const float *total) const {
    for (int c = 0; c < block.count * dims_.group; ++c) {
      store_lse(block, kv_head, c, peak[c], total[c]);
      T *out = output_row(block, kv_head, c);
      const float *row = o + c * dims_.padded_value_dim;
      const vf inverse = vset(1.0f / total[c]);
      int d = 0;
      for (; d + kLanes <= dims_.value_dim; d += kLanes) vstore(out + d, vmul(vload(row + d), inverse));
      if (d < dims_.value_dim) vstore_n(out + d, vmul(vload(row + d), inverse), dims_.value_dim - d);
    }
  }

  void store_strips(const PagedBlock &block, int kv_head, const float *o, const float *peak, const float *total) const {
    float inverse[kWidth];
    T *rows[kWidth];
    const int columns = block.count * dims_.group;
    for (int strip = 0; strip < columns; strip += kWidth) {
      const int width = std::min(kWidth, columns - strip);
      for (int c = 0; c < kWidth; ++c) inverse[c] = 1.0f / total[strip + c];
      for (int c = 0; c < width; ++c) {
        rows[c] = output_row(block, kv_head, strip + c);
        store_lse(block, kv_head, strip + c, peak[strip + c], total[strip + c]);
      }
      store_transposed(rows, width, o + strip * dims_.padded_value_dim, inverse, dims_.value_dim);
    }
  }

  void finish_split(const PagedShared &shared, const PagedBlock &block, int kv_head) const {
    if (block.slot < 0) return;
    const bool few = plan_.is_few(block);
    const int count = block.count * dims_.group, columns = few ? count : static_cast<int>(round_up(count, kPad));
    const auto sum = plan_.partial(shared.partials, block, 0, kv_head);
    for (int chunk = 1; chunk < block.num_chunks; ++chunk) {
      const auto part = plan_.partial(shared.partials, block, chunk, kv_head);
      if (few) merge_rows(sum.o, sum.peak, sum.total, part.o, part.peak, part.total, columns);
      else merge_strips(sum.o, sum.peak, sum.total, part.o, part.peak, part.total, columns);
    }
    if (few) store_rows(block, kv_head, sum.o, sum.peak, sum.total);
    else store_strips(block, kv_head, sum.o, sum.peak, sum.total);
  }

  const sg_call *call_;
  PagedPlan plan_;
  const AttentionDims &dims_;
  TokenRows<const T> q_;
  TokenRows<const C> k_, v_;
  const int32_t *sequences_, *positions_, *tables_;
  TokenRows<T> o_;
  float *lse_;  // nullptr: nobody wants it
};

}  // namespace sg::cpu::SG_ISA
