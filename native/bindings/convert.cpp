#include "convert.h"

#include <nanobind/stl/string.h>

#include "dtype.h"
#include "tensor.h"

namespace surogate::python {
namespace {

PyObject *error_type = nullptr;  // lives as long as the module

// A tensor over a buffer. A buffer that is dense is read as `shape` says; one that is not must have that shape itself.
sg_tensor tensor_over(const Buffer &buffer, int32_t dtype, const std::vector<int64_t> &shape, const std::string &name) {
  const Py_buffer &view = buffer.view();
  sg_tensor tensor = dense_tensor(view.buf, dtype, shape);
  if (buffer.is_dense()) {
    const int64_t bytes = extent_bytes(tensor);
    if (bytes != view.len) {
      throw Error(operand_text(name, tensor) + " takes " + std::to_string(bytes) + " bytes, its buffer has " +
                  std::to_string(view.len));
    }
  } else {
    const sg_dtype_info &info = *dtype_info(dtype);
    bool same = view.ndim == tensor.rank && info.block_elems == 1 && view.itemsize == info.block_bytes;
    for (int32_t axis = 0; same && axis < tensor.rank; ++axis) {
      same = view.shape[axis] == tensor.shape[axis] && view.strides[axis] >= 0 &&
             view.strides[axis] % view.itemsize == 0;
      if (same) tensor.strides[axis] = view.strides[axis] / view.itemsize;
    }
    if (!same) throw Error(operand_text(name, tensor) + ": its buffer is not dense and has another shape or type");
  }
  static char nothing;  // an operand without elements is present all the same
  if (tensor.data == nullptr) tensor.data = &nothing;
  return tensor;
}

// A kernel may say anything; what isn't UTF-8 is shown as such.
nb::object text(const std::string &bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace"));
}

void translate(const std::exception_ptr &pointer, void *) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error &error) {
    nb::object type = error_type != nullptr ? nb::borrow(error_type) : nb::borrow(PyExc_RuntimeError);
    nb::object hint = error.hint.empty() ? nb::none() : text(error.hint);
    std::string message = error.message;
    nb::list operands;
    for (const std::string &line : error.operands) {
      message += "\n  " + line;
      operands.append(text(line));
    }
    nb::object instance = type(text(message), hint);
    instance.attr("op") = error.op.empty() ? nb::none() : text(error.op);
    instance.attr("instruction") = error.instruction < 0 ? nb::none() : nb::object(nb::int_(error.instruction));
    instance.attr("operands") = operands;
    PyErr_SetObject(type.ptr(), instance.ptr());
  }
}

}  // namespace

Buffer::Buffer(nb::handle object, bool writable, const std::string &what) {
  const int flags = PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
    PyErr_Clear();
    const std::string type = nb::cast<std::string>(nb::str(object.type()));
    throw Error(what + ": " + type + " has no " + (writable ? "writable " : "") + "buffer that the engine can use",
                "pass a numpy array, or another object with the buffer protocol");
  }
}

Buffer::~Buffer() { PyBuffer_Release(&view_); }

bool Buffer::is_dense() const { return PyBuffer_IsContiguous(&view_, 'C') != 0; }

Operands read_operands(nb::sequence items, bool writable, const char *side) {
  Operands result;
  for (nb::handle item : items) {
    const std::string name = std::string(side) + " " + std::to_string(result.tensors.size());
    if (item.is_none()) {
      sg_tensor absent{};
      absent.struct_size = sizeof(absent);
      result.tensors.push_back(absent);
      continue;
    }
    nb::tuple parts = nb::cast<nb::tuple>(item);
    const int32_t dtype = dtype_from_name(nb::cast<std::string>(parts[1]));
    std::vector<int64_t> shape;
    for (nb::handle size : nb::cast<nb::sequence>(parts[2])) shape.push_back(nb::cast<int64_t>(size));
    result.buffers.push_back(std::make_unique<Buffer>(parts[0], writable, name));
    result.tensors.push_back(tensor_over(*result.buffers.back(), dtype, shape, name));
  }
  return result;
}

Attributes read_attributes(nb::dict items) {
  Attributes result;
  for (auto [key, value] : items) {
    sg_attr attr{};
    attr.struct_size = sizeof(attr);
    attr.name = result.strings.emplace_back(nb::cast<std::string>(key)).c_str();
    if (nb::isinstance<nb::bool_>(value)) {
      attr.kind = SG_ATTR_INT;
      attr.i = nb::cast<bool>(value) ? 1 : 0;
    } else if (nb::isinstance<nb::int_>(value)) {
      attr.kind = SG_ATTR_INT;
      attr.i = nb::cast<int64_t>(value);
    } else if (nb::isinstance<nb::float_>(value)) {
      attr.kind = SG_ATTR_FLOAT;
      attr.f = nb::cast<double>(value);
    } else if (nb::isinstance<nb::str>(value)) {
      attr.kind = SG_ATTR_STRING;
      attr.s = result.strings.emplace_back(nb::cast<std::string>(value)).c_str();
    } else {
      throw Error("attribute '" + std::string(attr.name) + "' is neither int, float, str nor bool");
    }
    result.attrs.push_back(attr);
  }
  return result;
}

void set_error_type(nb::object type) {
  Py_XDECREF(error_type);
  error_type = type.release().ptr();
}

void register_error_translator() { nb::register_exception_translator(translate); }

}  // namespace surogate::python
