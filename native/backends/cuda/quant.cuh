// Device decoders of GGUF's block formats, bit-equal to the CPU's (native/backends/cpu/quant.h has the layouts).
//
// A thread decodes a *part*: 16 elements of a block, handed out as two runs of eight that are each one 16-byte pack
// of bf16. Parts are numbered so that neighbouring threads read neighbouring codes and write neighbouring packs: the
// loads of a warp fall into a few hundred bytes that the first-level cache serves, every byte of memory is fetched
// once, and there is no shared memory to wait for. A byte becomes a float by being put into the mantissa of 2^23,
// which is exact and costs one permute and one subtraction, and codes are taken apart four at a time. For .cu files
// only.
#pragma once

#include "kernel.cuh"

namespace sg::cuda {

// `fast`: the block lies at a multiple of the format's kAlignment. Otherwise bytes are read one by one.
template <bool fast>
__device__ inline uint32_t load_u16(const uint8_t *p) {
  if constexpr (fast) return __ldg(reinterpret_cast<const uint16_t *>(p));
  return __ldg(p) | static_cast<uint32_t>(__ldg(p + 1)) << 8;
}
template <bool fast>
__device__ inline uint32_t load_u32(const uint8_t *p) {
  return load_u16<fast>(p) | load_u16<fast>(p + 2) << 16;
}
template <bool fast>
__device__ inline float load_half(const uint8_t *p) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(load_u16<fast>(p))));
}
// Eight codes, one a byte.
template <bool fast, int alignment>
__device__ inline uint2 load_codes(const uint8_t *p) {
  if constexpr (fast && alignment == 8) return __ldg(reinterpret_cast<const uint2 *>(p));
  if constexpr (fast && alignment == 4) {
    const uint32_t *words = reinterpret_cast<const uint32_t *>(p);
    return {__ldg(words), __ldg(words + 1)};
  }
  return {load_u32<fast>(p), load_u32<fast>(p + 4)};
}

__device__ inline uint2 low_nibbles(uint2 codes) { return {codes.x & 0x0f0f0f0fu, codes.y & 0x0f0f0f0fu}; }
__device__ inline uint2 high_nibbles(uint2 codes) { return low_nibbles({codes.x >> 4, codes.y >> 4}); }

// The bits [shift, shift + count of mask's bits) of each byte, put at bit 4 of the codes.
__device__ inline uint2 add_high(uint2 codes, uint2 bytes, int shift, uint32_t mask) {
  return {codes.x | (bytes.x >> shift & mask) << 4, codes.y | (bytes.y >> shift & mask) << 4};
}
// Bit i of `bits` becomes bit 0 of byte i, of eight. The copies of the four bits in the product don't overlap.
__device__ inline uint2 spread_bits(uint32_t bits) {
  return {(bits & 15u) * 0x00204081u & 0x01010101u, (bits >> 4 & 15u) * 0x00204081u & 0x01010101u};
}

// The eight codes minus `offset`, exactly.
__device__ inline void to_floats(uint2 codes, int offset, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = __byte_perm(i < 4 ? codes.x : codes.y, 0x4b000000u, 0x7540u + i % 4);
    values[i] = __uint_as_float(bits) - static_cast<float>(8388608 + offset);
  }
}
__device__ inline void affine(uint2 codes, float scale, float base, float (&values)[8]) {
  to_floats(codes, 0, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = fmaf(values[i], scale, base);
}
__device__ inline void scaled(uint2 codes, int offset, float scale, float (&values)[8]) {
  to_floats(codes, offset, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] *= scale;
}

// Decoder<dtype>::decode<fast>(block, part, put) calls put(offset, values) twice, with the values of the elements
// [offset, offset + 8) of the block; 0 <= part < kElements / 16. Offsets are multiples of 8.
template <int32_t dtype>
struct Decoder;

template <int bytes, bool has_minimum, bool has_high, int offset, int alignment>
struct NibbleDecoder {
  static constexpr int kElements = 32, kBytes = bytes, kAlignment = alignment;
  template <bool fast, class Put>
  static __device__ void decode(const uint8_t *block, int part, Put &&put) {
    const uint8_t *high = block + (has_minimum ? 4 : 2);
    const uint2 codes = load_codes<fast, kAlignment>(high + (has_high ? 4 : 0) + 8 * part);
    const float scale = load_half<fast>(block);
    const float base = has_minimum ? load_half<fast>(block + 2) : -scale * offset;
    uint2 low = low_nibbles(codes), up = high_nibbles(codes);
    if constexpr (has_high) {
      const uint32_t bits = load_u32<fast>(high) >> 8 * part;
      low = add_high(low, spread_bits(bits), 0, 0x01010101u);
      up = add_high(up, spread_bits(bits >> 16), 0, 0x01010101u);
    }
    float values[8];
    affine(low, scale, base, values);
    put(8 * part, values);
    affine(up, scale, base, values);
    put(16 + 8 * part, values);
  }
};
template <>
struct Decoder<SG_Q4_0> : NibbleDecoder<18, false, false, 8, 2> {};
template <>
struct Decoder<SG_Q4_1> : NibbleDecoder<20, true, false, 0, 4> {};
template <>
struct Decoder<SG_Q5_0> : NibbleDecoder<22, false, true, 16, 2> {};
template <>
struct Decoder<SG_Q5_1> : NibbleDecoder<24, true, true, 0, 8> {};

template <>
struct Decoder<SG_Q8_0> {
  static constexpr int kElements = 32, kBytes = 34, kAlignment = 2;
  template <bool fast, class Put>
  static __device__ void decode(const uint8_t *block, int part, Put &&put) {
    const uint8_t *at = block + 2 + 16 * part;
    uint2 first = load_codes<fast, kAlignment>(at), second = load_codes<fast, kAlignment>(at + 8);
    const float scale = load_half<fast>(block);
    // A signed byte with its sign bit turned is the byte plus 128.
    first.x ^= 0x80808080u, first.y ^= 0x80808080u, second.x ^= 0x80808080u, second.y ^= 0x80808080u;
    float values[8];
    scaled(first, 128, scale, values);
    put(16 * part, values);
    scaled(second, 128, scale, values);
    put(16 * part + 8, values);
  }
};

template <bool has_high>
struct KDecoder {
  static constexpr int kElements = 256, kBytes = has_high ? 176 : 144, kAlignment = 8;
  template <bool fast, class Put>
  static __device__ void decode(const uint8_t *block, int part, Put &&put) {
    const int pair = part / 4, at = 8 * (part % 4);  // of two sub-blocks; bytes within it
    const uint2 codes = load_codes<fast, kAlignment>(block + (has_high ? 48 : 16) + 32 * pair + at);
    const float d = load_half<fast>(block), m = load_half<fast>(block + 2);
    // Two six-bit scales and two minimums, a byte each: bytes j and j + 4 of the twelve for sub-block j < 4, and for
    // j >= 4 the nibbles of byte j + 4 below the top bits of bytes j - 4 and j.
    const uint8_t *packed = block + 4 + 2 * (pair % 2);
    const uint32_t first = load_u16<fast>(packed), second = load_u16<fast>(packed + 4);
    const uint32_t third = load_u16<fast>(packed + 8);
    const uint32_t scales = pair < 2 ? first & 0x3f3fu : (third & 0x0f0fu) | (first >> 2 & 0x3030u);
    const uint32_t minimums = pair < 2 ? second & 0x3f3fu : (third >> 4 & 0x0f0fu) | (second >> 2 & 0x3030u);
    uint2 low = low_nibbles(codes), up = high_nibbles(codes);
    if constexpr (has_high) {
      const uint2 bytes = load_codes<fast, kAlignment>(block + 16 + at);
      low = add_high(low, bytes, 2 * pair, 0x01010101u);
      up = add_high(up, bytes, 2 * pair + 1, 0x01010101u);
    }
    float values[8];
    affine(low, d * static_cast<float>(scales & 255u), -m * static_cast<float>(minimums & 255u), values);
    put(64 * pair + at, values);
    affine(up, d * static_cast<float>(scales >> 8), -m * static_cast<float>(minimums >> 8), values);
    put(64 * pair + 32 + at, values);
  }
};
template <>
struct Decoder<SG_Q4_K> : KDecoder<false> {};
template <>
struct Decoder<SG_Q5_K> : KDecoder<true> {};

template <>
struct Decoder<SG_Q6_K> {
  static constexpr int kElements = 256, kBytes = 210, kAlignment = 2;
  template <bool fast, class Put>
  static __device__ void decode(const uint8_t *block, int part, Put &&put) {
    // Groups `group` and group + 2 of a half share their bytes of nibbles; all four groups share those of pairs.
    const int half = part / 8, group = part / 4 % 2, at = 8 * (part % 4);
    const uint2 codes = load_codes<fast, kAlignment>(block + 64 * half + 32 * group + at);
    const uint2 pairs = load_codes<fast, kAlignment>(block + 128 + 32 * half + at);
    const uint8_t *scales = block + 192 + 8 * half + 2 * group + at / 16;
    const float d = load_half<fast>(block + 208);
    const float first = d * static_cast<float>(static_cast<int8_t>(__ldg(scales)));
    const float second = d * static_cast<float>(static_cast<int8_t>(__ldg(scales + 4)));
    float values[8];
    scaled(add_high(low_nibbles(codes), pairs, 2 * group, 0x03030303u), 32, first, values);
    put(128 * half + 32 * group + at, values);
    scaled(add_high(high_nibbles(codes), pairs, 2 * group + 4, 0x03030303u), 32, second, values);
    put(128 * half + 32 * group + 64 + at, values);
  }
};

// Calls use(std::integral_constant<int32_t, dtype>) with a quantised dtype; false when it isn't one.
template <class Use>
inline bool with_format(int32_t dtype, Use &&use) {
  switch (dtype) {
    case SG_Q4_0: use(std::integral_constant<int32_t, SG_Q4_0>{}); return true;
    case SG_Q4_1: use(std::integral_constant<int32_t, SG_Q4_1>{}); return true;
    case SG_Q5_0: use(std::integral_constant<int32_t, SG_Q5_0>{}); return true;
    case SG_Q5_1: use(std::integral_constant<int32_t, SG_Q5_1>{}); return true;
    case SG_Q8_0: use(std::integral_constant<int32_t, SG_Q8_0>{}); return true;
    case SG_Q4_K: use(std::integral_constant<int32_t, SG_Q4_K>{}); return true;
    case SG_Q5_K: use(std::integral_constant<int32_t, SG_Q5_K>{}); return true;
    case SG_Q6_K: use(std::integral_constant<int32_t, SG_Q6_K>{}); return true;
    default: return false;
  }
}

}  // namespace sg::cuda
