#include <netfold/collective/chain.hpp>

namespace netfold::collective {

Chain::Chain(const Call& call, transport::Mesh& mesh, Team team_of) : PipelinedPlan(call, mesh, std::move(team_of)) {
  const int number = team().wrapped(team().position() - call.root);
  const Buffer& tensor = call.outputs[0];
  const std::size_t chunks = pipeline_chunks_of(tensor.bytes);
  const bool sends = number + 1 < team().size();
  if (number > 0) from(team().wrapped(team().position() - 1));
  if (sends) to(team().wrapped(team().position() + 1));
  for (std::size_t i = 0; i < chunks; ++i) {
    const Span what = part({0, tensor.bytes}, chunks, i);
    std::byte* data = tensor.data + what.first;
    Mark here;
    if (number > 0)
      here = add(from(team().wrapped(team().position() - 1)), Receive{data, what.count, nullptr, false, {}});
    if (sends) add(to(team().wrapped(team().position() + 1)), Send{data, what.count, here});
  }
  finish_plan();
}

}  // namespace netfold::collective
