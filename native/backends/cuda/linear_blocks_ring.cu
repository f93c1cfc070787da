// linear for 1 to 8 tokens and a weight in blocks of Q4_K, Q5_K or Q6_K on compute capability 9.0:
// y[T, N] = alpha x[T, K] weight[N, K]^T + bias[N] + addend[T, N], x in bf16, y in bf16 or f32.
//
// Floor: the bytes of the blocks. A thread block takes 16 rows, 2048 elements of each at a time, which the copy engine brings
// to a ring of stages in shared memory with the same elements of x. Blocks that nothing writes are asked for before the
// kernels ahead have ended. Eight warps each take 256 elements of the 16 rows to mma.m16n8k16, whose columns are the tokens.
//
// No weight is decoded. A code q of up to six bits is the low end of the bf16 number 128 + q: bytes are only put apart.
// Of those that share a scale, products with x are added up in a fragment of their own, and with them what is to be taken
// off: sum(w x) = scale sum(q x) - minimum sum(x), where sum(x) too is a product, with ones. Scales are then applied to sums, in
// fp32: some three operations a weight. Terms stand in the order of the bytes, which x follows.
#include "hopper.cuh"
#include "linear_few.cuh"

namespace sg::cuda {
namespace {

constexpr int kRows = 16;          // of a tile
constexpr int kUnit = 256;         // elements that a warp takes at a time
constexpr int kUnits = kFewWarps;  // of a stage
constexpr int kStageElements = kUnits * kUnit;
constexpr int kRingThreads = kFewThreads + 32;
constexpr int kRingBlocks = 2;          // of a multiprocessor
constexpr int kRingShared = 112 << 10;  // bytes of a thread block
constexpr int kMostStages = 8;
constexpr int kTokenBytes = 2 * kStageElements + 64;  // from token to token of a stage's x: they meet different banks
using Partial = float[kFewWarps][kRows * kFewStride];
constexpr int kAround = sizeof(Partial) + 2 * kMostStages * 8;  // bytes beside the stages: and the barriers

struct BlocksProblem : FewProblem {
  const uint8_t *blocks;
  int64_t row_bytes;
  const bf16 *x;
  const void *addend;
  void *y;
  bool y_bf16, fixed;  // fixed: nothing writes the blocks while programs run
  int tiles, rounds, units, stages;
};

// kBytes: of a unit. kPitch: from row to row of a stage, so that the rows which a warp reads at a time meet different banks.
template <int32_t format>
struct Unit;

#if SG_HOPPER

// 2^23 + byte j of a word.
__device__ __forceinline__ float magic_of_byte(uint32_t word, int j) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u + j));
}
constexpr float kMagic = 8388608.0f;

constexpr uint32_t kOnes = 0x3f803f80u;

// Bytes 0 and 1, and 2 and 3, of a word as bf16 numbers 128 + byte, of bytes below 128.
__device__ __forceinline__ uint32_t low_codes(uint32_t bytes) { return __byte_perm(bytes, 0x43434343u, 0x4140); }
__device__ __forceinline__ uint32_t high_codes(uint32_t bytes) { return __byte_perm(bytes, 0x43434343u, 0x4342); }

// products += 16 terms of two rows, whose codes are bytes, times x.
__device__ __forceinline__ void add_codes(float (&products)[4], uint32_t low, uint32_t high, uint32_t x0, uint32_t x1) {
  multiply_fragments(products, {low_codes(low), low_codes(high), high_codes(low), high_codes(high)}, x0, x1);
}

#endif

// Half floats d and m, twelve bytes of eight scales and eight minimums of six bits, with `has_high` 32 bytes of a fifth bit
// of eight codes, 128 bytes of two codes of four bits: the low ones are 32 elements, the high ones the next 32.
template <bool has_high>
struct KUnit {
  static constexpr int kBytes = has_high ? 176 : 144, kPitch = kUnits * kBytes + 32;
  static_assert(kPitch % 128 == 32);

#if SG_HOPPER
  struct Scales {
    uint32_t scales[2], minimums[2];  // a byte each
    float d, m;

    __device__ explicit Scales(const uint8_t *row) {
      const uint4 head = *reinterpret_cast<const uint4 *>(row);
      scales[0] = head.y & 0x3f3f3f3fu, scales[1] = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
      minimums[0] = head.z & 0x3f3f3f3fu, minimums[1] = (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
      d = __half2float(__ushort_as_half(static_cast<unsigned short>(head.x)));
      m = __half2float(__ushort_as_half(static_cast<unsigned short>(head.x >> 16)));
    }
    __device__ float scale(int i) const { return fmaf(magic_of_byte(scales[i / 4], i % 4), d, -kMagic * d); }
    __device__ float minimum(int i) const { return fmaf(magic_of_byte(minimums[i / 4], i % 4), m, -kMagic * m); }
  };
  // This lane's bytes of a row: `first` of each 32.
  __device__ static uint2 bytes_at(const uint8_t *row, int first) {
    return *reinterpret_cast<const uint2 *>(row + first + 8 * (lane_index() % 4));
  }
  // Codes of elements 32 i .. 32 i + 31, a byte each.
  __device__ static uint32_t codes(uint32_t low, uint32_t high, int i) {
    const uint32_t four = (i % 2 == 0 ? low : low >> 4) & 0x0f0f0f0fu;
    if constexpr (!has_high) return four;
    return four | ((i <= 4 ? high << (4 - i) : high >> (i - 4)) & 0x10101010u);
  }

  // sums += rows `low` and `high` times the tokens. x: of this lane's token.
  __device__ static __forceinline__ void add(const uint8_t *low, const uint8_t *high, const uint8_t *x, float (&sums)[4]) {
    const Scales of_low(low), of_high(high);
    uint2 fifth[2] = {};
    if constexpr (has_high) fifth[0] = bytes_at(low, 16), fifth[1] = bytes_at(high, 16);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint2 a = bytes_at(low, kBytes - 128 + 32 * pair), b = bytes_at(high, kBytes - 128 + 32 * pair);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * pair + half;
        const uint4 c = *reinterpret_cast<const uint4 *>(x + 2 * (32 * i + 8 * (lane_index() % 4)));
        float products[4] = {}, all[4] = {};
        add_codes(products, codes(a.x, fifth[0].x, i), codes(b.x, fifth[1].x, i), c.x, c.y);
        multiply_fragments(all, {kOnes, kOnes, kOnes, kOnes}, c.x, c.y);
        add_codes(products, codes(a.y, fifth[0].y, i), codes(b.y, fifth[1].y, i), c.z, c.w);
        multiply_fragments(all, {kOnes, kOnes, kOnes, kOnes}, c.z, c.w);
        const float scales[2] = {of_low.scale(i), of_high.scale(i)};
        const float off[2] = {fmaf(128.0f, scales[0], of_low.minimum(i)), fmaf(128.0f, scales[1], of_high.minimum(i))};
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] = fmaf(scales[j / 2], products[j], fmaf(-off[j / 2], all[j % 2], sums[j]));
      }
    }
  }
#endif
};
template <>
struct Unit<SG_Q4_K> : KUnit<false> {};
template <>
struct Unit<SG_Q5_K> : KUnit<true> {};

// 128 bytes of two low codes of four bits, 64 of four high ones of two, 16 signed scales, a half float d: of each half of the
// elements 64, 32 and 8. A unit lies at a multiple of two bytes.
template <>
struct Unit<SG_Q6_K> {
  static constexpr int kBytes = 210, kPitch = kUnits * kBytes;
  static_assert(kPitch % 128 == 16);

#if SG_HOPPER
  // odd: at no multiple of four.
  template <bool odd>
  __device__ static __forceinline__ uint32_t word(const uint8_t *at) {
    if constexpr (!odd) return *reinterpret_cast<const uint32_t *>(at);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(at - 2);
    return __byte_perm(words[0], words[1], 0x5432);
  }
  __device__ static __forceinline__ uint32_t codes(uint32_t low, uint32_t high) {
    return (low & 0x0f0f0f0fu) | (high & 0x30303030u);
  }

  __device__ static __forceinline__ void add(const uint8_t *low, const uint8_t *high, const uint8_t *x, float (&sums)[4]) {
    (reinterpret_cast<uintptr_t>(low) & 2) != 0 ? add_unit<true>(low, high, x, sums) : add_unit<false>(low, high, x, sums);
  }
  template <bool odd>
  __device__ static __forceinline__ void add_unit(const uint8_t *low, const uint8_t *high, const uint8_t *x,
                                                  float (&sums)[4]) {
    const int part = lane_index() % 4;
    const uint8_t *const rows[2] = {low, high};
    float of_unit[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t scales[2][2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[r][i] = word<odd>(rows[r] + 192 + 8 * half + 4 * i) ^ 0x80808080u;
      }
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        uint32_t bytes[4][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint8_t *const at = rows[r] + 16 * group + 4 * part;
          const uint32_t first = word<odd>(at + 64 * half), second = word<odd>(at + 64 * half + 32);
          const uint32_t top = word<odd>(at + 128 + 32 * half);
          bytes[0][r] = codes(first, top << 4), bytes[1][r] = codes(second, top << 2);
          bytes[2][r] = codes(first >> 4, top), bytes[3][r] = codes(second >> 4, top >> 2);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          constexpr uint32_t kOff = 0xc320c320u;  // -160: 128, and the 32 that codes are above
          const uint2 c = *reinterpret_cast<const uint2 *>(x + 2 * (128 * half + 32 * q + 16 * group + 4 * part));
          float products[4] = {};
          add_codes(products, bytes[q][0], bytes[q][1], c.x, c.y);
          multiply_fragments(products, {kOff, kOff, kOff, kOff}, c.x, c.y);
          const int i = 2 * q + group;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float scale = magic_of_byte(scales[j / 2][i / 4], i % 4) - (kMagic + 128.0f);
            of_unit[j] = fmaf(scale, products[j], of_unit[j]);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float d = __half2float(*reinterpret_cast<const __half *>(rows[j / 2] + 208));
      sums[j] = fmaf(d, of_unit[j], sums[j]);
    }
  }
#endif
};

template <int32_t format>
constexpr int stage_bytes(int tokens) {
  return kRows * Unit<format>::kPitch + tokens * kTokenBytes;
}
template <int32_t format>
constexpr int most_stages(int tokens) {
  return std::min(kMostStages, (kRingShared - kAround) / stage_bytes<format>(tokens));
}
static_assert(most_stages<SG_Q6_K>(kFewTokens) >= 1);

#if SG_HOPPER

template <int32_t format>
struct BlocksRing {
  using U = Unit<format>;
  const BlocksProblem &p;
  unsigned char *stages;
  uint32_t full, empty;
  Partial &partial;
  int bytes;  // of a stage

  __device__ BlocksRing(const BlocksProblem &problem, unsigned char *shared)
      : p(problem),
        stages(shared),
        partial(*reinterpret_cast<Partial *>(shared + problem.stages * stage_bytes<format>(problem.tokens))),
        bytes(stage_bytes<format>(problem.tokens)) {
    full = shared_address(&partial + 1);
    empty = full + 8 * kMostStages;
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, kFewThreads);
      }
      barriers_are_there();
    }
    __syncthreads();
  }

  // Where the block stands: which of its tiles, which elements of it, and in which stage they lie.
  struct Place {
    int tile = static_cast<int>(blockIdx.x), round = 0, stage = 0;
    uint32_t parity = 0;

    __device__ void next(const BlocksProblem &p) {
      if (++round == p.rounds) round = 0, tile += static_cast<int>(gridDim.x);
      if (++stage == p.stages) stage = 0, parity ^= 1;
    }
    __device__ int units(const BlocksProblem &p) const { return min(p.units - round * kUnits, kUnits); }
  };

  // By one warp: a row a lane.
  __device__ void ask_for_blocks(const Place &at) const {
    const int lane = lane_index(), units = at.units(p);
    const uint32_t barrier = full + 8 * at.stage, row = static_cast<uint32_t>(units * U::kBytes);
    if (lane == 0) barrier_expect(barrier, kRows * row + p.tokens * units * kUnit * 2);
    __syncwarp();
    if (lane >= kRows) return;
    const int64_t from = min(static_cast<int64_t>(at.tile) * kRows + lane, p.n - 1);
    copy_bytes(shared_address(stages) + at.stage * bytes + lane * U::kPitch,
               p.blocks + from * p.row_bytes + at.round * (kUnits * U::kBytes), row, barrier);
  }
  __device__ void ask_for_terms(const Place &at) const {
    const int token = lane_index();
    if (token >= p.tokens) return;
    copy_bytes(shared_address(stages) + at.stage * bytes + kRows * U::kPitch + token * kTokenBytes,
               p.x + token * p.x_stride + at.round * kStageElements, at.units(p) * kUnit * 2, full + 8 * at.stage);
  }
  __device__ void fill() const {
    Place at, behind;
    const int ahead = p.stages;
    int asked = 0;
    for (; p.fixed && asked < ahead && at.tile < p.tiles; ++asked, at.next(p)) ask_for_blocks(at);
    wait_for_kernels_ahead();
    for (int i = 0; i < asked; ++i, behind.next(p)) ask_for_terms(behind);
    for (; at.tile < p.tiles; at.next(p)) {
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      ask_for_blocks(at);
      ask_for_terms(at);
    }
  }

  __device__ void make_tiles() const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index(), group = lane / 4;
    const int row = group * U::kPitch + warp * U::kBytes;
    const int terms = kRows * U::kPitch + min(group, p.tokens - 1) * kTokenBytes + warp * kUnit * 2;
    Place at;
    wait_for_kernels_ahead();
    for (bool first = true; at.tile < p.tiles; first = false) {
      const int64_t tile = at.tile;
      float sums[4] = {};
      for (int round = 0; round < p.rounds; ++round, at.next(p)) {
        barrier_wait(full + 8 * at.stage, at.parity);
        const unsigned char *const stage = stages + at.stage * bytes;
        if (warp < at.units(p)) U::add(stage + row, stage + row + 8 * U::kPitch, stage + terms, sums);
        barrier_arrive(empty + 8 * at.stage);
      }
      if (!first) sync_warps<1, kFewThreads>();  // the tile before has been stored
#pragma unroll
      for (int i = 0; i < 4; ++i) partial[warp][(group + 8 * (i / 2)) * kFewStride + 2 * (lane % 4) + i % 2] = sums[i];
      sync_warps<1, kFewThreads>();
      if (p.y_bf16) {
        finish_few<kRows>(p, tile * kRows, 0, partial, static_cast<const bf16 *>(p.addend), static_cast<bf16 *>(p.y));
      } else {
        finish_few<kRows>(p, tile * kRows, 0, partial, static_cast<const float *>(p.addend), static_cast<float *>(p.y));
      }
    }
  }
};

#endif  // SG_HOPPER

template <int32_t format>
__global__ void __launch_bounds__(kRingThreads, kRingBlocks) linear_blocks_ring(const BlocksProblem p) {
#if SG_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const BlocksRing<format> ring(p, shared);
  if (threadIdx.x >= kFewThreads) {
    ring.fill();
    return;
  }
  ring.make_tiles();
#endif
}

// body(std::integral_constant<int32_t, format>{}); false for a format that the kernel does not read.
template <class Body>
bool with_unit_format(int32_t dtype, Body &&body) {
  if (dtype == SG_Q4_K) return body(std::integral_constant<int32_t, SG_Q4_K>{}), true;
  if (dtype == SG_Q5_K) return body(std::integral_constant<int32_t, SG_Q5_K>{}), true;
  if (dtype == SG_Q6_K) return body(std::integral_constant<int32_t, SG_Q6_K>{}), true;
  return false;
}

[[maybe_unused]] int32_t supports(const sg_call *call) {
  FewProblem p;
  if (device().architecture != 90 || !read_few(call, &p) || p.tokens < 1 || p.tokens > kFewTokens || p.n < 1) return 0;
  const sg_tensor *weight = input(call, 1);
  if (p.k % kUnit != 0 || (p.tokens > 1 && p.x_stride % 8 != 0) || !is_dense(weight)) return 0;
  bool copied = false;  // the rows of a stage by multiples of 16 bytes
  with_unit_format(weight->dtype, [&](auto which) { copied = p.k / kUnit % kUnits * Unit<which>::kBytes % 16 == 0; });
  return copied ? 35 : 0;
}

[[maybe_unused]] int32_t run(const sg_call *call) {
  BlocksProblem p{};
  if (!read_few(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const sg_tensor *weight = input(call, 1), *y = output(call, 0);
  p.blocks = data<const uint8_t>(weight);
  p.x = data<const bf16>(input(call, 0));
  p.addend = input(call, 3) == nullptr ? nullptr : input(call, 3)->data;
  p.y = y->data;
  p.y_bf16 = y->dtype == SG_BF16;
  p.fixed = is_fixed(weight);
  if ((reinterpret_cast<uintptr_t>(p.blocks) | reinterpret_cast<uintptr_t>(p.x)) % 16 != 0) {
    return fail(call, "%s: x and the weight begin at multiples of 16 bytes for this kernel", call->op);
  }
  p.tiles = static_cast<int>(ceil_div(p.n, kRows));
  p.units = static_cast<int>(p.k / kUnit);
  p.rounds = static_cast<int>(ceil_div(p.units, kUnits));
  with_unit_format(weight->dtype, [&](auto which) {
    constexpr int32_t format = decltype(which)::value;
    p.row_bytes = static_cast<int64_t>(p.units) * Unit<format>::kBytes;
    const int blocks = std::min(p.tiles, kRingBlocks * static_cast<int>(device().units));
    p.stages = static_cast<int>(std::min<int64_t>(ceil_div(p.tiles, blocks) * p.rounds, most_stages<format>(p.tokens)));
    const int bytes = p.stages * stage_bytes<format>(p.tokens) + kAround;
    const auto kernel = linear_blocks_ring<format>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    launch_ahead(call, static_cast<unsigned>(blocks), kRingThreads, static_cast<size_t>(bytes), kernel, p);
  });
  return launched(call);
}

#ifdef SUROGATE_HOPPER
constexpr sg_kernel kernel = describe_kernel("linear", "blocks_ring", 3, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);
#endif

}  // namespace
}  // namespace sg::cuda
