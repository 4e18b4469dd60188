// netfold._native.engine: the engine, operations, shared memory, and the compute sampler. Every wait releases the GIL.
#include "engine.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <netfold/collective/registry.hpp>
#include <netfold/engine/sampler.hpp>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "convert.hpp"
#include "owners.hpp"

using namespace netfold;
using engine::ComputeSampler;
using engine::Engine;
using engine::Group;
using engine::Operation;
using transport::PeerMemory;

namespace {

// The thread on which Python runs signal handlers; in a fork's child, the thread that forked.
std::atomic<pthread_t> main_thread;

void install_interrupts() {
  main_thread = nb::cast<std::uintptr_t>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  pthread_atfork(nullptr, nullptr, [] { main_thread = pthread_self(); });
  Group::set_interrupts({
      .run_on_this_thread = [] { return pthread_equal(pthread_self(), main_thread.load()) != 0; },
      .interrupts_wait =
          [] {
            const nb::gil_scoped_acquire gil;
            return PyErr_CheckSignals() != 0;  // the exception stays with this thread until raise_pending
          },
  });
}

template <class Enum>
nb::dict names(int count) {
  nb::dict out;
  for (int i = 0; i < count; ++i) out[name(static_cast<Enum>(i))] = i;
  return out;
}

// By name, what the elements of a call can be: the dtypes, and what travels as one of them.
nb::dict elements() {
  nb::dict out;
  for (std::uint8_t i = 0; i < collective::kElementCount; ++i) {
    if (collective::is_valid_element(i)) out[name(static_cast<collective::Element>(i))] = i;
  }
  return out;
}

// The operations that each algorithm can run.
nb::dict supported() {
  nb::dict out;
  for (int i = 0; i < collective::kAlgorithmCount; ++i) {
    nb::list kinds;
    for (int k = 0; k < collective::kKindCount; ++k) {
      if (collective::supports(algorithm_of(i), kind_of(k))) kinds.append(name(kind_of(k)));
    }
    out[name(algorithm_of(i))] = nb::tuple(kinds);
  }
  return out;
}

void share_memory(std::uintptr_t address, std::size_t bytes, int fd) {
  transport::Fd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) transport::throw_errno("duplicate a descriptor of shared memory");
  transport::ShmRegistry::instance().add(reinterpret_cast<std::byte*>(address), bytes, std::move(own));
}

std::string probe(PeerMemory& self, int position, int pid, std::uintptr_t address, const nb::bytes& mark) {
  PeerMemory::Mark expected{};
  if (mark.size() != expected.size()) throw nb::value_error("the mark has the wrong length");
  std::memcpy(expected.data(), mark.data(), expected.size());
  const auto result = self.probe(position, pid, address, expected);
  if (result == PeerMemory::ProbeResult::refused) return std::strerror(errno);
  return result == PeerMemory::ProbeResult::another ? "another process has its number here" : "";
}

// See AsyncEvent: the kind and the fields, with the wait in seconds.
using PythonEvent = std::tuple<const char*, std::uint64_t, std::vector<int>, int, int, std::uint32_t, double>;

std::optional<PythonEvent> next_async_event(std::int64_t timeout_ns) {
  const DropReleasedOwners at_end;
  const auto event = without_gil([&] { return Engine::instance().async_events.pop(timeout_ns); });
  if (!event) return std::nullopt;
  static constexpr const char* kKinds[] = {"unused", "broken", "overdue", "unconnected"};
  return PythonEvent(kKinds[static_cast<std::size_t>(event->kind)], event->group, event->ranks, event->lane,
                     event->rail, event->sequence, static_cast<double>(event->waited_ns) / 1e9);
}

}  // namespace

void raise_pending() {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

void bind_engine(nb::module_& m) {
  install_interrupts();
  nb::module_ e = m.def_submodule("engine");
  e.attr("DTYPES") = names<kernels::DType>(kernels::kDTypeCount);
  e.attr("ELEMENTS") = elements();
  e.attr("REDUCE_OPS") = names<kernels::ReduceOp>(kernels::kReduceOpCount);
  e.attr("KINDS") = names<collective::Kind>(collective::kKindCount);
  e.attr("ALGORITHMS") = names<collective::AlgorithmId>(collective::kAlgorithmCount);
  e.attr("MAX_NODE_SIZE") = transport::ShmNode::kMaxSize;
  e.def("node_bytes", &transport::ShmNode::bytes, "size"_a, "The bytes of the memory that `size` ranks share.");
  e.attr("ANY_SOURCE") = collective::kAnySource;
  e.attr("SUPPORTS") = supported();
  e.attr("EVENT_BYTES") = sizeof(engine::EventRecord);
  e.attr("FAILURES") = nb::make_tuple("none", "peer_lost", "switch_lost", "mismatch", "timeout", "aborted", "system");

  nb::class_<transport::ShmBuffer>(e, "ShmBuffer", "Zeroed memory that the other ranks of the node may map.")
      .def(nb::init<std::size_t>(), "bytes"_a)
      .def_prop_ro("address", [](const transport::ShmBuffer& self) { return std::uintptr_t(self.data()); })
      .def_prop_ro("bytes", &transport::ShmBuffer::bytes);
  e.def("share_memory", &share_memory, "address"_a, "bytes"_a, "fd"_a,
        "Let other ranks map memory that is a shared mapping of `fd` from offset 0, until unshare_memory(address).");
  e.def(
      "unshare_memory",
      [](std::uintptr_t address) { transport::ShmRegistry::instance().remove(reinterpret_cast<std::byte*>(address)); },
      "address"_a);

  nb::class_<PeerMemory>(e, "PeerMemory", "Reads the memory of the other processes of a node, after a probe of each.")
      // Shared with the engine thread, which may release it last and must not need the GIL for that.
      .def(nb::new_([](int size) { return std::make_shared<PeerMemory>(size); }), "size"_a)
      .def_prop_ro("address", [](const PeerMemory& self) { return std::uintptr_t(&self.mark()); })
      .def_prop_ro("bytes_read", &PeerMemory::bytes_read)
      .def_prop_ro("mark", [](const PeerMemory& self) { return nb::bytes(self.mark().data(), self.mark().size()); })
      .def(
          "select",
          [](const PeerMemory& self, const std::vector<int>& positions) {
            return std::make_shared<PeerMemory>(self, positions);
          },
          "positions"_a, "For a node of the ranks at these positions, which were all probed.")
      .def("probe", &probe, "position"_a, "pid"_a, "address"_a, "mark"_a,
           "Why the mark of the rank at `position` cannot be read; empty: it can.");

  nb::class_<Operation>(e, "Operation")
      .def("wait", &Operation::wait, "timeout_ns"_a, Release())
      .def("notify", &Operation::notify, "Queue the id when the operation is done. False: it is done already.")
      .def_prop_ro("done", &Operation::done)
      .def_prop_ro("id", &Operation::id)
      .def_prop_ro("peer", &Operation::peer, "The other rank of a send or receive that is done.")
      .def_prop_ro(
          "failure", [](const Operation& self) { return self.done() ? tuple_of(self.failure()) : PythonFailure(); },
          "(kind, rank at fault, text); None: not done, or no failure.")
      .def("record", [](const Operation& self) { return to_bytes(std::as_bytes(std::span(&self.record(), 1))); });

  bind_group(e);
  bind_switch_path(e);

  e.def("next_completion", [](std::int64_t timeout_ns) {
    const DropReleasedOwners at_end;
    return without_gil([&] { return Engine::instance().completions.pop(timeout_ns); });
  });
  e.def("interrupt_completions", [] { Engine::instance().completions.interrupt(); });
  e.def("next_async_event", &next_async_event, "timeout_ns"_a,
        "(unused, broken, overdue or unconnected; group id; ranks; lane; rail; sequence; seconds waited), see "
        "AsyncEvent.");
  e.def("interrupt_async_events", [] { Engine::instance().async_events.interrupt(); });

  nb::class_<ComputeSampler>(e, "ComputeSampler", "Samples how much one thread computes; at most one in a process.")
      .def(nb::init<pthread_t, int>(), "thread"_a, "id"_a,
           "thread: its pthread_self (threading's ident); it must outlive the sampler. id: its kernel id (native_id).")
      .def("stop", &ComputeSampler::stop, Release())
      .def(
          "take",
          [](ComputeSampler& self) {
            const auto samples = self.take();
            return to_bytes(std::as_bytes(std::span(samples)));
          },
          "The samples since the last call (netfold.profile.run.PROGRESS).")
      .def_prop_ro("sees_queue", &ComputeSampler::sees_queue);

  e.def("set_revoke_wait", &Group::set_revoke_wait, "ns"_a, "For tests: see Group::set_revoke_wait.");
  e.def("hide_from_call_sites", &hide_from_call_sites, "folder"_a,
        "Report calls from files below `folder` at the line that called into that folder.");
}
