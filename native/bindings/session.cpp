#include "session.h"

namespace surogate::python {

void bind_session(nanobind::module_ &) {}

}  // namespace surogate::python
