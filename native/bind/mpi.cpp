// netfold._native.mpi: streams over the process's MPI, through mpi4py's handles.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <netfold/transport/fabric/stream_mux.hpp>
#include <netfold/transport/mpi/mpi_endpoint.hpp>

#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;
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
        rails.push_back(mpi::open_endpoint({module, version, handle_bytes, status_bytes, tag_at, error_at, comm, byte,
                                            any_source, any_tag, error_in_status, max_error_text, max_tag, rank}));
        return std::make_shared<fabric::StreamMux>(std::move(rails));
      },
      nb::kw_only(), "module"_a, "version"_a, "handle_bytes"_a, "status_bytes"_a, "tag_at"_a, "error_at"_a, "comm"_a,
      "byte"_a, "any_source"_a, "any_tag"_a, "error_in_status"_a, "max_error_text"_a, "max_tag"_a, "rank"_a,
      "A fabric.StreamMux over a communicator; the arguments are fields of transport::mpi::MpiHandles.");
  f.def("leave", &mpi::leave, nb::call_guard<nb::gil_scoped_release>(),
        "Stop calling MPI, because the process is about to end it.");
}
