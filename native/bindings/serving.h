// class Loop: what serves a model.
#pragma once

#include <nanobind/nanobind.h>

namespace surogate::python {

void bind_serving(nanobind::module_ &m);

}  // namespace surogate::python
