// netfold._native: one file a room.
#include "module.hpp"

NB_MODULE(_native, m) {
  m.doc() =
      "The native floor of netfold. Not a public interface: use netfold, netfold.torch or the netfold "
      "command.";
  // Daemon threads of a dying interpreter hold groups: that is no leak anyone can act on.
  nanobind::set_leak_warnings(false);
  bind_arrays(m);
  bind_kernels(m);
  bind_transport(m);
  bind_seal(m);
  bind_protocol(m);
  bind_prove(m);
  bind_fabric(m);
  bind_mpi(m);
  bind_engine(m);
  bind_failover(m);
  bind_aggregator(m);
  bind_cable(m);
}
