// netfold._native: one file a component.
#include "module.hpp"

#include <system_error>

namespace {

// An error of the operating system becomes an OSError with its errno. nanobind would raise RuntimeError, which code
// that handles a full disk or a lack of descriptors does not catch.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    if (PyObject* arguments = Py_BuildValue("(is)", error.code().value(), error.what())) {
      PyErr_SetObject(PyExc_OSError, arguments);
      Py_DECREF(arguments);
    }
  }
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native layer of netfold. Not a public interface: use netfold, netfold.torch or the netfold command.";
  m.attr("VERSION") = NETFOLD_VERSION;
  // Daemon threads of an ending interpreter hold groups: nobody could act on such a warning.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);  // registered first, so asked last
  bind_arrays(m);
  bind_kernels(m);
  bind_transport(m);
  bind_auth(m);
  bind_protocol(m);
  bind_fabric(m);
  bind_engine(m);
  bind_device(m);
  bind_failover(m);
  bind_shares(m);
  bind_dataplane(m);
}
