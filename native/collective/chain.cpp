#include <netfold/collective/chain.hpp>

namespace netfold::collective {

Chain::Chain(const Call& call, transport::Mesh& mesh, Team team_of) : PipelinedPlan(call, mesh, std::move(team_of)) {
  const int me = team().position();
  const int number = team().wrapped(me - call.root);
  const Buffer& tensor = call.outputs[0];
  const std::size_t chunks = pipeline_chunks_of(tensor.bytes);
  const int previous = number > 0 ? from(me - 1) : -1;
  const int next = number + 1 < team().size() ? to(me + 1) : -1;
  for (std::size_t i = 0; i < chunks; ++i) {
    const Buffer chunk = part(tensor, chunks, i, 1);
    Mark received;
    if (previous >= 0) received = add(previous, Receive{chunk.data, chunk.bytes, nullptr, false, {}});
    if (next >= 0) add(next, Send{chunk.data, chunk.bytes, received});
  }
  finish_plan();
}

}  // namespace netfold::collective
