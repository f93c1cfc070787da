// Rotary positions: angles from a table, and pairs turned by them in registers.
#pragma once

#include "vectors.cuh"

namespace sg::cuda {

// V pairs of a head, as two packs: (i, i + half) take one from each, (2i, 2i + 1) two of one.
template <int V, bool interleaved>
__device__ inline void turn(const float (&cos)[V], const float (&sin)[V], float (&a)[V], float (&b)[V]) {
  float out_a[V], out_b[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    // Pair i: elements 2i and 2i + 1 of a and b laid end to end, or element i of each.
    const int left = interleaved ? 2 * i : i, right = interleaved ? 2 * i + 1 : V + i;
    const float first = left < V ? a[left % V] : b[left % V], second = right < V ? a[right % V] : b[right % V];
    const float turned_first = fmaf(-second, sin[i], first * cos[i]);
    const float turned_second = fmaf(first, sin[i], second * cos[i]);
    (left < V ? out_a : out_b)[left % V] = turned_first;
    (right < V ? out_a : out_b)[right % V] = turned_second;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    a[i] = out_a[i];
    b[i] = out_b[i];
  }
}

// Cosines and sines of pairs [pair, pair + V) at a position of table[table_rows, half, 2]; NaN for one outside of it.
template <int V>
__device__ inline void load_angles(const float *table, int64_t table_rows, int half, int32_t position, int pair,
                                   float sign, float (&cos)[V], float (&sin)[V]) {
  float words[2][V];
  const bool inside = position >= 0 && position < table_rows;
  if (inside) {
    const float *from = table + (static_cast<int64_t>(position) * half + pair) * 2;
    load<V>(from, words[0]);
    load<V>(from + V, words[1]);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int at = 2 * i;
    cos[i] = inside ? words[at / V][at % V] : __int_as_float(0x7fffffff);
    sin[i] = sign * (inside ? words[(at + 1) / V][(at + 1) % V] : 0.0f);
  }
}

}  // namespace sg::cuda
