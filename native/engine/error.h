// The one exception type of the engine. It never crosses the C ABI; the bindings turn it into the host language's own.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#define SUROGATE_API __attribute__((visibility("default")))

namespace surogate {

class SUROGATE_API Error : public std::exception {
 public:
  explicit Error(std::string message, std::string hint = {}) : message(std::move(message)), hint(std::move(hint)) {}
  const char *what() const noexcept override { return message.c_str(); }

  std::string message;                // what was wrong, and where
  std::string hint;                   // what to do about it; empty where the message says it already
  std::string op;                     // the op concerned, or empty
  int64_t instruction = -1;           // index into the program's instructions, or -1
  std::vector<std::string> operands;  // one line an operand: name, dtype and shape; not repeated in `message`
};

}  // namespace surogate
