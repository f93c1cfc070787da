#include "queue.h"

#include <cstring>

namespace surogate {

Queue::Queue(const std::string &backend, int32_t device, int32_t threads, bool without_device)
    : device_(Device::open(backend, device)), without_device_(without_device), pool_(device_->is_host() ? threads : 1) {
  if (!without_device_) device_->activate();
  handle(0);
}

// What is on the streams uses the shared memory, which goes.
Queue::~Queue() { settle(); }

sg_stream *Queue::handle(uint32_t index) {
  while (handles_.size() <= index) {
    const bool native = !device_->is_host() && !without_device_;
    if (native) streams_.emplace_back(device_);
    handles_.push_back({&pool_, native ? streams_.back().native() : nullptr});
  }
  return &handles_[index];
}

std::shared_ptr<const Memory> Queue::scratch(const std::string &name, size_t bytes) {
  std::shared_ptr<const Memory> &memory = scratch_[name];
  if (memory == nullptr || memory->bytes() < bytes) {
    memory.reset();  // first: if nobody else has it, its bytes can be had again
    memory = std::make_shared<const Memory>(device_, bytes, name);
  }
  return memory;
}

void Queue::write(void *to, const void *from, uint64_t bytes) {
  if (bytes == 0) return;
  if (device_->is_host()) {
    std::memcpy(to, from, bytes);
  } else {
    device_->upload(to, from, bytes, streams_[0]);
  }
}

void Queue::read(void *to, const void *from, uint64_t bytes) {
  if (bytes == 0) return;
  if (device_->is_host()) {
    std::memcpy(to, from, bytes);
  } else {
    device_->download(to, from, bytes, streams_[0]);
  }
}

void Queue::synchronize() const {
  for (const Stream &stream : streams_) device_->synchronize(stream.native());
}

void Queue::settle() const noexcept {
  for (const Stream &stream : streams_) {
    try {
      device_->synchronize(stream.native());
    } catch (const Error &) {  // told by whatever was run or read last
    }
  }
}

}  // namespace surogate
