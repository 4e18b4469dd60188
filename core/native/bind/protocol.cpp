// netfold._native.protocol: the production state machines, for netfold_plan.sim.
#include <netfold/protocol/parent_sender.hpp>
#include <netfold/protocol/switch_job.hpp>
#include <netfold/protocol/worker.hpp>

#include "convert.hpp"

using namespace netfold::protocol;
namespace kernels = netfold::kernels;

namespace {

nb::tuple tuple_of(const SwitchJob::Handled& handled) {
  static const char* const outcomes[] = {"dropped",  "stored", "completed",  "resend_result",
                                         "mismatch", "summed", "resend_sum", "nack"};
  return nb::make_tuple(outcomes[static_cast<int>(handled.outcome)], name(handled.drop), handled.slot, handled.chunk,
                        handled.worker, handled.other);
}

}  // namespace

void bind_protocol(nb::module_& m) {
  nb::module_ p = m.def_submodule("protocol");
  p.attr("HEADER_BYTES") = kHeaderBytes;
  p.attr("ETHERNET_PAYLOAD_BYTES") = kEthernetPayloadBytes;
  p.attr("MAX_PAYLOAD_BYTES") = kMaxPayloadBytes;
  p.attr("MAX_WORKERS") = kMaxWorkers;
  p.attr("MAX_OPERATIONS") = Worker::kMaxOperations;
  nb::list drops;
  for (int i = 0; i < kDropCount; ++i) drops.append(name(static_cast<Drop>(i)));
  p.attr("DROPS") = nb::tuple(drops);
  nb::dict flags;
  flags["from_switch"] = static_cast<int>(kFromSwitch);
  flags["mismatch"] = static_cast<int>(kMismatch);
  flags["hello"] = static_cast<int>(kHello);
  flags["nack"] = static_cast<int>(kNack);
  p.attr("FLAGS") = flags;

  nb::class_<Header>(p, "Header")
      .def(nb::init<>())
      .def_rw("flags", &Header::flags)
      .def_rw("job", &Header::job)
      .def_rw("epoch", &Header::epoch)
      .def_rw("incarnation", &Header::incarnation)
      .def_rw("chunk", &Header::chunk)
      .def_rw("packet_number", &Header::packet_number)
      .def_rw("operation", &Header::operation)
      .def_rw("elements", &Header::elements)
      .def_rw("worker", &Header::worker)
      .def_rw("count", &Header::count)
      .def_rw("wire", &Header::wire)
      .def_rw("reduce", &Header::reduce)
      .def_rw("table", &Header::table)
      .def(nb::self == nb::self)
      .def("pack",
           [](const Header& header) {
             std::byte out[kHeaderBytes];
             write_header(header, out);
             return to_bytes(out);
           })
      .def_static("parse", [](const nb::bytes& bytes) -> std::optional<Header> {
        const auto view = PacketView::parse(bytes_of(bytes));
        if (!view) return std::nullopt;
        return view->header();
      });

  p.def(
      "job_memory_bytes",
      [](std::uint16_t workers, std::uint32_t window, std::uint32_t payload_bytes, bool has_parent, bool encrypts) {
        JobConfig config{.workers = workers, .window = window, .payload_bytes = payload_bytes};
        if (has_parent) config.parent.emplace();
        // Each encrypted result has a buffer of its own.
        const std::size_t encrypted = encrypts ? std::size_t{config.slots()} * (payload_bytes + kHeaderBytes) : 0;
        return config.memory_bytes() + encrypted;
      },
      "workers"_a, "window"_a, "payload_bytes"_a, "has_parent"_a = false, "encrypts"_a = false,
      "Bytes that admission grants a job of this shape.");

  p.def(
      "job_slots", [](std::uint32_t window) { return JobConfig{.window = window}.slots(); }, "window"_a,
      "The slots of a job whose workers have `window` chunks in flight: a power of two.");

  nb::class_<SwitchJob> switch_job(p, "SwitchJob");
  switch_job
      .def(
          "__init__",
          [](SwitchJob* self, std::uint32_t job, std::uint32_t epoch, std::uint32_t incarnation, std::uint16_t workers,
             std::uint32_t window, std::uint32_t payload_bytes, const PythonParent& parent,
             std::vector<std::uint16_t> names) {
            new (self)
                SwitchJob({job, epoch, incarnation, workers, window, payload_bytes, link_of(parent), std::move(names)});
          },
          nb::kw_only(), "job"_a, "epoch"_a, "incarnation"_a, "workers"_a, "window"_a, "payload_bytes"_a,
          "parent"_a = nb::none(), "names"_a = std::vector<std::uint16_t>{})
      .def("handle_packet",
           [](SwitchJob& self, const nb::bytes& bytes) { return tuple_of(self.handle_packet(bytes_of(bytes))); })
      .def("handle_parent",
           [](SwitchJob& self, const nb::bytes& bytes) { return tuple_of(self.handle_parent(bytes_of(bytes))); })
      .def("sum", [](SwitchJob& self, std::uint32_t slot,
                     std::uint64_t packet_number) { return to_bytes(self.sum(slot, packet_number)); })
      .def("frame", [](const SwitchJob& self, std::uint32_t slot) { return to_bytes(self.frame(slot)); })
      .def(
          "mismatch_packet",
          [](const SwitchJob& self, std::uint64_t chunk, const nb::bytes& contribution, std::uint16_t about,
             std::uint64_t number) {
            const auto view = PacketView::parse(bytes_of(contribution));
            if (!view) throw nb::value_error("not a packet");
            std::vector<std::byte> out(self.packet_bytes());
            self.write_mismatch(chunk, CallDescriptor::of(view->header()), about, number, out.data());
            return to_bytes(out);
          },
          "chunk"_a, "contribution"_a, "about"_a, "number"_a = 1)
      .def(
          "nack_packet",
          [](const SwitchJob& self, std::uint16_t to, std::uint64_t first, std::uint32_t count, std::uint64_t number) {
            std::vector<std::byte> out(self.packet_bytes());
            self.write_nack(to, {first, count}, number, out.data());
            return to_bytes(out);
          },
          "to"_a, "first"_a, "count"_a, "number"_a = 1)
      .def("missing", &SwitchJob::missing);
  bind_value(switch_job);

  p.attr("REORDER_THRESHOLD") = kReorderThreshold;
  nb::class_<GapDetector> gap_detector(p, "GapDetector");
  gap_detector.def(nb::init<>()).def("observe", [](GapDetector& self, std::uint64_t packet_number) {
    const auto gap = self.observe(packet_number);
    return nb::make_tuple(gap.first, gap.count);
  });
  bind_value(gap_detector);

  nb::class_<ParentSender> parent_sender(p, "ParentSender");
  parent_sender.def(nb::init<std::uint32_t>(), "slot_count"_a)
      .def("offer", &ParentSender::offer)
      .def("poll_send",
           [](ParentSender& self) -> nb::object {
             const auto send = self.poll_send();
             if (!send) return nb::none();
             return nb::make_tuple(send->slot, send->packet_number);
           })
      .def("not_sent", &ParentSender::not_sent)
      .def("handle_result", &ParentSender::handle_result)
      .def("handle_nack", &ParentSender::handle_nack)
      .def_prop_ro("in_flight", &ParentSender::in_flight)
      .def_prop_ro("packets_sent", &ParentSender::packets_sent)
      .def_prop_ro("sent_again", &ParentSender::sent_again);
  bind_value(parent_sender);

  nb::class_<Worker::Send>(p, "Send")
      .def_ro("header", &Worker::Send::header)
      .def_ro("first", &Worker::Send::first)
      .def_ro("count", &Worker::Send::count)
      .def_ro("again", &Worker::Send::again);

  nb::class_<Worker> worker(p, "Worker");
  worker
      .def(
          "__init__",
          [](Worker* self, std::uint32_t job, std::uint32_t epoch, std::uint32_t incarnation, std::uint16_t worker,
             std::uint16_t workers, std::uint32_t window, std::uint32_t payload_bytes) {
            new (self) Worker({job, epoch, incarnation, worker, workers, window, payload_bytes});
          },
          nb::kw_only(), "job"_a, "epoch"_a, "incarnation"_a, "worker"_a, "workers"_a, "window"_a, "payload_bytes"_a)
      .def("can_start", &Worker::can_start)
      .def(
          "start",
          [](Worker& self, std::uint32_t operation, std::uint64_t elements, std::uint8_t wire, std::uint8_t reduce,
             std::uint16_t table) {
            if (!kernels::is_valid_dtype(wire) || !kernels::is_valid_reduce_op(reduce)) {
              throw nb::value_error("unknown wire format or operator");
            }
            self.start({operation, elements, static_cast<kernels::DType>(wire), static_cast<kernels::ReduceOp>(reduce),
                        table});
          },
          "operation"_a, "elements"_a, "wire"_a = 0, "reduce"_a = 0, "table"_a = 0)
      .def("poll_send", &Worker::poll_send)
      .def("not_sent", &Worker::not_sent)
      .def("sendable", &Worker::sendable)
      .def("handle_packet",
           [](Worker& self, const nb::bytes& bytes, std::int64_t now_ns) {
             static const char* const outcomes[] = {"dropped", "received", "mismatch", "nack"};
             const auto received = self.handle_packet(bytes_of(bytes), now_ns);
             return nb::make_tuple(outcomes[static_cast<int>(received.outcome)], name(received.drop), received.header,
                                   received.first, received.finished, to_bytes(received.values));
           })
      .def("poll_timeout", &Worker::poll_timeout)
      .def("next_send_ns", &Worker::next_send_ns)
      .def("handle_timeout", &Worker::handle_timeout)
      .def_prop_ro("idle", &Worker::idle)
      .def_prop_ro("in_flight", &Worker::in_flight)
      .def_prop_ro("probe_results", &Worker::probe_results)
      .def_prop_ro("oldest_outstanding", &Worker::oldest_outstanding)
      .def_prop_ro("retransmissions", &Worker::retransmissions)
      .def_prop_ro("packets_sent", &Worker::packets_sent)
      .def_prop_ro("smoothed_rtt_ns", &Worker::smoothed_rtt_ns)
      .def_prop_ro("congestion_window", &Worker::congestion_window)
      .def_prop_ro("control", [](const Worker& self) {
        static const char* const names[] = {"slow_start", "delay", "share"};
        return names[static_cast<int>(self.control())];
      });
  bind_value(worker);
}
