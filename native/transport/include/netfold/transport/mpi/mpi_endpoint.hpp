// An endpoint over MPI, for hosts whose fabric only MPI reaches: nonblocking sends and receives on a communicator of
// netfold's own. StreamMux builds streams on the endpoint, as over libfabric (fabric/stream_mux.hpp).
//
// Which MPI. The one of the process: Open MPI, or MPICH and its relatives such as Intel MPI. Their binary interfaces
// differ, and one build of netfold serves them all, so it includes no mpi.h. Rejected: mpi4py in the data path (a call
// costs at least a quarter of a microsecond, and the GIL, which the engine must not take); a compiled shim for each MPI
// (a user's machine need not have a compiler, nor Intel's wheel a header); tables of each ABI's constants, as in mpi4py
// and MPItrampoline (right until an MPI changes one). Instead mpi4py does the set-up (communicator, error handler,
// end). It passes its handles, their widths, the constants and the offsets of a status's fields, which it finds by
// trial (bootstrap/mpi.py). The data path is eight functions, looked up in mpi4py's module. They take handles of 4 or 8
// bytes.
//
// Threads. Any thread that waits for a stream polls, the engine's or a caller's, and the program may call MPI at the
// same time. So MPI_THREAD_MULTIPLE is required. An MPI may move data only during its calls: sends are polled until
// they are complete, and a sleeping thread polls every 200 us, as with any provider that cannot wake it.
//
// Order. All receives are alike (any source, any tag), so messages take them in the order in which they were posted.
// The completed ones are among the oldest, and the others need not be tested.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>

namespace netfold::transport::mpi {

// What mpi4py passes.
struct MpiHandles {
  std::string module;   // mpi4py's module file, linked with the MPI
  std::string version;  // of the library
  std::size_t handle_bytes = 0;
  std::size_t status_bytes = 0;
  std::size_t tag_at = 0;    // offset in a status
  std::size_t error_at = 0;  // offset in a status
  std::uint64_t comm = 0;
  std::uint64_t byte = 0;  // the datatype
  int any_source = 0;
  int any_tag = 0;
  int error_in_status = 0;
  int max_error_text = 0;
  int max_tag = 0;
  int rank = 0;  // this process's, in the communicator
};

// Throws fabric::Error where an MPI function is missing.
std::unique_ptr<fabric::Endpoint> open_endpoint(const MpiHandles& handles);

// To be called before the process ends its MPI: no endpoint calls MPI any more. Posted receives are cancelled; sends in
// progress stay.
void leave();

}  // namespace netfold::transport::mpi
