// A block of zeroed memory: of the host, where pages are handed out when they are first touched, or of a device.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device.h"
#include "error.h"

namespace surogate {

class SUROGATE_API Memory {
 public:
  Memory() = default;
  // Throws Error, naming `what`; 0 bytes: data() is nullptr. Memory of a device is zeroed when the constructor returns.
  Memory(std::shared_ptr<Device> device, size_t bytes, const std::string &what);
  ~Memory();
  Memory(Memory &&other) noexcept;
  Memory &operator=(Memory &&other) noexcept;

  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::shared_ptr<Device> &device() const { return device_; }

 private:
  std::shared_ptr<Device> device_;
  void *data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace surogate
