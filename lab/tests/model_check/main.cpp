// Runs one search with the machines that are linked in (mutants.py).
// Arguments: workers, leaves (as 1,1 or -), window, restarts; whether the network holds another job's packets, and
// whether it is merged; numbers, timeouts, pipelines, chunk_bits; whether a pipeline outlives a restart, and whether the
// last worker is a rogue. Then the operations, and behind a 0 the last worker's where it calls others.
// Output: the report and the trace's records, a line each, as fields separated by tabs.
// With the single argument `hellos`: the promise that search_validation finds broken.
#include <netfold/model_check/search.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>

int main(int count, char** arguments) {
  using namespace netfold::model_check;
  if (count == 2 && std::strcmp(arguments[1], "hellos") == 0) {
    std::fputs(search_validation(3).broken.c_str(), stdout);
    return 0;
  }
  if (count < 14) return 2;
  const auto number = [&](int at) { return static_cast<std::uint32_t>(std::strtoul(arguments[at], nullptr, 10)); };
  Scope scope{.workers = static_cast<std::uint16_t>(number(1)), .window = number(3), .restarts = number(4)};
  for (const char* at = arguments[2]; *at != '\0'; ++at) {
    if (*at >= '0' && *at <= '9') scope.leaves.push_back(static_cast<std::uint16_t>(*at - '0'));
  }
  scope.foreign_packets = number(5) != 0;
  if (number(6) != 0) scope.network = Network::merged;
  scope.numbers = number(7);
  scope.timeouts = number(8);
  scope.pipelines = number(9);
  scope.chunk_bits = number(10);
  scope.outlives = number(11) != 0;
  scope.rogue = number(12) != 0;
  std::vector<std::uint32_t>* line = &scope.operations;
  for (int at = 13; at < count; ++at) {
    if (number(at) == 0) {
      line = &scope.last;
    } else {
      line->push_back(number(at));
    }
  }
  const Report report = search(scope);
  std::printf("report\t%llu\t%d\t%s\n", static_cast<unsigned long long>(report.states), report.exhausted,
              report.broken.c_str());
  for (const Record& record : replay(scope, report.trace)) {
    std::printf("record\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", record.step.c_str(), record.source.c_str(), record.to.c_str(),
                record.what.c_str(), record.became.c_str(), record.state.c_str(), record.broken.c_str());
  }
}
