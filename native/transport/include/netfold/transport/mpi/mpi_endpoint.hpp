// A wire over MPI, for hosts whose fabric only an MPI reaches: nonblocking sends and receives on a communicator of our
// own. What is made of them (segments, windows, streams) is the port's, as over libfabric (fabric/stream_mux.hpp).
//
// WHICH MPI. The one that the process has: Open MPI, or MPICH and its kin, Intel MPI among them. Their binary
// interfaces differ, and one build of netfold is to serve them all, so there is no mpi.h here. What was weighed, and
// left: mpi4py in the data path (a call costs a quarter of a microsecond and more, and the GIL, which the engine must
// not ask for); a shim for each MPI, compiled against its mpi.h (a user's machine need not have a compiler, nor Intel's
// wheel a header); tables of each ABI's constants, as mpi4py and MPItrampoline have them (right until an MPI changes
// one). Here mpi4py does what is done once (communicator, error handler, end) and lends us its handles, their widths,
// the constants, and where a status has its fields, which it tries out (bootstrap/mpi.py). The data path is eight
// functions, looked up where mpi4py's own are, that take such handles: of four bytes or of eight.
//
// THREADS. Whoever waits for a stream polls: the engine's thread or any of the caller's, while the program may call MPI
// itself. Only MPI_THREAD_MULTIPLE allows that. An MPI need not move anything between its calls: what was sent is
// driven until it is through, and a sleeper looks every 200 us, as with any provider that cannot wake it.
//
// ORDER. All receives are alike (any source, any tag), so messages take them in the order in which they were posted:
// those that are done are among the oldest, and no others need a look.
#pragma once

#include <netfold/transport/fabric/endpoint.hpp>

namespace netfold::transport::mpi {

// What mpi4py knows.
struct MpiHandles {
  std::string module;   // the file whose MPI functions are meant: mpi4py's, linked with the MPI
  std::string version;  // of the library
  std::size_t handle_bytes = 0;
  std::size_t status_bytes = 0;
  std::size_t tag_at = 0;    // in a status
  std::size_t error_at = 0;  // likewise
  std::uint64_t comm = 0;
  std::uint64_t byte = 0;  // the datatype
  int any_source = 0;
  int any_tag = 0;
  int error_in_status = 0;
  int max_error_text = 0;
  int max_tag = 0;
  int rank = 0;  // ours, in the communicator
};

// Throws fabric::Error where the functions are not there.
std::unique_ptr<fabric::Endpoint> open_endpoint(const MpiHandles& handles);

// Before the process ends its MPI: no wire calls it any more. What was posted is cancelled, what is under way left.
void leave();

}  // namespace netfold::transport::mpi
