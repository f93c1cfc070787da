#include "serve/readback.h"

#include <cstring>
#include <new>

namespace surogate::serve {

namespace {
constexpr uint64_t kAlignment = 64;
}

Readback::Readback(std::shared_ptr<Queue> queue, uint64_t capacity) : queue_(std::move(queue)), capacity_(capacity) {
  if (queue_->device()->is_host()) {
    memory_ = static_cast<char *>(::operator new(capacity_, std::align_val_t{kAlignment}));
  } else {
    memory_ = static_cast<char *>(queue_->device()->allocate(capacity_, SG_MEMORY_PINNED, "results of serving"));
    done_.emplace(queue_->device(), false);
  }
}

Readback::~Readback() {
  if (queue_->device()->is_host()) {
    ::operator delete(memory_, std::align_val_t{kAlignment});
  } else {
    queue_->settle();  // a copy may be under way
    queue_->device()->release(memory_, SG_MEMORY_PINNED);
  }
}

void Readback::begin(std::span<const Part> parts) {
  if (parts.size() > kMaxParts) throw Error("a readback takes at most " + std::to_string(kMaxParts) + " parts");
  std::lock_guard lock(queue_->mutex());
  uint64_t at = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const uint64_t bytes = parts[i].bytes;
    if (at + bytes > capacity_) throw Error("a readback has room for " + std::to_string(capacity_) + " bytes");
    offsets_[i] = at;
    if (bytes > 0) {
      if (queue_->device()->is_host()) {
        std::memcpy(memory_ + at, parts[i].from, bytes);
      } else {
        queue_->device()->copy(memory_ + at, parts[i].from, bytes, queue_->stream(0).native());
      }
    }
    at += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (done_) done_->record(queue_->stream(0));
}

void Readback::wait() {
  if (done_) done_->synchronize();
}

}  // namespace surogate::serve
