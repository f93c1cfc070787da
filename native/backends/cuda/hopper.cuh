// The instructions of compute capability 9.0 that products through a ring of shared memory are made of: barriers that
// count bytes, copies of tiles by the copy engine, and products of a warpgroup.
//
// Tiles lie in shared memory as SWIZZLE_128B has them: rows of 128 bytes, eight rows to 1024 bytes, to which a tile is
// aligned; the 16 bytes that are number j of row r are at number j ^ (r % 8).
#pragma once

#include <cstdint>

#include "attention_ptx.cuh"

namespace sg::cuda {

constexpr int kWarpgroup = 128;  // threads
constexpr int kSwizzledRow = 128;  // bytes

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SG_HOPPER 1
#else
#define SG_HOPPER 0
#endif

__device__ inline uint32_t swizzled(int row, int unit) {
  return static_cast<uint32_t>(row * kSwizzledRow + ((unit ^ (row % 8)) << 4));
}

#if SG_HOPPER

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init, before the block's own barrier: the copy engine sees them.
__device__ inline void barriers_are_there() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and as many bytes to come.
__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// One arrival, when all copies that this thread began (copy_async_16) are there.
__device__ inline void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of this parity is over; phases are 0, 1, 0, ...
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A place in a ring of `stages`, and the parity of the phase in which its barrier says that it is full.
template <int stages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ void skip(int count) {
    stage += count;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
};

// The tile of a map from column `x` of row `y` on; what lies outside of the operand becomes zeros. The barrier counts all
// of its bytes.
__device__ inline void copy_tile(uint32_t to, const void *map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// The same of a map of map_heads: from part `x` of row `y` on.
__device__ inline void copy_box(uint32_t to, const void *map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "n"(0), "r"(x), "r"(y)
      : "memory");
}
// Neighbouring bytes, a multiple of 16 at such a multiple.
__device__ inline void copy_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
// A tile to the second-level cache.
__device__ inline void bring_tile_closer(const void *map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}
__device__ inline void bring_map_closer(const void *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// What this thread has stored in shared memory is seen by what the copy engine and the tensor cores do later.
__device__ inline void stores_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before products, of registers or after others; after the last of some; and until all of them are done.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Until all but those behind the last `pending` commits are done.
template <int pending>
__device__ inline void products_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Registers that each thread of the warpgroup has from here on; a multiple of 8.
template <int count>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// Products of two pairs of bf16, each rounded once.
__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// A swizzled tile in shared memory, as products name it, from 16-bit column 0 on; 16 columns further it is two more.
__device__ inline uint64_t tile_descriptor(uint32_t address) {
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32, kUnused = uint64_t{1} << 16, kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | kEightRows | kUnused | ((address & 0x3ffff) >> 4);
}

// sums[64 x N] += a[64 x 16] b[N x 16]^T in bf16, N twice as many as a thread has sums. A warp has 16 rows; a thread has of
// rows lane / 4 and that + 8, columns 8 j + 2 (lane % 4) and the next: sums[4 j], [4 j + 1], and [4 j + 2], [4 j + 3].
// turned_a, turned_b: what lies as rows of 64, or of N, for each of the 16 terms.
template <int turned_a = 0, int turned_b = 0>
__device__ inline void multiply_tiles(float (&d)[4], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3"
      "}, %4, %5, add, 1, 1, %6, %7;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "n"(turned_a), "n"(turned_b));
}
template <int turned_a = 0, int turned_b = 0>
__device__ inline void multiply_tiles(float (&d)[8], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, add, 1, 1, %10, %11;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "n"(turned_a), "n"(turned_b));
}
template <int turned_a = 0, int turned_b = 0>
__device__ inline void multiply_tiles(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, add, 1, 1, %18, %19;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "n"(turned_a), "n"(turned_b));
}
template <int turned_a = 0, int turned_b = 0>
__device__ inline void multiply_tiles(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1, %34, %35;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "n"(turned_a), "n"(turned_b));
}

// Sums of 64 rows and 64 or 128 columns as operands of a product.
#define SG_SUMS_64(d) \
  "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), \
  "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), \
  "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), \
  "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
#define SG_SUMS_128(d) \
  SG_SUMS_64(d), \
  "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), \
  "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), \
  "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), \
  "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), \
  "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), \
  "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), \
  "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])

// multiply_tiles, where the sums so far count only if `add`.
template <int turned_a = 0, int turned_b = 0>
__device__ inline void multiply_first(float (&d)[8][4], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %34, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1, %35, %36;\n\t}"
      : SG_SUMS_64(d)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(turned_a), "n"(turned_b));
}
template <int turned_a = 0, int turned_b = 0>
__device__ inline void multiply_first(float (&d)[16][4], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, %67, %68;\n\t}"
      : SG_SUMS_128(d)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(turned_a), "n"(turned_b));
}

// And a from registers, as multiply_transposed has it.
__device__ inline void multiply_first(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %37, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n\t}"
      : SG_SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// A tile of which rows of 64 columns are 128 bytes, as products name it that take its columns as rows: of eight rows each
// 1024 bytes, and the next 64 columns `part` bytes further. 16 rows further it is 128 more.
__device__ inline uint64_t transposed_descriptor(uint32_t address, uint32_t part) {
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32, kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | kEightRows | uint64_t{part >> 4} << 16 | ((address & 0x3ffff) >> 4);
}

// The same of one part whose rows have 32, 64 or 128 bytes, swizzled within themselves: 16 rows further it is as many more.
template <int bytes>
__device__ inline uint64_t narrow_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = bytes == 128 ? 1 : bytes == 64 ? 2 : 3, kEightRows = 8 * bytes >> 4;
  return kSwizzle << 62 | kEightRows << 32 | uint64_t{1} << 16 | ((address & 0x3ffff) >> 4);
}

// What products take columns of as rows, not swizzled: eight columns of eight rows are 128 bytes, 16 of each row; the next eight
// columns are `columns` bytes further, the next eight rows `rows`.
__device__ inline uint64_t plain_descriptor(uint32_t address, uint32_t columns, uint32_t rows) {
  return uint64_t{columns >> 4} << 32 | uint64_t{rows >> 4} << 16 | ((address & 0x3ffff) >> 4);
}

// sums[64 x N] += a[64 x 16] b[16 x N] in bf16, N 64 or 128. A thread has of a: row lane / 4, columns 2 (lane % 4) and the
// next; the row 8 further; the same of columns 8 further.
__device__ inline void multiply_transposed(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n\t}"
      : SG_SUMS_64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void multiply_transposed(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n\t}"
      : SG_SUMS_128(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef SG_SUMS_64
#undef SG_SUMS_128

#endif  // SG_HOPPER

}  // namespace sg::cuda
