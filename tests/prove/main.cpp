// One search, for machines that are linked in from elsewhere (mutants.py): workers, leaves (as 1,1 or
// -), window, restarts and operations in; a line of fields with tabs between for each thing found out.
#include <netfold/prove/search.hpp>

#include <cstdio>
#include <cstdlib>

int main(int count, char** arguments) {
  using namespace netfold::prove;
  if (count < 6) return 2;
  const auto number = [&](int at) { return static_cast<std::uint32_t>(std::strtoul(arguments[at], nullptr, 10)); };
  Scope scope{.workers = static_cast<std::uint16_t>(number(1)), .window = number(3), .restarts = number(4)};
  for (const char* at = arguments[2]; *at != '\0'; ++at) {
    if (*at >= '0' && *at <= '9') scope.leaves.push_back(static_cast<std::uint16_t>(*at - '0'));
  }
  for (int at = 5; at < count; ++at) scope.operations.push_back(number(at));
  const Report report = search(scope);
  std::printf("report\t%llu\t%d\t%s\n", static_cast<unsigned long long>(report.states), report.exhausted,
              report.broken.c_str());
  for (const Record& record : replay(scope, report.trace)) {
    std::printf("record\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", record.step.c_str(), record.source.c_str(), record.to.c_str(),
                record.what.c_str(), record.became.c_str(), record.state.c_str(), record.broken.c_str());
  }
}
