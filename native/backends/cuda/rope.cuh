// Rotary positions: angles from a table, and pairs turned by them in registers.
#pragma once

#include "prefetch.cuh"
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

// One thread of a block asks for what its tokens wait for first, their positions, and in the first blocks along the
// grid's first axis for `share` rows each of the table, where tokens need all of it.
__device__ inline void bring_angles(const int32_t *position, const float *table, int64_t table_rows, int half,
                                    int share) {
  bring_closer(position);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * share, left = table_rows - first;
  if (blockIdx.y != 0 || blockIdx.z != 0 || share == 0 || left <= 0) return;
  const int64_t rows = left < share ? left : share;
  bring_closer(table + first * half * 2, static_cast<uint32_t>(rows * half * 2 * sizeof(float)));
}

}  // namespace sg::cuda
