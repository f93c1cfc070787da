// A block of zeroed pages. Pages are handed out by the system when they are first touched.
#pragma once

#include <cstddef>
#include <string>

#include "error.h"

namespace surogate {

class Memory {
 public:
  Memory() = default;
  Memory(size_t bytes, const std::string &what);  // throws Error, naming `what`; 0 bytes: data() is nullptr
  ~Memory();
  Memory(Memory &&other) noexcept;
  Memory &operator=(Memory &&other) noexcept;

  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void *data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace surogate
