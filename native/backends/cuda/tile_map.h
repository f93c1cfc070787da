// How the copy engine of compute capability 9.0 finds the tiles of a matrix in device memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernel.cuh"

namespace sg::cuda {

// Whether a matrix can be copied by tiles: dense rows at multiples of 16 bytes.
bool can_map_tiles(const sg_tensor *matrix);

// A map of a matrix of bf16 or f32, whose tiles are `rows` rows of 128 bytes (or 64, or 32) and lie in shared memory swizzled;
// see hopper.cuh. False where the driver refuses: operands that begin elsewhere than at a multiple of 16 bytes.
bool map_tiles(const sg_tensor *matrix, int rows, CUtensorMap *map, int tile_row_bytes = 128);

// A map of rows of heads of bf16 [rows, heads, dim], whose tiles are `rows` rows of `parts` neighbouring 64 elements and lie in
// shared memory as rows of 128 bytes, swizzled. False where the driver refuses.
bool map_heads(const sg_tensor *heads, int parts, int rows, CUtensorMap *map);

}  // namespace sg::cuda
