// The online softmax of one strip of columns. Weights are summed in four interleaved accumulators by row, an order
// that the kernel for few columns (attention_few.h) keeps too.
#pragma once

#include "attention_gemm.h"

namespace sg::cpu::SG_ISA {

// Where a running maximum starts: finite, so that a column whose keys are all hidden so far stays free of NaN.
constexpr float kLowestPeak = -1e30f;

// On entry logits[rows][kWidth] holds products; `factor` turns them into base-2 logits. Key `first_key + row` is
// hidden from column c unless low[c] <= key <= high[c]. Writes weights (a B panel of depth `rows`), updates the
// running maximum `peak` and sum `total`, and rescales o[o_rows][kWidth] to the new maximum.
template <class Elem>
void softmax_strip(float *logits, Elem *weights, int rows, float factor, bool masked, float first_key, const float *low,
                   const float *high, float *peak, float *total, float *o, int o_rows) {
  const vf f = vset(factor), hidden = vset(-INFINITY);
  for (int half = 0; half < 2; ++half) {
    float *column = logits + half * kLanes;
    const vf first = vload(low + half * kLanes), last = vload(high + half * kLanes);
    if (masked) {
      for (int r = 0; r < rows; ++r) {
        float *x = column + r * kWidth;
        vstore(x, vwithin(vload(x), vset(first_key + static_cast<float>(r)), first, last, hidden));
      }
    }
    vf max0 = hidden, max1 = hidden, max2 = hidden, max3 = hidden;
    for (int r = 0; r < rows; r += 4) {
      max0 = vmax(max0, vload(column + r * kWidth));
      max1 = vmax(max1, vload(column + (r + 1) * kWidth));
      max2 = vmax(max2, vload(column + (r + 2) * kWidth));
      max3 = vmax(max3, vload(column + (r + 3) * kWidth));
    }
    const vf old_peak = vload(peak + half * kLanes);
    const vf new_peak = vmax(old_peak, vmul(f, vmax(vmax(max0, max1), vmax(max2, max3))));
    const vf minus_peak = vsub(vzero(), new_peak);
    vf sum[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int r = 0; r < rows; r += 4) {
      vf w[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        w[i] = vexp2(vfma(vload(column + (r + i) * kWidth), f, minus_peak));
      }
      if (masked) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          w[i] = vwithin(w[i], vset(first_key + static_cast<float>(r + i)), first, last, vzero());
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[i] = vadd(sum[i], w[i]);
      store_b_pair(weights, r, half, w[0], w[1]);
      store_b_pair(weights, r + 2, half, w[2], w[3]);
    }
    const vf shrink = vexp2(vsub(old_peak, new_peak));
    const vf new_sum = vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3]));
    vstore(total + half * kLanes, vfma(vload(total + half * kLanes), shrink, new_sum));
    vstore(peak + half * kLanes, new_peak);
    if (!vall_one(shrink)) {
      for (int d = 0; d < o_rows; ++d) {
        float *x = o + d * kWidth + half * kLanes;
        vstore(x, vmul(vload(x), shrink));
      }
    }
  }
}

}  // namespace sg::cpu::SG_ISA
