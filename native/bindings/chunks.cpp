#include "chunks.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/chunks.h"

namespace surogate::python {
namespace {

namespace nb = nanobind;
using serve::ChunkWriter;

// A stream, and its writer, which it must not outlive.
class BoundStream {
 public:
  BoundStream(std::shared_ptr<ChunkWriter> writer, int socket)
      : writer_(std::move(writer)), stream_(writer_->open(socket)) {}
  ~BoundStream() { writer_->close(*stream_); }
  BoundStream(const BoundStream &) = delete;
  BoundStream &operator=(const BoundStream &) = delete;

  bool put(nb::list parts) const {
    std::vector<std::string_view> views;
    views.reserve(nb::len(parts));
    for (nb::handle part : parts) {
      char *data = nullptr;
      Py_ssize_t size = 0;
      if (PyBytes_AsStringAndSize(part.ptr(), &data, &size) != 0) throw nb::python_error();
      views.emplace_back(data, static_cast<size_t>(size));
    }
    return writer_->put(stream_, views);
  }

  nb::bytes close() const {
    const std::string left = writer_->close(*stream_);
    return nb::bytes(left.data(), left.size());
  }

 private:
  std::shared_ptr<ChunkWriter> writer_;
  std::shared_ptr<ChunkWriter::Stream> stream_;
};

}  // namespace

void bind_chunks(nb::module_ &m) {
  nb::class_<BoundStream>(m, "ChunkStream")
      .def("put", &BoundStream::put, nb::arg("parts"))
      .def("close", &BoundStream::close);
  nb::class_<ChunkWriter>(m, "ChunkWriter")
      .def(nb::new_([] { return std::make_shared<ChunkWriter>(); }))
      .def("open", [](std::shared_ptr<ChunkWriter> self, int socket) {
        return std::make_unique<BoundStream>(std::move(self), socket);
      }, nb::arg("socket"));
}

}  // namespace surogate::python
