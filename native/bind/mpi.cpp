// netfold._native.mpi: a port over the process's MPI, as mpi4py lends it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <netfold/transport/fabric/stream_mux.hpp>
#include <netfold/transport/mpi/mpi_endpoint.hpp>

#include "module.hpp"

namespace nb = nanobind;
namespace fabric = netfold::transport::fabric;
namespace mpi = netfold::transport::mpi;

void bind_mpi(nb::module_& m) {
  nb::module_ f = m.def_submodule("mpi");
  f.def(
      "open_stream_mux",
      [](const std::string& module, const std::string& version, std::size_t handle_bytes, std::size_t status_bytes,
         std::size_t tag_at, std::size_t error_at, std::uint64_t comm, std::uint64_t byte, int any_source, int any_tag,
         int error_in_status, int max_error_text, int max_tag, int rank) {
        nb::gil_scoped_release release;
        std::vector<std::unique_ptr<fabric::Endpoint>> rails;
        rails.push_back(mpi::open_endpoint({.module = module,
                                            .version = version,
                                            .handle_bytes = handle_bytes,
                                            .status_bytes = status_bytes,
                                            .tag_at = tag_at,
                                            .error_at = error_at,
                                            .comm = comm,
                                            .byte = byte,
                                            .any_source = any_source,
                                            .any_tag = any_tag,
                                            .error_in_status = error_in_status,
                                            .max_error_text = max_error_text,
                                            .max_tag = max_tag,
                                            .rank = rank}));
        return std::make_shared<fabric::StreamMux>(std::move(rails));
      },
      nb::kw_only(), nb::arg("module"), nb::arg("version"), nb::arg("handle_bytes"), nb::arg("status_bytes"),
      nb::arg("tag_at"), nb::arg("error_at"), nb::arg("comm"), nb::arg("byte"), nb::arg("any_source"),
      nb::arg("any_tag"), nb::arg("error_in_status"), nb::arg("max_error_text"), nb::arg("max_tag"), nb::arg("rank"),
      "A fabric.StreamMux over a communicator; the arguments are fields of transport::mpi::MpiHandles.");
  f.def("leave", &mpi::leave, nb::call_guard<nb::gil_scoped_release>(), "Calls MPI no more: it is about to end.");
}
