// netfold._native.device: collectives on device memory, through CUDA's driver opened at run time.
#include <netfold/device/host_staging.hpp>

#include "convert.hpp"
#include "engine.hpp"

using namespace netfold;
using device::CudaDriver;
using device::Event;
using device::HostStaging;
using device::StreamHandle;

namespace {

StreamHandle handle_of(std::uintptr_t stream) { return reinterpret_cast<StreamHandle>(stream); }

std::shared_ptr<HostStaging> make_staging(std::shared_ptr<engine::Group> group, std::shared_ptr<CudaDriver> driver,
                                          std::uintptr_t out, std::uintptr_t back,
                                          const std::vector<std::tuple<std::uintptr_t, std::size_t>>& slots) {
  std::vector<collective::Buffer> memory;
  for (const auto& [address, bytes] : slots) memory.push_back({reinterpret_cast<std::byte*>(address), bytes});
  return std::make_shared<HostStaging>(std::move(group), std::move(driver), handle_of(out), handle_of(back), memory);
}

// (address, bytes, bytes of an element)
using PythonTensors = std::vector<std::tuple<std::uint64_t, std::size_t, std::size_t>>;
// (to the host, to the device)
using PythonCopies = std::tuple<bool, bool>;

std::vector<HostStaging::Tensor> tensors_of(const PythonTensors& tensors) {
  std::vector<HostStaging::Tensor> found;
  for (const auto& [address, bytes, element_bytes] : tensors) found.push_back({address, bytes, element_bytes});
  return found;
}

std::uint64_t begin(HostStaging& self, int kind, int element, int reduce, bool average, int root,
                    const PythonTensors& inputs, const PythonTensors& outputs, const PythonCopies& of_inputs,
                    const PythonCopies& of_outputs, std::size_t elements, std::size_t chunks, std::uintptr_t ready,
                    std::int64_t deadline_ns) {
  HostStaging::Request request;
  request.call.kind = kind_of(kind);
  set_element(request.call, element);
  request.call.reduce = checked<kernels::ReduceOp>(reduce, kernels::kReduceOpCount, "reduction");
  request.call.average = average ? collective::Averaging::whole : collective::Averaging::none;
  request.call.root = root;
  request.inputs = tensors_of(inputs);
  request.outputs = tensors_of(outputs);
  request.of_inputs = {std::get<0>(of_inputs), std::get<1>(of_inputs)};
  request.of_outputs = {std::get<0>(of_outputs), std::get<1>(of_outputs)};
  request.elements = elements;
  request.chunks = chunks;
  request.ready = reinterpret_cast<device::EventHandle>(ready);
  request.deadline_ns = deadline_ns;
  return without_gil([&] { return self.begin(std::move(request)); });
}

nb::tuple run(HostStaging& self, int goal, std::int64_t interrupts) {
  const auto checked_goal = checked<HostStaging::Goal>(goal, 4, "goal");
  const auto outcome = without_gil([&] { return self.run(checked_goal, interrupts); });
  nb::list finished;
  for (const auto& each : outcome.finished) {
    finished.append(nb::make_tuple(each.number, std::const_pointer_cast<Event>(each.event)));
  }
  nb::object fault = nb::none();
  if (outcome.fault) {
    static constexpr const char* kKinds[] = {"overdue", "device", "operation", "group"};
    const auto& found = *outcome.fault;
    fault = nb::make_tuple(kKinds[static_cast<std::size_t>(found.kind)], found.number, found.text,
                           static_cast<double>(found.waited_ns) / 1e9,
                           std::const_pointer_cast<engine::Operation>(found.operation));
  }
  return nb::make_tuple(outcome.reached, finished, fault);
}

std::shared_ptr<CudaDriver> over(const std::vector<std::tuple<std::string, std::uintptr_t>>& functions, int number) {
  const auto find = [&](const char* name) -> void* {
    for (const auto& [known, address] : functions) {
      if (known == name) return reinterpret_cast<void*>(address);
    }
    return nullptr;
  };
  nb::gil_scoped_release release;  // the functions may be Python's
  return CudaDriver::over(find, "of a test", number);
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::module_ d = m.def_submodule("device", "Collectives on device memory.");
  nb::class_<CudaDriver>(d, "CudaDriver", "Functions of CUDA's driver for one device.")
      .def_static("open", &CudaDriver::open, "library"_a, "device"_a, Release(),
                  "Open the library. RuntimeError with the reason where it, or a function, is absent.")
      .def_static("over", &over, "functions"_a, "device"_a, "For tests: (name, address) of the functions.");
  nb::class_<Event>(d, "Event", "A recorded point in a stream.")
      .def("query", &Event::passed, Release(), "Whether the device has passed the event. Raises the device's error.")
      .def(
          "wait",
          [](const Event& self, nb::handle stream) {
            const auto of = handle_of(nb::cast<std::uintptr_t>(stream.attr("cuda_stream")));
            without_gil([&] { return self.hold(of); });
          },
          "stream"_a, "Have later work of the stream wait for the event, as torch.cuda.Event does.");
  nb::class_<HostStaging>(d, "HostStaging", "See netfold/device/host_staging.hpp.")
      .def(nb::new_(&make_staging), "group"_a, "driver"_a, "out"_a, "back"_a, "slots"_a,
           "out, back: handles of streams. slots: (address, bytes) of pinned memory, which must outlive this.")
      .def("begin", &begin, "kind"_a, "element"_a, "reduce"_a, "average"_a, "root"_a, "inputs"_a, "outputs"_a,
           "of_inputs"_a, "of_outputs"_a, "elements"_a, "chunks"_a, "ready"_a, "deadline_ns"_a,
           "Start a call; returns its number.\n\n"
           "inputs, outputs: (address, bytes, bytes of an element), which must stay until the call is finished.\n"
           "of_inputs, of_outputs: whether they are copied (to the host before, to the device after) the collective.\n"
           "elements: of each tensor in a chunk. ready: the handle of an event. deadline_ns: by time.monotonic.")
      .def(
          "run", &run, "goal"_a, "interrupts"_a,
          "Run without the GIL. Returns (whether the goal was reached, [(number, Event) of finished calls], fault).\n\n"
          "goal: LEFT, SUBMITTED, RETURNED or MOVED. interrupts: a value of `interrupts`; after a later one LEFT is "
          "enough "
          "in place of RETURNED.\n"
          "fault: (overdue, device, operation or group; number of the call; text; seconds waited; Operation), or None.")
      .def("interrupt", &HostStaging::interrupt)
      .def_prop_ro("interrupts", &HostStaging::interrupts)
      .def("forget", &HostStaging::forget, Release(), "Drop all chunks, once the group has failed.")
      .def_prop_ro("busy", &HostStaging::busy);
  d.attr("LEFT") = static_cast<int>(HostStaging::Goal::left);
  d.attr("SUBMITTED") = static_cast<int>(HostStaging::Goal::submitted);
  d.attr("RETURNED") = static_cast<int>(HostStaging::Goal::returned);
  d.attr("NEVER") = HostStaging::kNever;
  d.attr("MOVED") = static_cast<int>(HostStaging::Goal::moved);
}
