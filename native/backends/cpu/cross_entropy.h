// linear_cross_entropy and its gradient. With z = logit_scale * x . weight[v], and l = softcap * tanh(z / softcap) if
// softcap > 0, else l = z:
//   token_loss = log sum_v exp(l_v) - l_target,     dl_v = dtoken_loss * (exp(l_v - lse) - [v == target])
//   dz_v = dl_v * (1 - (l_v / softcap)^2),          dx = logit_scale * dz . weight,     dweight += logit_scale * dz^T x
//
// Tokens without a target cost nothing: the others are gathered first, and taken a chunk at a time. A chunk's logits
// never meet more than one worker's cache in the forward op. The gradient keeps, of one chunk, exp(l - largest of the
// panel), of which the softmax is a multiple; in slots of kSlot columns. (With a cap it keeps l, whose slope it needs.)
// Then each task takes a range of slots: it turns a slot into dz, in place and in x's precision, and multiplies it with
// the weight while it is in the cache. The ranges' sums of dx are added in order.
#pragma once

#include "gemm.h"

namespace sg::cpu::SG_ISA {

struct CrossEntropy {
  static constexpr int64_t kSlot = 512, kPanel = 128;  // a slot is whole panels
  static constexpr int64_t kRanges = 8, kWidePanel = 768;
  const sg_tensor *x, *weight, *targets, *dtoken_loss, *token_loss, *dx, *dweight;
  int64_t tokens, width, vocabulary;
  float softcap, logit_scale;
  bool gradient;

  bool read(const sg_call *call, bool gradient_) {
    gradient = gradient_;
    if (call->num_inputs < (gradient ? 4 : 3) || call->num_outputs < (gradient ? 2 : 1) || !all_dense(call))
      return false;
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
    if (dx == nullptr || !is_activation(dx) || dx->rank != 2 || dx->shape[0] != tokens || dx->shape[1] != width)
      return false;
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
  bool half;            // what is kept is f16: exponentials are in [0, 1], and dz is rounded to fewer bits anyway
  int64_t chunk;        // rows at a time
  int64_t slots, ranges;
  int64_t panel;        // columns of dx at a time
  int64_t panel_rows;   // rows of a panel's sums
  Gemm<Micro> logits, weight_grad;
  int64_t packed_bytes, worker_bytes, offset_x, offset_partial, offset_row, offset_slots, offset_sums, offset_workers,
      bytes;

  CrossEntropyPlan(const CrossEntropy &problem, int workers)
      : p(problem),
        half(sizeof(Dz) == 2 && problem.softcap <= 0),
        chunk(std::min<int64_t>(problem.tokens, half ? 512 : 256)),
        slots((problem.vocabulary + kSlot - 1) / kSlot),
        ranges(std::min(slots, CrossEntropy::kRanges)),
        logits(Gemm<Micro>::product(chunk, problem.vocabulary, problem.width, false)),
        weight_grad(Gemm<Micro>::over_tokens(kSlot, problem.width, chunk)) {
    logits.panel = std::min(kPanel, round_up(p.vocabulary, Micro::kStrip));
    const int64_t unit = p.weight->dtype >= SG_Q4_K ? 256 : Micro::kStrip;
    panel = std::min(CrossEntropy::kWidePanel, round_up(p.width, unit));
    panel_rows = round_up(chunk, Micro::kGroup);
    packed_bytes =
        round_up(Micro::padded_contraction(kSlot) * panel * static_cast<int64_t>(sizeof(typename Micro::Packed)), 64);
    worker_bytes = logits.worker_bytes();
    if (p.gradient) {
      const int64_t input_grad = packed_bytes + round_up(Micro::scratch_floats(kSlot, panel) * 4, 64);
      worker_bytes = std::max({worker_bytes, input_grad, weight_grad.worker_bytes()});
    }
    offset_x = round_up(p.tokens * 4, 64);
    offset_partial = offset_x + round_up(chunk * p.width * 4, 64);
    offset_row = offset_partial + round_up(chunk * logits.panels() * 8, 64);
    offset_slots = offset_row + round_up(chunk * 8, 64);
    offset_sums = offset_slots + (p.gradient ? slots * slot_bytes() : 0);
    offset_workers = offset_sums + (p.gradient ? ranges * range_bytes() : 0);
    bytes = offset_workers + worker_bytes * workers;
  }
  int64_t kept_bytes() const { return half ? 2 : 4; }
  int64_t slot_bytes() const { return chunk * kSlot * kept_bytes(); }
  int64_t panels() const { return (p.width + panel - 1) / panel; }
  int64_t range_bytes() const { return panels() * panel_rows * panel * 4; }
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
  char *kept(int64_t column, int64_t row) const {
    return slot(column / kSlot) + (row * kSlot + column % kSlot) * plan.kept_bytes();
  }
  float *range_sums(int64_t range, int64_t panel) const {
    return reinterpret_cast<float *>(workspace + plan.offset_sums + range * plan.range_bytes()) +
           panel * plan.panel_rows * plan.panel;
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
        std::memcpy(x + r * row_bytes, data<const char>(p.x) + rows[first + r] * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
    });
    const MatrixA a{x, p.x->dtype, p.width, false};
    compute_logits(a, first, count);
    parallel_rows(call, count, plan.logits.panels(), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) finish_row(first, r);
    });
    if (!p.gradient || p.vocabulary == 0) return;
    parallel_for(call, plan.ranges, [&](int64_t range, int worker) { range_gradient(x, first, count, range, worker); });
    add_ranges(first, count);
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
    const vf scale = vset(p.logit_scale), cap = vset(p.softcap),
             inverse_cap = vset(p.softcap > 0 ? 1.0f / p.softcap : 0);
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
    char *to = p.gradient ? kept(column, row) : nullptr;
    if (to != nullptr && p.softcap > 0) std::memcpy(to, sums, static_cast<size_t>(padded) * 4);
    vf total = vzero();
    for (int i = 0; i < padded; i += kLanes) {
      const vf e = vexp(vsub(vload(sums + i), most));
      total = vadd(total, e);
      if (to == nullptr || p.softcap > 0) continue;
      if (plan.half) vstore_half(reinterpret_cast<uint16_t *>(to) + i, e);
      else vstore(reinterpret_cast<float *>(to) + i, e);
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

  // The slots of a range: dz, its part of dx, and the rows of dweight, which no other range has.
  void range_gradient(const char *x, int64_t first, int64_t count, int64_t range, int worker) const {
    const int64_t begin = plan.slots * range / plan.ranges, end = plan.slots * (range + 1) / plan.ranges;
    char *work = workspace + plan.offset_workers + worker * plan.worker_bytes;
    for (int64_t s = begin; s < end; ++s) {
      slot_gradient(first, count, s);
      add_input_grad(count, range, s, s > begin, work);
      if (p.dweight != nullptr) add_weight_grad(x, count, s, work);
    }
  }

  // dz replaces what was kept. Row r of dz ends where row r of that does, or before, so nothing is overwritten unread.
  void slot_gradient(int64_t first, int64_t count, int64_t s) const {
    const int64_t column = s * kSlot;
    const int n = static_cast<int>(std::min(kSlot, p.vocabulary - column));
    for (int64_t row = 0; row < count; ++row) {
      const int32_t token = rows[first + row];
      const float weight = data<const float>(p.dtoken_loss)[token];
      const int64_t target = targets()[token] - column;
      const char *from = kept(column, row);
      Dz *out = reinterpret_cast<Dz *>(slot(s)) + row * kSlot;
      if (p.softcap > 0) capped_gradient(reinterpret_cast<const float *>(from), n, row, weight, out);
      else if (plan.half) plain_gradient(reinterpret_cast<const half_bits *>(from), n, column, row, weight, out);
      else plain_gradient(reinterpret_cast<const float *>(from), n, column, row, weight, out);
      if (target >= 0 && target < n) {
        const float ratio = p.softcap > 0 ? target_logit[row] / p.softcap : 0.0f;
        from_float(weight * (std::exp(target_logit[row] - lse[row]) - 1.0f) * (1.0f - ratio * ratio), out + target);
      }
    }
  }
  struct half_bits {
    uint16_t bits;
  };
  static vf load_kept(const float *p) { return vload(p); }
  static vf load_kept(const half_bits *p) { return vload_half(reinterpret_cast<const uint8_t *>(p)); }
  template <class Kept>
  void plain_gradient(const Kept *from, int n, int64_t column, int64_t row, float weight, Dz *out) const {
    const float *part = partial + (row * plan.logits.panels() + column / kPanel) * 2;
    for (int begin = 0; begin < n; begin += kPanel, part += 2) {
      const vf factor = vset(weight * std::exp(part[0] - lse[row]));
      const int end = std::min<int>(n, begin + kPanel);
      for (int i = begin; i < end; i += kLanes) vstore(out + i, vmul(load_kept(from + i), factor));
    }
  }
  void capped_gradient(const float *from, int n, int64_t row, float weight, Dz *out) const {
    const vf inverse_cap = vset(1.0f / p.softcap), one = vset(1.0f), log_sum = vset(lse[row]), factor = vset(weight);
    for (int i = 0; i < n; i += kLanes) {
      const vf l = vload(from + i), ratio = vmul(l, inverse_cap);
      vstore(out + i, vmul(vmul(factor, vexp(vsub(l, log_sum))), vfnma(ratio, ratio, one)));
    }
  }

  MatrixA dz(int64_t s, bool transposed) const {
    return {slot(s), sizeof(Dz) == 4 ? SG_F32 : SG_BF16, kSlot, transposed};
  }

  // The range's sums of dx (+)= dz of one slot times that slot's rows of the weight.
  void add_input_grad(int64_t count, int64_t range, int64_t s, bool add, char *work) const {
    [[maybe_unused]] typename Micro::Session session;
    const MatrixB b{p.weight->data, p.weight->dtype, SG_ISA::row_bytes(p.weight->dtype, p.width), true};
    const MatrixA a = dz(s, false);
    auto *packed = reinterpret_cast<typename Micro::Packed *>(work);
    auto *scratch = reinterpret_cast<float *>(work + plan.packed_bytes);
    const int64_t column = s * kSlot, kc = std::min(kSlot, p.vocabulary - column);
    for (int64_t i = 0; i < plan.panels(); ++i) {
      const int64_t columns = std::min(plan.panel, p.width - i * plan.panel);
      Micro::pack_b(b, column, kc, i * plan.panel, columns, packed, scratch);
      for (int64_t row = 0; row < count; row += Micro::kGroup) {
        const int group = static_cast<int>(std::min<int64_t>(Micro::kGroup, count - row));
        const auto taken = Micro::take_a(a, row, group, 0, kc, scratch);
        Micro::multiply(taken, group, packed, (columns + Micro::kStrip - 1) / Micro::kStrip, kc,
                        range_sums(range, i) + row * plan.panel, plan.panel, add);
      }
    }
  }

  void add_weight_grad(const char *x, int64_t count, int64_t s, char *work) const {
    Gemm<Micro> gemm = plan.weight_grad;
    gemm.k = count;
    gemm.m = std::min(kSlot, p.vocabulary - s * kSlot);
    const MatrixB b{x, p.x->dtype, SG_ISA::row_bytes(p.x->dtype, p.width), true};
    float *out = data<float>(p.dweight) + s * kSlot * p.width;
    const Epilogue epilogue{p.logit_scale, nullptr, SG_F32, out, out, SG_F32, p.width};
    for (int64_t task = 0; task < gemm.tasks(); ++task) gemm.run_task(task, work, dz(s, true), b, epilogue);
  }

  void add_ranges(int64_t first, int64_t count) const {
    const Epilogue epilogue{p.logit_scale, nullptr, SG_F32, nullptr, p.dx->data, p.dx->dtype, p.width};
    parallel_rows(call, count, p.width * plan.ranges, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t i = 0; i < plan.panels(); ++i) {
          const int columns = static_cast<int>(std::min(plan.panel, p.width - i * plan.panel));
          float *total = range_sums(0, i) + row * plan.panel;
          for (int64_t range = 1; range < plan.ranges; ++range) {
            const float *part = range_sums(range, i) + row * plan.panel;
            for (int c = 0; c < columns; c += kLanes) vstore(total + c, vadd(vload(total + c), vload(part + c)));
          }
          epilogue(rows[first + row], 1, i * plan.panel, columns, total, plan.panel);
        }
      }
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
