// The parts of the serving loop as Python sees them: cache blocks and text. The loop uses them natively; here they are
// tested and measured one by one.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "serve/text.h"

namespace surogate::python {

// tokens: a sequence of bytes objects, one an id. special: a buffer of as many bytes, not 0 where the id is special.
std::shared_ptr<const serve::Tokenizer> read_tokenizer(nanobind::sequence tokens, nanobind::handle special);

void bind_serving_parts(nanobind::module_ &m);

}  // namespace surogate::python
