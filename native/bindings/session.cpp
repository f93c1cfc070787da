#include "session.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstring>
#include <unordered_map>

#include "../engine/session.h"
#include "convert.h"
#include "device.h"
#include "dtype.h"
#include "memory.h"

namespace surogate::python {
namespace {

// Memory of a device or of the host, or a part of a session's: what storages are bound to, and what sessions share.
struct Block {
  std::shared_ptr<Device> device;
  void *data = nullptr;
  uint64_t bytes = 0;
  Memory owned;      // what was allocated for it, or
  nb::object owner;  // the session that the memory belongs to
};

// The engine's session, and what its external storages were given.
struct BoundSession {
  Session session;
  struct Bound {
    std::unique_ptr<Buffer> buffer;  // of an object of the host, or
    nb::object block;                // a Block
  };
  std::unordered_map<std::string, Bound> bound;

  BoundSession(std::shared_ptr<const Program> program, const SessionOptions &options, std::shared_ptr<Queue> queue)
      : session(std::move(program), options, std::move(queue)) {}
};

std::unique_ptr<BoundSession> open_session(nb::handle bytes, const std::string &backend, int32_t device, int32_t threads,
                                           bool graphs, bool plan_only, std::shared_ptr<Queue> queue, bool batch_invariant) {
  const Buffer buffer(bytes, false, "program");
  if (!buffer.is_dense()) throw Error("the program's buffer is not dense");
  const Py_buffer &view = buffer.view();
  auto program = std::make_shared<const Program>(
      std::span(static_cast<const unsigned char *>(view.buf), static_cast<size_t>(view.len)));
  const SessionOptions options{backend, device, threads, plan_only, graphs, batch_invariant};
  nb::gil_scoped_release release;
  return std::make_unique<BoundSession>(std::move(program), options, std::move(queue));
}

std::shared_ptr<Queue> open_queue(const std::string &backend, int32_t device, int32_t threads) {
  nb::gil_scoped_release release;
  return std::make_shared<Queue>(backend, device, threads);
}

void bind(BoundSession &self, const std::string &storage, nb::handle object) {
  if (nb::isinstance<Block>(object)) {
    const Block &block = nb::cast<Block &>(object);
    if (block.device != self.session.device()) throw Error("storage '" + storage + "': the memory is of another device");
    self.session.bind(storage, block.data, block.bytes, true);
    self.bound[storage] = {nullptr, nb::borrow(object)};
    return;
  }
  if (!self.session.device()->is_host()) {
    throw Error("storage '" + storage + "': a program on a device reads memory of that device",
                "copy the array into an engine.Memory of it, and bind that");
  }
  auto buffer = std::make_unique<Buffer>(object, false, "storage '" + storage + "'");
  if (!buffer->is_dense()) throw Error("storage '" + storage + "': the buffer is not dense", "pass a contiguous array");
  const Py_buffer &view = buffer->view();
  self.session.bind(storage, view.buf, static_cast<uint64_t>(view.len), view.readonly == 0);
  self.bound[storage] = {std::move(buffer), {}};
}

// ---- copies between the host and a session, or a block

const Py_buffer &dense_view(const Buffer &buffer, const std::string &what) {
  if (!buffer.is_dense()) throw Error(what + ": the array is not dense", "pass a contiguous array");
  return buffer.view();
}

void write(BoundSession &self, const std::string &name, uint64_t offset, nb::handle object) {
  const Buffer buffer(object, false, "tensor '" + name + "'");
  const Py_buffer &view = dense_view(buffer, "tensor '" + name + "'");
  nb::gil_scoped_release release;
  self.session.write(name, offset, view.buf, static_cast<uint64_t>(view.len));
}

void read(BoundSession &self, const std::string &name, uint64_t offset, nb::handle object) {
  const Buffer buffer(object, true, "tensor '" + name + "'");
  const Py_buffer &view = dense_view(buffer, "tensor '" + name + "'");
  nb::gil_scoped_release release;
  self.session.read(name, offset, view.buf, static_cast<uint64_t>(view.len));
}

std::unique_ptr<Block> allocate(const std::string &backend, int32_t device, uint64_t bytes) {
  auto block = std::make_unique<Block>();
  block->device = Device::open(backend, device);
  block->owned = Memory(block->device, bytes, "a tensor");
  block->data = block->owned.data();
  block->bytes = bytes;
  return block;
}

std::unique_ptr<Block> share(nb::object self, const std::string &name) {
  const Session &session = nb::cast<BoundSession &>(self).session;
  auto block = std::make_unique<Block>();
  block->device = session.device();
  block->data = session.tensor(name).data;
  block->bytes = session.tensor_record(name).bytes;
  block->owner = self;
  return block;
}

void check_range(const Block &block, uint64_t offset, uint64_t bytes) {
  if (offset <= block.bytes && bytes <= block.bytes - offset) return;
  throw Error(std::to_string(bytes) + " bytes from byte " + std::to_string(offset) + " on reach past the end of memory of " +
              std::to_string(block.bytes) + " bytes");
}

void write_block(Block &self, nb::handle object, uint64_t offset) {
  const Buffer buffer(object, false, "memory");
  const Py_buffer &view = dense_view(buffer, "memory");
  const uint64_t bytes = static_cast<uint64_t>(view.len);
  check_range(self, offset, bytes);
  nb::gil_scoped_release release;
  char *to = static_cast<char *>(self.data) + offset;
  if (bytes == 0) return;
  if (self.device->is_host()) {
    std::memcpy(to, view.buf, bytes);
    return;
  }
  self.device->activate();
  const Stream stream(self.device);
  self.device->upload(to, view.buf, bytes, stream);
  self.device->synchronize(stream.native());
}

void read_block(Block &self, nb::handle object, uint64_t offset) {
  const Buffer buffer(object, true, "memory");
  const Py_buffer &view = dense_view(buffer, "memory");
  const uint64_t bytes = static_cast<uint64_t>(view.len);
  check_range(self, offset, bytes);
  nb::gil_scoped_release release;
  const char *from = static_cast<const char *>(self.data) + offset;
  if (bytes == 0) return;
  if (self.device->is_host()) {
    std::memcpy(view.buf, from, bytes);
    return;
  }
  self.device->activate();
  const Stream stream(self.device);
  self.device->download(view.buf, from, bytes, stream);
}

nb::dlpack::dtype numpy_dtype(int32_t dtype) {
  using nb::dlpack::dtype_code;
  const auto make = [](dtype_code code, int bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (dtype) {
    case SG_F16: return make(dtype_code::Float, 16);
    case SG_F32: return make(dtype_code::Float, 32);
    case SG_F64: return make(dtype_code::Float, 64);
    case SG_BF16: return make(dtype_code::UInt, 16);
    case SG_I8: return make(dtype_code::Int, 8);
    case SG_I32: return make(dtype_code::Int, 32);
    case SG_I64: return make(dtype_code::Int, 64);
    default: return make(dtype_code::UInt, 8);  // u8, and the bytes of quantised blocks
  }
}

// numpy's form of a tensor: (dtype, shape, strides in elements); quantised rows are the bytes of their blocks.
struct ArrayForm {
  nb::dlpack::dtype dtype;
  size_t shape[SG_MAX_RANK];
  int64_t strides[SG_MAX_RANK];
};
ArrayForm array_form(const sg_tensor &layout) {
  ArrayForm form{numpy_dtype(layout.dtype), {}, {}};
  const sg_dtype_info &info = *dtype_info(layout.dtype);
  for (int32_t axis = 0; axis < layout.rank; ++axis) {
    const bool bytes = is_block_dtype(layout.dtype);
    const bool last = axis == layout.rank - 1;
    form.shape[axis] = static_cast<size_t>(bytes && last ? layout.shape[axis] / info.block_elems * info.block_bytes
                                                         : layout.shape[axis]);
    form.strides[axis] = bytes && !last ? layout.strides[axis] / info.block_elems * info.block_bytes : layout.strides[axis];
  }
  return form;
}

nb::object tensor(nb::object self, const std::string &name) {
  BoundSession &bound = nb::cast<BoundSession &>(self);
  if (!bound.session.device()->is_host()) {
    throw Error("tensor '" + name + "' lies on device '" + bound.session.device()->backend() + "'", "read or write it");
  }
  const sg_tensor &layout = bound.session.tensor(name);
  const Storage &storage = bound.session.program().storage_of(bound.session.tensor_record(name));
  const ArrayForm form = array_form(layout);
  // The view keeps alive whatever the memory belongs to: the session, or the object that was bound.
  nb::object owner = self;
  bool read_only = false;
  if (storage.external()) {
    const BoundSession::Bound &given = bound.bound.at(storage.name);
    owner = given.buffer != nullptr ? given.buffer->owner() : given.block;
    read_only = given.buffer != nullptr && given.buffer->view().readonly != 0;
  }
  const size_t rank = static_cast<size_t>(layout.rank);
  if (read_only) {
    return nb::cast(nb::ndarray<nb::numpy, nb::ro>(layout.data, rank, form.shape, owner, form.strides, form.dtype));
  }
  return nb::cast(nb::ndarray<nb::numpy>(layout.data, rank, form.shape, owner, form.strides, form.dtype));
}

// (dtype name, shape) of a tensor, whether or not it has memory.
nb::tuple tensor_type(BoundSession &self, const std::string &name) {
  const sg_tensor &layout = self.session.tensor_record(name).layout;
  nb::list shape;
  for (int32_t axis = 0; axis < layout.rank; ++axis) shape.append(layout.shape[axis]);
  return nb::make_tuple(dtype_info(layout.dtype)->name, shape);
}

void run(BoundSession &self, const std::string &entry) {
  nb::gil_scoped_release release;
  self.session.run(entry);
}

void synchronize(BoundSession &self) {
  nb::gil_scoped_release release;
  self.session.synchronize();
}

nb::list profile(BoundSession &self, const std::string &entry) {
  std::vector<double> seconds;
  {
    nb::gil_scoped_release release;
    seconds = self.session.profile(entry);
  }
  const size_t first = self.session.entry(entry).first;
  nb::list result;
  for (size_t i = 0; i < seconds.size(); ++i) {
    const Kernel &kernel = *self.session.choice(first + i).kernel;
    result.append(nb::make_tuple(kernel.table.op, kernel.table.name, seconds[i]));
  }
  return result;
}

nb::list names_of(const Program &program, std::span<const int32_t> indices) {
  nb::list names;
  for (int32_t index : indices) {
    if (index < 0) {
      names.append(nb::none());
    } else {
      names.append(program.tensors()[static_cast<size_t>(index)].name);
    }
  }
  return names;
}

nb::list explain(BoundSession &self) {
  const Program &program = self.session.program();
  nb::list result;
  for (size_t i = 0; i < program.instructions().size(); ++i) {
    const Instruction &instruction = program.instructions()[i];
    const Choice &choice = self.session.choice(i);
    nb::list candidates;
    for (const Candidate &candidate : choice.candidates) {
      candidates.append(nb::make_tuple(candidate.kernel->table.name, candidate.kernel->library, candidate.score));
    }
    nb::dict row;
    row["op"] = instruction.op;
    row["kernel"] = choice.kernel->table.name;
    row["library"] = choice.kernel->library;
    row["score"] = choice.score;
    row["requested"] = instruction.kernel[0] != '\0' ? nb::object(nb::str(instruction.kernel)) : nb::none();
    row["candidates"] = candidates;
    row["workspace"] = self.session.workspace_bytes(i);
    row["capturable"] = (choice.kernel->table.traits & SG_TRAIT_CAPTURABLE) != 0;
    row["tuning"] = self.session.tuning(i);
    row["inputs"] = names_of(program, instruction.inputs);
    row["outputs"] = names_of(program, instruction.outputs);
    result.append(row);
  }
  return result;
}

nb::dict memory(BoundSession &self) {
  const Program &program = self.session.program();
  nb::dict arenas, external, result;
  for (const Arena &arena : program.arenas()) arenas[arena.name] = arena.bytes;
  for (const Storage &storage : program.storages()) {
    if (storage.external()) external[storage.name] = storage.bytes;
  }
  result["arenas"] = arenas;
  result["workspace"] = self.session.workspace_bytes();
  result["external"] = external;
  return result;
}

nb::list entries(BoundSession &self) {
  nb::list result;
  for (const Entry &entry : self.session.program().entries()) {
    result.append(nb::make_tuple(entry.name, entry.first, entry.count));
  }
  return result;
}

}  // namespace

nb::dict device_info(const std::string &backend, int32_t device) {
  const sg_device_info info = Device::open(backend, device)->info();
  nb::dict row;
  row["name"] = info.name;
  row["versions"] = info.versions;
  row["total_bytes"] = info.total_bytes;
  row["free_bytes"] = info.free_bytes;
  row["num_units"] = info.num_units;
  row["architecture"] = info.architecture;
  return row;
}

Session &session_of(nb::handle object) { return nb::cast<BoundSession &>(object).session; }

void bind_session(nb::module_ &m) {
  nb::class_<Block>(m, "Memory")
      .def_prop_ro("bytes", [](const Block &self) { return self.bytes; })
      .def("write", &write_block, nb::arg("array"), nb::arg("offset") = 0)
      .def("read", &read_block, nb::arg("array"), nb::arg("offset") = 0);
  nb::class_<Queue>(m, "Queue")
      .def("backend", [](const Queue &self) { return self.device()->backend(); })
      .def("device", [](const Queue &self) { return self.device()->index(); })
      .def("threads", &Queue::threads)
      .def("synchronize", [](const Queue &self) { nb::gil_scoped_release release; self.synchronize(); });
  m.def("open_queue", &open_queue, nb::arg("backend"), nb::arg("device"), nb::arg("threads"));
  nb::class_<BoundSession>(m, "Session")
      .def("bind", &bind, nb::arg("storage"), nb::arg("buffer"))
      .def("write", &write, nb::arg("name"), nb::arg("offset"), nb::arg("array"))
      .def("read", &read, nb::arg("name"), nb::arg("offset"), nb::arg("array"))
      .def("tensor_type", &tensor_type, nb::arg("name"))
      .def("run", &run, nb::arg("entry"))
      .def("synchronize", &synchronize)
      .def("profile", &profile, nb::arg("entry"))
      .def("why_not_recorded", [](BoundSession &self, const std::string &entry) { return self.session.why_not_recorded(entry); })
      .def("explain", &explain)
      .def("memory", &memory)
      .def("entries", &entries)
      .def("threads", [](BoundSession &self) { return self.session.threads(); });
  m.def("open_session", &open_session, nb::arg("program"), nb::arg("backend"), nb::arg("device"), nb::arg("threads"),
        nb::arg("graphs"), nb::arg("plan_only"), nb::arg("queue").none(), nb::arg("batch_invariant"));
  m.def("tensor", &tensor, nb::arg("session"), nb::arg("name"));
  m.def("allocate", &allocate, nb::arg("backend"), nb::arg("device"), nb::arg("bytes"));
  m.def("share", &share, nb::arg("session"), nb::arg("name"));
  m.def("device_info", &device_info, nb::arg("backend"), nb::arg("device"));
}

}  // namespace surogate::python
