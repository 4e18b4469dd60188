// The files of one process's profile of NCCL, in a run's folder (core/src/netfold/profile/nccl.py reads them):
//
//     RUN/nccl-HOST-PID/metadata.json   the process, its communicators, the names of numbers, what was dropped
//     RUN/nccl-HOST-PID/operations      OperationRecords, in the order in which they ended
//     RUN/nccl-HOST-PID/transfers       TransferRecords
//
// The lists are only appended to, so that a process that is killed leaves valid lists.
#pragma once

#include <netfold/transport/socket.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "assembler.hpp"

namespace netfold::nccl {

struct CommAbout {
  std::uint64_t id = 0;  // the same on all of its ranks
  std::string name;      // as the job named it; may be empty
  int nodes = 0, ranks = 0, rank = 0;
};

struct ProfileAbout {
  int interface = 0;  // the version by which NCCL called
  std::vector<CommAbout> comms;
  std::uint64_t dropped_events = 0;
  std::uint64_t unknown_events = 0;  // whose start was dropped
  bool has_ended = false;            // the process wrote its last records
};

class ProfileFiles {
 public:
  // Makes the folders. Throws std::system_error.
  explicit ProfileFiles(const std::string& run);
  const std::string& folder() const { return folder_; }
  void append(const std::vector<OperationRecord>& operations, const std::vector<TransferRecord>& transfers);
  void describe(const ProfileAbout& about);

 private:
  std::string folder_;
  transport::Fd operations_, transfers_;
};

}  // namespace netfold::nccl
