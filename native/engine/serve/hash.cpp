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
    : v0_(key.low ^ 0x736f6d6570736575ull),
      v1_(key.high ^ 0x646f72616e646f6dull ^ 0xee),
      v2_(key.low ^ 0x6c7967656e657261ull),
      v3_(key.high ^ 0x7465646279746573ull) {}

void SipHash::round() {
  v0_ += v1_;
  v1_ = std::rotl(v1_, 13) ^ v0_;
  v0_ = std::rotl(v0_, 32);
  v2_ += v3_;
  v3_ = std::rotl(v3_, 16) ^ v2_;
  v0_ += v3_;
  v3_ = std::rotl(v3_, 21) ^ v0_;
  v2_ += v1_;
  v1_ = std::rotl(v1_, 17) ^ v2_;
  v2_ = std::rotl(v2_, 32);
}

void SipHash::compress(uint64_t word) {
  v3_ ^= word;
  round();
  round();
  v0_ ^= word;
}

void SipHash::update(const void *data, size_t size) {
  const unsigned char *bytes = static_cast<const unsigned char *>(data);
  const unsigned char *end = bytes + size;
  while (bytes != end && total_ % 8 != 0) {
    tail_ |= static_cast<uint64_t>(*bytes++) << (total_ % 8 * 8);
    if (++total_ % 8 == 0) {
      compress(tail_);
      tail_ = 0;
    }
  }
  for (; end - bytes >= 8; bytes += 8, total_ += 8) compress(word_at(bytes));
  for (; bytes != end; ++total_) tail_ |= static_cast<uint64_t>(*bytes++) << (total_ % 8 * 8);
}

void SipHash::update_number(uint64_t value) { update(&value, sizeof(value)); }

Hash128 SipHash::finish() {
  compress(tail_ | total_ << 56);
  v2_ ^= 0xee;
  for (int i = 0; i < 4; ++i) round();
  Hash128 hash;
  hash.low = v0_ ^ v1_ ^ v2_ ^ v3_;
  v1_ ^= 0xdd;
  for (int i = 0; i < 4; ++i) round();
  hash.high = v0_ ^ v1_ ^ v2_ ^ v3_;
  return hash;
}

}  // namespace surogate::serve
