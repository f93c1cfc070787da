// Between Python objects and the engine's plain structs.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "error.h"
#include "surogate/abi.h"

namespace surogate::python {

namespace nb = nanobind;

// A buffer of a Python object, held until this is destroyed (which needs the GIL).
class Buffer {
 public:
  Buffer(nb::handle object, bool writable, const std::string &what);  // throws Error
  ~Buffer();
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;

  const Py_buffer &view() const { return view_; }
  nb::object owner() const { return nb::borrow(view_.obj); }
  bool is_dense() const;

 private:
  Py_buffer view_{};
};

// Operands: None, or (object with a buffer, dtype name, shape).
struct Operands {
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<sg_tensor> tensors;
};
Operands read_operands(nb::sequence items, bool writable, const char *side);

// A dict of names to int, float, str or bool. The pointers in `attrs` live in `names`.
struct Attributes {
  std::deque<std::string> strings;
  std::vector<sg_attr> attrs;
};
Attributes read_attributes(nb::dict items);

// Raises the engine's errors as `type`, called with (message, hint); attributes op, instruction and operands are set
// on it.
void set_error_type(nb::object type);
void register_error_translator();

}  // namespace surogate::python
