// netfold._native_dev: what development of netfold needs and no wheel has.
#include "dev_module.hpp"

NB_MODULE(_native_dev, m) {
  m.doc() =
      "The search over the protocol's machines, links with delay for an emulated rack, and the native client of a "
      "switch. "
      "Not in wheels.";
  nb::set_leak_warnings(false);  // as in _native
  bind_model_check(m);
  bind_delay_link(m);
  bind_control(m);
}
