// linear_cross_entropy and its gradient. With z = logit_scale * x . weight[v], and l = softcap * tanh(z / softcap) if
// softcap > 0, else l = z:
//   token_loss = log sum_v exp(l_v) - l_target,     dl_v = dtoken_loss * (exp(l_v - lse) - [v == target])
//   dz_v = dl_v * (1 - (l_v / softcap)^2),          dx = logit_scale * dz . weight,     dweight += logit_scale * dz^T x
//
// Tokens without a target cost nothing: the others are gathered first, and taken kChunk at a time. A chunk's logits never
// meet more than one worker's cache in the forward op. The gradient keeps one chunk of exp(l - largest of the panel), which
// the softmax is a multiple of (with a cap it keeps l, whose slope it needs), in slots of kSlot columns: dz, in x's
// precision, replaces them in place, and a slot is one contraction step of the product that gives dx.
#pragma once

#include "gemm.h"

namespace sg::cpu::SG_ISA {

struct CrossEntropy {
  static constexpr int64_t kChunk = 256, kSlot = 512, kPanel = 128;  // a slot is whole panels
  const sg_tensor *x, *weight, *targets, *dtoken_loss, *token_loss, *dx, *dweight;
  int64_t tokens, width, vocabulary;
  float softcap, logit_scale;
  bool gradient;

  bool read(const sg_call *call, bool gradient_) {
    gradient = gradient_;
    if (call->num_inputs < (gradient ? 4 : 3) || call->num_outputs < (gradient ? 2 : 1) || !all_dense(call)) return false;
    x = input(call, 0), weight = input(call, 1), targets = input(call, 2), token_loss = output(call, 0);
    dtoken_loss = gradient ? input(call, 3) : nullptr;
    dx = gradient ? output(call, 1) : nullptr, dweight = gradient ? output(call, 2) : nullptr;
    if (x == nullptr || weight == nullptr || targets == nullptr || token_loss == nullptr) return false;
    if (x->rank != 2 || weight->rank != 2 || !is_activation(x) || !is_weight(weight->dtype)) return false;
    tokens = x->shape[0], width = x->shape[1], vocabulary = weight->shape[0];
    if (weight->shape[1] != width || targets->dtype != SG_I32 || num_elements(targets) != tokens) return false;
    if (token_loss->dtype != SG_F32 || num_elements(token_loss) != tokens) return false;
    softcap = static_cast<float>(attr_float(call, "softcap", 0.0));
    logit_scale = static_cast<float>(attr_float(call, "logit_scale", 1.0));
    if (!gradient) return true;
    if (dtoken_loss == nullptr || dtoken_loss->dtype != SG_F32 || num_elements(dtoken_loss) != tokens) return false;
    if (dx == nullptr || !is_activation(dx) || dx->rank != 2 || dx->shape[0] != tokens || dx->shape[1] != width) return false;
    return dweight == nullptr || (dweight->dtype == SG_F32 && dweight->rank == 2 && dweight->shape[0] == vocabulary &&
                                  dweight->shape[1] == width);
  }
};

// Dz: float or bf16, the precision in which dz meets the weight and x.
template <class Micro, class Dz>
struct CrossEntropyPlan {
  static constexpr int64_t kSlot = CrossEntropy::kSlot, kPanel = CrossEntropy::kPanel;
  static_assert(kSlot % kPanel == 0 && kPanel % Micro::kStrip == 0);
  const CrossEntropy &p;
  int64_t chunk, slots;
  Gemm<Micro> logits, input_grad, weight_grad;
  int64_t worker_bytes, offset_x, offset_partial, offset_row, offset_slots, offset_workers, bytes;

  CrossEntropyPlan(const CrossEntropy &problem, int workers)
      : p(problem),
        chunk(std::min(problem.tokens, CrossEntropy::kChunk)),
        slots((problem.vocabulary + kSlot - 1) / kSlot),
        logits(Gemm<Micro>::product(chunk, problem.vocabulary, problem.width, false)),
        input_grad(Gemm<Micro>::product(chunk, problem.width, problem.vocabulary, problem.weight->dtype >= SG_Q4_K)),
        weight_grad(Gemm<Micro>::over_tokens(kSlot, problem.width, chunk)) {
    logits.panel = std::min(kPanel, round_up(p.vocabulary, Micro::kStrip));
    input_grad.step = kSlot;
    worker_bytes = logits.worker_bytes();
    if (p.gradient) worker_bytes = std::max({worker_bytes, input_grad.worker_bytes(), weight_grad.worker_bytes()});
    offset_x = round_up(p.tokens * 4, 64);
    offset_partial = offset_x + round_up(chunk * p.width * 4, 64);
    offset_row = offset_partial + round_up(chunk * logits.panels() * 8, 64);
    offset_slots = offset_row + round_up(chunk * 8, 64);
    offset_workers = offset_slots + (p.gradient ? slots * slot_bytes() : 0);
    bytes = offset_workers + worker_bytes * workers;
  }
  int64_t slot_bytes() const { return chunk * kSlot * 4; }
};

template <class Micro, class Dz>
struct CrossEntropyRun {
  using Plan = CrossEntropyPlan<Micro, Dz>;
  static constexpr int64_t kSlot = CrossEntropy::kSlot, kPanel = CrossEntropy::kPanel;
  const sg_call *call;
  const CrossEntropy &p;
  Plan plan;
  char *workspace;
  int32_t *rows;       // token of each supervised row, in order
  float *partial;      // [row][panel]: largest logit, sum of exp(logit - largest)
  float *target_logit, *lse;

  CrossEntropyRun(const sg_call *call_, const CrossEntropy &problem)
      : call(call_), p(problem), plan(problem, num_workers(call_)), workspace(static_cast<char *>(call_->workspace)) {
    rows = reinterpret_cast<int32_t *>(workspace);
    partial = reinterpret_cast<float *>(workspace + plan.offset_partial);
    target_logit = reinterpret_cast<float *>(workspace + plan.offset_row);
    lse = target_logit + plan.chunk;
  }
  const int32_t *targets() const { return data<const int32_t>(p.targets); }
  char *slot(int64_t i) const { return workspace + plan.offset_slots + i * plan.slot_bytes(); }
  float *slot_row(int64_t column, int64_t row) const {
    return reinterpret_cast<float *>(slot(column / kSlot)) + row * kSlot + column % kSlot;
  }

  int32_t run() {
    int64_t count = 0;
    for (int64_t t = 0; t < p.tokens; ++t) {
      if (targets()[t] >= p.vocabulary) {
        return fail(call, "%s: target %d of token %lld is outside the vocabulary of %lld", call->op, targets()[t],
                    static_cast<long long>(t), static_cast<long long>(p.vocabulary));
      }
      if (targets()[t] >= 0) rows[count++] = static_cast<int32_t>(t);
      else data<float>(p.token_loss)[t] = 0.0f;
    }
    if (p.gradient) clear_unsupervised();
    for (int64_t first = 0; first < count; first += plan.chunk) run_chunk(first, std::min(plan.chunk, count - first));
    return SG_OK;
  }

  void clear_unsupervised() const {
    const int64_t row_bytes = p.width * (p.dx->dtype == SG_F32 ? 4 : 2);
    parallel_rows(call, p.tokens, p.width, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if (targets()[t] < 0) std::memset(data<char>(p.dx) + t * row_bytes, 0, static_cast<size_t>(row_bytes));
      }
    });
  }

  void run_chunk(int64_t first, int64_t count) const {
    const int64_t element = p.x->dtype == SG_F32 ? 4 : 2, row_bytes = p.width * element;
    char *x = workspace + plan.offset_x;
    parallel_rows(call, count, p.width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        std::memcpy(x + r * row_bytes, data<const char>(p.x) + rows[first + r] * row_bytes, static_cast<size_t>(row_bytes));
      }
    });
    const MatrixA a{x, p.x->dtype, p.width, false};
    compute_logits(a, first, count);
    for (int64_t r = 0; r < count; ++r) finish_row(first, r);
    if (!p.gradient) return;
    parallel_for(call, plan.slots, [&](int64_t s, int) { slot_gradient(first, count, s); });
    compute_input_grad(first, count);
    if (p.dweight != nullptr) compute_weight_grad(x, count);
  }

  void compute_logits(const MatrixA &a, int64_t first, int64_t count) const {
    Gemm<Micro> gemm = plan.logits;
    gemm.m = count;
    const MatrixB b{p.weight->data, p.weight->dtype, SG_ISA::row_bytes(p.weight->dtype, p.width), false};
    gemm.run(call, workspace + plan.offset_workers, plan.worker_bytes, a, b,
             [&](int64_t row, int rows_done, int64_t column, int n, float *sums, int64_t stride) {
               for (int i = 0; i < rows_done; ++i) finish_logits(first, gemm, row + i, column, n, sums + i * stride);
             });
  }

  // A row of one panel: scale and cap, remember the largest and the sum of exponentials, keep what a gradient needs.
  // Sums and slots are padded to whole vectors; what is past `n` becomes -infinity, and 0 as an exponential.
  void finish_logits(int64_t first, const Gemm<Micro> &gemm, int64_t row, int64_t column, int n, float *sums) const {
    const vf scale = vset(p.logit_scale), cap = vset(p.softcap), inverse_cap = vset(p.softcap > 0 ? 1.0f / p.softcap : 0);
    const int padded = static_cast<int>(round_up(n, kLanes));
    std::fill(sums + n, sums + padded, -INFINITY);
    vf largest = vset(-INFINITY);
    for (int i = 0; i < padded; i += kLanes) {
      vf v = vmul(vload(sums + i), scale);
      if (p.softcap > 0) v = vmul(cap, vtanh(vmul(v, inverse_cap)));
      vstore(sums + i, v);
      largest = vmax(largest, v);
    }
    if (p.softcap > 0) std::fill(sums + n, sums + padded, -INFINITY);
    const int64_t target = targets()[rows[first + row]] - column;
    if (target >= 0 && target < n) target_logit[row] = sums[target];
    const vf most = vset(vmaximum(largest));
    float *kept = p.gradient ? slot_row(column, row) : nullptr;
    if (kept != nullptr && p.softcap > 0) std::memcpy(kept, sums, static_cast<size_t>(n) * 4);
    vf total = vzero();
    for (int i = 0; i < padded; i += kLanes) {
      const vf e = vexp(vsub(vload(sums + i), most));
      total = vadd(total, e);
      if (kept != nullptr && p.softcap <= 0) vstore(kept + i, e);
    }
    float *out = partial + (row * gemm.panels() + column / gemm.panel) * 2;
    out[0] = vmaximum(most);
    out[1] = vsum(total);
  }

  void finish_row(int64_t first, int64_t row) const {
    const int64_t panels = plan.logits.panels();
    const float *part = partial + row * panels * 2;
    float most = -INFINITY;
    for (int64_t i = 0; i < panels; ++i) most = std::max(most, part[2 * i]);
    double total = 0.0;
    for (int64_t i = 0; i < panels; ++i) total += std::exp(static_cast<double>(part[2 * i]) - most) * part[2 * i + 1];
    const double log_sum = most + std::log(total);
    lse[row] = static_cast<float>(log_sum);
    data<float>(p.token_loss)[rows[first + row]] = static_cast<float>(log_sum - target_logit[row]);
  }

  // dz replaces what was kept. Row r of dz ends where row r of that begins, or before, so nothing is overwritten unread.
  void slot_gradient(int64_t first, int64_t count, int64_t s) const {
    const int64_t column = s * kSlot;
    const int n = static_cast<int>(std::min(kSlot, p.vocabulary - column));
    for (int64_t row = 0; row < count; ++row) {
      const int32_t token = rows[first + row];
      const float weight = data<const float>(p.dtoken_loss)[token];
      const int64_t target = targets()[token] - column;
      Dz *out = reinterpret_cast<Dz *>(slot(s)) + row * kSlot;
      if (p.softcap > 0) capped_gradient(slot_row(column, row), n, row, weight, out);
      else plain_gradient(slot_row(column, row), n, column, row, weight, out);
      if (target >= 0 && target < n) {
        const float ratio = p.softcap > 0 ? target_logit[row] / p.softcap : 0.0f;
        from_float(weight * (std::exp(target_logit[row] - lse[row]) - 1.0f) * (1.0f - ratio * ratio), out + target);
      }
    }
  }
  void plain_gradient(const float *kept, int n, int64_t column, int64_t row, float weight, Dz *out) const {
    const float *part = partial + (row * plan.logits.panels() + column / kPanel) * 2;
    for (int begin = 0; begin < n; begin += kPanel, part += 2) {
      const vf factor = vset(weight * std::exp(part[0] - lse[row]));
      const int end = std::min<int>(n, begin + kPanel);
      for (int i = begin; i < end; i += kLanes) {
        const int lanes = std::min(kLanes, end - i);
        vstore_n(out + i, vmul(vload_n(kept + i, lanes), factor), lanes);
      }
    }
  }
  void capped_gradient(const float *kept, int n, int64_t row, float weight, Dz *out) const {
    const vf inverse_cap = vset(1.0f / p.softcap), one = vset(1.0f), log_sum = vset(lse[row]), factor = vset(weight);
    for (int i = 0; i < n; i += kLanes) {
      const int lanes = std::min(kLanes, n - i);
      const vf l = vload_n(kept + i, lanes), ratio = vmul(l, inverse_cap);
      vstore_n(out + i, vmul(vmul(factor, vexp(vsub(l, log_sum))), vfnma(ratio, ratio, one)), lanes);
    }
  }

  MatrixA dz(int64_t s, bool transposed) const {
    constexpr int32_t dtype = sizeof(Dz) == 4 ? SG_F32 : SG_BF16;
    if (transposed) return {slot(s), dtype, kSlot, true};
    return {slot(0), dtype, kSlot, false, kSlot, plan.slot_bytes()};
  }

  void compute_input_grad(int64_t first, int64_t count) const {
    Gemm<Micro> gemm = plan.input_grad;
    gemm.m = count;
    const MatrixB b{p.weight->data, p.weight->dtype, SG_ISA::row_bytes(p.weight->dtype, p.width), true};
    const Epilogue epilogue{p.logit_scale, nullptr, SG_F32, nullptr, p.dx->data, p.dx->dtype, p.width};
    gemm.run(call, workspace + plan.offset_workers, plan.worker_bytes, dz(0, false), b,
             [&](int64_t row, int rows_done, int64_t column, int n, const float *sums, int64_t stride) {
               for (int i = 0; i < rows_done; ++i) epilogue(rows[first + row + i], 1, column, n, sums + i * stride, stride);
             });
  }

  void compute_weight_grad(const char *x, int64_t count) const {
    Gemm<Micro> gemm = plan.weight_grad;
    gemm.k = count;
    const MatrixB b{x, p.x->dtype, SG_ISA::row_bytes(p.x->dtype, p.width), true};
    const int64_t tasks = gemm.tasks();
    parallel_for(call, plan.slots * tasks, [&](int64_t task, int worker) {
      const int64_t s = task / tasks;
      float *out = data<float>(p.dweight) + s * kSlot * p.width;
      const Epilogue epilogue{p.logit_scale, nullptr, SG_F32, out, out, SG_F32, p.width};
      Gemm<Micro> part = gemm;
      part.m = std::min(kSlot, p.vocabulary - s * kSlot);
      part.run_task(task % tasks, workspace + plan.offset_workers + worker * plan.worker_bytes, dz(s, true), b, epilogue);
    });
  }
};

template <class Micro, class Dz, bool gradient>
size_t cross_entropy_workspace(const sg_call *call) {
  CrossEntropy p;
  if (!p.read(call, gradient)) return 0;
  return static_cast<size_t>(CrossEntropyPlan<Micro, Dz>(p, num_workers(call)).bytes);
}

template <class Micro, class Dz, bool gradient>
int32_t cross_entropy_run(const sg_call *call) {
  CrossEntropy p;
  if (!p.read(call, gradient)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  return CrossEntropyRun<Micro, Dz>(call, p).run();
}

}  // namespace sg::cpu::SG_ISA
