// A copy of a few results to the host that is under way while the device goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "queue.h"

namespace surogate::serve {

class SUROGATE_API Readback {
 public:
  struct Part {
    const void *from;  // memory of the queue's device
    uint64_t bytes;
  };

  // capacity: bytes of all parts together, each rounded up to 64.
  Readback(std::shared_ptr<Queue> queue, uint64_t capacity);
  ~Readback();
  Readback(const Readback &) = delete;
  Readback &operator=(const Readback &) = delete;

  // Copies the parts, behind all that was put on the queue so far. On the host the copy is made at once. The caller does
  // not hold the queue's mutex. Throws Error.
  void begin(std::span<const Part> parts);
  // Waits for that copy, not for what came after it. Throws what the device reports.
  void wait();

  // Part `index` of the last `begin`, once `wait` has returned.
  const void *part(size_t index) const { return memory_ + offsets_[index]; }

 private:
  static constexpr size_t kMaxParts = 8;

  std::shared_ptr<Queue> queue_;
  uint64_t capacity_;
  char *memory_ = nullptr;
  uint64_t offsets_[kMaxParts] = {};
  std::optional<Event> done_;
};

}  // namespace surogate::serve
