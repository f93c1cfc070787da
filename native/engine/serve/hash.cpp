#include "serve/hash.h"

#include <bit>
#include <cstring>
#include <string>

namespace surogate::serve {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

uint64_t word_at(const unsigned char *bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

}  // namespace

HashKey HashKey::from(std::span<const unsigned char> bytes) {
  if (bytes.size() != 16) {
    throw Error("the key of the block hash has " + std::to_string(bytes.size()) + " bytes, not 16");
  }
  return {word_at(bytes.data()), word_at(bytes.data() + 8)};
}

// The constants spell "somepseudorandomlygeneratedbytes". 0xee is what the form with 128 bits of output adds.
SipHash::SipHash(HashKey key)
    : state_{key.low ^ 0x736f6d6570736575ull, key.high ^ 0x646f72616e646f6dull ^ 0xee, key.low ^ 0x6c7967656e657261ull,
             key.high ^ 0x7465646279746573ull} {}

inline void SipHash::State::round() {
  v0 += v1;
  v1 = std::rotl(v1, 13) ^ v0;
  v0 = std::rotl(v0, 32);
  v2 += v3;
  v3 = std::rotl(v3, 16) ^ v2;
  v0 += v3;
  v3 = std::rotl(v3, 21) ^ v0;
  v2 += v1;
  v1 = std::rotl(v1, 17) ^ v2;
  v2 = std::rotl(v2, 32);
}

inline void SipHash::State::compress(uint64_t word) {
  v3 ^= word;
  round();
  round();
  v0 ^= word;
}

void SipHash::update(const void *data, size_t size) {
  const unsigned char *bytes = static_cast<const unsigned char *>(data);
  const unsigned char *end = bytes + size;
  State state = state_;  // in registers
  while (bytes != end && total_ % 8 != 0) {
    tail_ |= static_cast<uint64_t>(*bytes++) << (total_ % 8 * 8);
    if (++total_ % 8 == 0) {
      state.compress(tail_);
      tail_ = 0;
    }
  }
  for (; end - bytes >= 8; bytes += 8, total_ += 8) state.compress(word_at(bytes));
  for (; bytes != end; ++total_) tail_ |= static_cast<uint64_t>(*bytes++) << (total_ % 8 * 8);
  state_ = state;
}

void SipHash::update_number(uint64_t value) { update(&value, sizeof(value)); }

Hash128 SipHash::finish() const {
  State state = state_;
  state.compress(tail_ | total_ << 56);
  state.v2 ^= 0xee;
  for (int i = 0; i < 4; ++i) state.round();
  Hash128 hash;
  hash.low = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  state.v1 ^= 0xdd;
  for (int i = 0; i < 4; ++i) state.round();
  hash.high = state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
  return hash;
}

}  // namespace surogate::serve
