#pragma once

#include <netfold/transport/fabric/fabric_pipe.hpp>

#include <memory>

// This rank's end of a stream to another rank, until a group takes the pipe.
struct FabricStream {
  std::unique_ptr<netfold::transport::fabric::FabricPipe> pipe;
};
