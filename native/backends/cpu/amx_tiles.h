// How the tile registers of AMX are divided while a TileSession lives.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>

namespace sg::cpu::SG_ISA {

// Of each register: bytes of a row, and rows. All eight are 16 rows of 64 bytes where nothing else is said.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);

// Tile registers belong to the thread; unused they are released, which keeps its context switches short.
class TileSession {
 public:
  explicit TileSession(const TileShapes &shapes = {}) {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler is not told that all of it is read
    _tile_loadconfig(&shapes);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession &) = delete;
  TileSession &operator=(const TileSession &) = delete;
};

}  // namespace sg::cpu::SG_ISA
