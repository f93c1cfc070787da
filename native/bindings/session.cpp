#include "session.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <unordered_map>

#include "../engine/session.h"
#include "convert.h"
#include "dtype.h"

namespace surogate::python {
namespace {

// The engine's session, and the Python objects whose memory it was given.
struct BoundSession {
  Session session;
  std::unordered_map<std::string, std::unique_ptr<Buffer>> buffers;

  BoundSession(std::shared_ptr<const Program> program, const std::string &backend, int32_t threads, Session::Mode mode)
      : session(std::move(program), backend, threads, mode) {}
};

std::unique_ptr<BoundSession> open_session(nb::handle bytes, const std::string &backend, int32_t threads,
                                           bool plan_only) {
  const Buffer buffer(bytes, false, "program");
  if (!buffer.is_dense()) throw Error("the program's buffer is not dense");
  const Py_buffer &view = buffer.view();
  auto program = std::make_shared<const Program>(
      std::span(static_cast<const unsigned char *>(view.buf), static_cast<size_t>(view.len)));
  return std::make_unique<BoundSession>(std::move(program), backend, threads,
                                        plan_only ? Session::Mode::kPlan : Session::Mode::kRun);
}

void bind(BoundSession &self, const std::string &storage, nb::handle object) {
  auto buffer = std::make_unique<Buffer>(object, false, "storage '" + storage + "'");
  if (!buffer->is_dense()) throw Error("storage '" + storage + "': the buffer is not dense", "pass a contiguous array");
  const Py_buffer &view = buffer->view();
  self.session.bind(storage, view.buf, static_cast<uint64_t>(view.len), view.readonly == 0);
  self.buffers[storage] = std::move(buffer);
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

nb::object tensor(nb::object self, const std::string &name) {
  BoundSession &bound = nb::cast<BoundSession &>(self);
  const sg_tensor &layout = bound.session.tensor(name);
  const Storage &storage = bound.session.program().storage_of(bound.session.tensor_record(name));
  size_t shape[SG_MAX_RANK];
  int64_t strides[SG_MAX_RANK];
  const sg_dtype_info &info = *dtype_info(layout.dtype);
  for (int32_t axis = 0; axis < layout.rank; ++axis) {
    const bool bytes = is_block_dtype(layout.dtype);
    const bool last = axis == layout.rank - 1;
    shape[axis] = static_cast<size_t>(bytes && last ? layout.shape[axis] / info.block_elems * info.block_bytes
                                                    : layout.shape[axis]);
    strides[axis] = bytes && !last ? layout.strides[axis] / info.block_elems * info.block_bytes : layout.strides[axis];
  }
  // The view keeps alive whatever the memory belongs to: the session, or the object that was bound.
  nb::object owner = self;
  bool read_only = false;
  if (storage.external()) {
    const Buffer &buffer = *bound.buffers.at(storage.name);
    owner = buffer.owner();
    read_only = buffer.view().readonly != 0;
  }
  const size_t rank = static_cast<size_t>(layout.rank);
  const nb::dlpack::dtype dtype = numpy_dtype(layout.dtype);
  if (read_only) return nb::cast(nb::ndarray<nb::numpy, nb::ro>(layout.data, rank, shape, owner, strides, dtype));
  return nb::cast(nb::ndarray<nb::numpy>(layout.data, rank, shape, owner, strides, dtype));
}

void run(BoundSession &self, const std::string &entry) {
  nb::gil_scoped_release release;
  self.session.run(entry);
}

nb::list profile(BoundSession &self, const std::string &entry) {
  std::vector<double> seconds;
  {
    nb::gil_scoped_release release;
    self.session.run(entry, &seconds);
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

void bind_session(nb::module_ &m) {
  nb::class_<BoundSession>(m, "Session")
      .def("bind", &bind, nb::arg("storage"), nb::arg("buffer"))
      .def("run", &run, nb::arg("entry"))
      .def("profile", &profile, nb::arg("entry"))
      .def("explain", &explain)
      .def("memory", &memory)
      .def("entries", &entries)
      .def("threads", [](BoundSession &self) { return self.session.threads(); });
  m.def("open_session", &open_session, nb::arg("program"), nb::arg("backend"), nb::arg("threads"),
        nb::arg("plan_only"));
  m.def("tensor", &tensor, nb::arg("session"), nb::arg("name"));
}

}  // namespace surogate::python
