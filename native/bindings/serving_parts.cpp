#include "serving_parts.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "convert.h"
#include "serve/blocks.h"

namespace surogate::python {
namespace {

using serve::BlockPool;
using serve::Extra;
using serve::ExtraKind;
using serve::Hash128;
using serve::HashKey;
using serve::Pieces;
using serve::StopStrings;
using serve::TextOptions;
using serve::TextStream;
using serve::Tokenizer;

std::span<const unsigned char> bytes_of(const Buffer &buffer, const std::string &what) {
  if (!buffer.is_dense()) throw Error("the buffer of " + what + " is not dense");
  const Py_buffer &view = buffer.view();
  return {static_cast<const unsigned char *>(view.buf), static_cast<size_t>(view.len)};
}

HashKey read_key(nb::handle object) {
  const Buffer buffer(object, false, "key");
  return HashKey::from(bytes_of(buffer, "the key"));
}

nb::bytes write_hash(Hash128 hash) {
  const uint64_t words[2] = {hash.low, hash.high};
  return nb::bytes(reinterpret_cast<const char *>(words), sizeof(words));
}

Hash128 read_hash(nb::handle object) {
  const HashKey words = read_key(object);  // as long, and laid out alike
  return {words.low, words.high};
}

nb::bytes siphash(nb::handle key, nb::handle data) {
  serve::SipHash hash(read_key(key));
  const Buffer buffer(data, false, "data");
  const std::span<const unsigned char> bytes = bytes_of(buffer, "the data");
  hash.update(bytes.data(), bytes.size());
  return write_hash(hash.finish());
}

// -- blocks ---------------------------------------------------------------------------------------------------------

std::vector<Hash128> read_chain(nb::sequence names) {
  std::vector<Hash128> chain;
  for (nb::handle name : names) chain.push_back(read_hash(name));
  return chain;
}

nb::bytes root(const BlockPool &self, nb::sequence extras) {
  std::vector<std::string> values;
  std::vector<Extra> read;
  values.reserve(nb::len(extras));
  for (nb::handle item : extras) {
    const auto [kind, value] = nb::cast<std::pair<ExtraKind, nb::bytes>>(item);
    values.emplace_back(value.c_str(), value.size());
    read.push_back({kind, values.back()});
  }
  return write_hash(self.root(read));
}

nb::list extend(const BlockPool &self, nb::handle first, const std::vector<int32_t> &tokens, nb::sequence known) {
  std::vector<Hash128> chain = read_chain(known);
  self.extend(chain, read_hash(first), tokens);
  nb::list names;
  for (const Hash128 name : chain) names.append(write_hash(name));
  return names;
}

std::vector<int32_t> match(BlockPool &self, nb::sequence names) {
  const std::vector<Hash128> chain = read_chain(names);
  std::vector<int32_t> blocks(chain.size());
  blocks.resize(self.match(chain, blocks));
  return blocks;
}

nb::object allocate(BlockPool &self, size_t count) {
  std::vector<int32_t> blocks(std::min(count, static_cast<size_t>(self.num_blocks()) + 1));
  return self.allocate(blocks) ? nb::cast(blocks) : nb::none();
}

nb::dict stats(const BlockPool &self) {
  const serve::BlockStats stats = self.stats();
  nb::dict result;
  result["total"] = stats.total;
  result["free"] = stats.free;
  result["cached"] = stats.cached;
  result["used"] = stats.used;
  result["queries"] = stats.queries;
  result["hits"] = stats.hits;
  result["evictions"] = stats.evictions;
  return result;
}

void bind_blocks(nb::module_ &m) {
  nb::enum_<ExtraKind>(m, "ExtraKind")
      .value("MODEL_GENERATION", ExtraKind::kModelGeneration)
      .value("ADAPTER", ExtraKind::kAdapter)
      .value("SALT", ExtraKind::kSalt)
      .value("IMAGE", ExtraKind::kImage);
  nb::class_<BlockPool>(m, "BlockPool")
      .def("__init__",
           [](BlockPool *self, int32_t num_blocks, int32_t block_size, nb::handle key) {
             new (self) BlockPool(num_blocks, block_size, read_key(key));
           },
           nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("key"))
      .def("root", &root, nb::arg("extras"))
      .def("next", [](const BlockPool &self, nb::handle parent,
                      const std::vector<int32_t> &tokens) { return write_hash(self.next(read_hash(parent), tokens)); },
           nb::arg("parent"), nb::arg("block_tokens"))
      .def("extend", &extend, nb::arg("root"), nb::arg("tokens"), nb::arg("chain") = nb::make_tuple())
      .def("find", [](const BlockPool &self, nb::sequence names) { return self.find(read_chain(names)); },
           nb::arg("chain"))
      .def("match", &match, nb::arg("chain"))
      .def("allocate", &allocate, nb::arg("count"))
      .def("hold", [](BlockPool &self, const std::vector<int32_t> &blocks) { self.hold(blocks); }, nb::arg("blocks"))
      .def("release", [](BlockPool &self, const std::vector<int32_t> &blocks) { self.release(blocks); },
           nb::arg("blocks"))
      .def("publish", [](BlockPool &self, int32_t block, nb::handle name) { self.publish(block, read_hash(name)); },
           nb::arg("block"), nb::arg("name"))
      .def("forget", &BlockPool::forget)
      .def("is_published", &BlockPool::is_published, nb::arg("block"))
      .def("holders", &BlockPool::holders, nb::arg("block"))
      .def("stats", &stats);
}

// -- text -----------------------------------------------------------------------------------------------------------

nb::list write_pieces(const Pieces &pieces) {
  nb::list result;
  uint32_t begin = 0;
  for (const Pieces::Piece &piece : pieces.pieces) {
    result.append(nb::make_tuple(piece.token, nb::str(pieces.text.data() + begin, piece.end - begin)));
    begin = piece.end;
  }
  return result;
}

// All tokens up to the one that completes a stop string.
nb::list feed(TextStream &self, const std::vector<int32_t> &tokens, bool with_text) {
  Pieces pieces;
  for (const int32_t token : tokens) {
    if (self.feed(token, pieces, with_text)) break;
  }
  return write_pieces(pieces);
}

nb::list finish(TextStream &self) {
  Pieces pieces;
  self.finish(pieces);
  return write_pieces(pieces);
}

void bind_text(nb::module_ &m) {
  nb::class_<Tokenizer>(m, "Tokenizer")
      .def(nb::new_([](nb::sequence tokens, nb::handle special) {
             return std::const_pointer_cast<Tokenizer>(read_tokenizer(tokens, special));
           }),
           nb::arg("tokens"), nb::arg("special"))
      .def("__len__", &Tokenizer::size)
      .def("bytes", [](const Tokenizer &self, int32_t token) {
        const std::string_view bytes = self.bytes(token);
        return nb::bytes(bytes.data(), bytes.size());
      }, nb::arg("token"))
      .def("is_special", &Tokenizer::is_special, nb::arg("token"));
  nb::class_<StopStrings>(m, "StopStrings").def(nb::init<const std::vector<std::string> &>(), nb::arg("stops"));
  nb::class_<TextStream>(m, "TextStream")
      .def("__init__",
           [](TextStream *self, std::shared_ptr<Tokenizer> tokenizer, std::shared_ptr<StopStrings> stops,
              bool include_stop, bool special_text, int32_t stop_after, int32_t opening) {
             new (self) TextStream(tokenizer, stops, {include_stop, special_text, stop_after, opening});
           },
           nb::arg("tokenizer"), nb::arg("stops") = nb::none(), nb::arg("include_stop") = false,
           nb::arg("special_text") = false, nb::arg("stop_after") = -1, nb::arg("opening") = -1)
      .def("feed", &feed, nb::arg("tokens"), nb::arg("with_text") = true)
      .def("finish", &finish)
      .def_prop_ro("stop", &TextStream::stop);
}

}  // namespace

std::shared_ptr<const serve::Tokenizer> read_tokenizer(nb::sequence tokens, nb::handle special) {
  std::string bytes;
  std::vector<uint64_t> offsets{0};
  for (nb::handle token : tokens) {
    char *data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(token.ptr(), &data, &size) != 0) throw nb::python_error();
    bytes.append(data, static_cast<size_t>(size));
    offsets.push_back(bytes.size());
  }
  const Buffer buffer(special, false, "special");
  const std::span<const unsigned char> flags = bytes_of(buffer, "the special flags");
  return std::make_shared<Tokenizer>(std::move(bytes), std::move(offsets),
                                     std::vector<uint8_t>(flags.begin(), flags.end()));
}

void bind_serving_parts(nb::module_ &m) {
  m.def("siphash", &siphash, nb::arg("key"), nb::arg("data"));
  bind_blocks(m);
  bind_text(m);
}

}  // namespace surogate::python
