#include "memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace surogate {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Memory::Memory(size_t bytes, const std::string &what) {
  if (bytes == 0) return;
  void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(std::to_string(bytes) + " bytes for " + what + " could not be had: " + std::strerror(errno),
                "use a smaller batch, a shorter sequence, or a smaller memory budget for saved tensors");
  }
  if (bytes >= 2 * kHugePage) madvise(data, bytes, MADV_HUGEPAGE);  // fewer translation misses; a wish, not a need
  data_ = data;
  bytes_ = bytes;
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Memory::Memory(Memory &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Memory &Memory::operator=(Memory &&other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace surogate
