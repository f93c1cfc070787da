// The keyed hash that names cached blocks: SipHash-2-4 with 128 bits of output.
//
// Keyed, because who asks chooses the tokens: without the key nobody can look for two prompts that collide, nor crowd
// one place of the table. 128 bits, so that tokens need not be kept and compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "error.h"

namespace surogate::serve {

struct Hash128 {
  uint64_t low = 0, high = 0;
  friend bool operator==(const Hash128 &, const Hash128 &) = default;
};

struct HashKey {
  uint64_t low = 0, high = 0;

  // Little-endian. Throws where it is not 16 bytes.
  SUROGATE_API static HashKey from(std::span<const unsigned char> bytes);
};

// Fed in any number of parts; the parts' borders do not matter.
class SUROGATE_API SipHash {
 public:
  explicit SipHash(HashKey key);
  void update(const void *data, size_t size);
  void update_number(uint64_t value);  // eight bytes, little-endian
  Hash128 finish() const;

 private:
  struct State {
    uint64_t v0, v1, v2, v3;
    void round();
    void compress(uint64_t word);
  };

  State state_;
  uint64_t tail_ = 0;   // bytes that do not fill a word yet
  uint64_t total_ = 0;  // bytes so far
};

}  // namespace surogate::serve
