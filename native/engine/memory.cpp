#include "memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace surogate {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

namespace {

void *map_pages(size_t bytes, const std::string &what) {
  void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(std::to_string(bytes) + " bytes for " + what + " could not be had: " + std::strerror(errno),
                "use a smaller batch, a shorter sequence, or a smaller memory budget for saved tensors");
  }
  if (bytes >= 2 * kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // fewer translation misses; a wish, not a need
  return data;
}

}  // namespace

Memory::Memory(std::shared_ptr<Device> device, size_t bytes, const std::string &what) : device_(std::move(device)) {
  if (bytes == 0) return;
  if (device_->is_host()) {
    data_ = map_pages(bytes, what);
  } else {
    data_ = device_->allocate(bytes, SG_MEMORY_DEVICE, what);
    const Stream stream(device_);
    device_->clear(data_, bytes, stream.native());
    device_->synchronize(stream.native());
  }
  bytes_ = bytes;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  if (device_->is_host()) {
    munmap(data_, bytes_);
  } else {
    device_->release(data_, SG_MEMORY_DEVICE);
  }
}

Memory::Memory(Memory &&other) noexcept
    : device_(std::move(other.device_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Memory &Memory::operator=(Memory &&other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace surogate
