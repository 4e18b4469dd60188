// The hardware profile of the aggregation protocol for Tofino (TNA, T2NA). netfold.p4 is the same for bmv2, and has the
// theory of operation.
//
// What differs. A register can be accessed once by a packet, in one of the pipeline's stages, so a slot's chunk moves on
// before its bitmap is read: a contribution to the next chunk opens it although the present chunk is not complete. An
// honest worker cannot send such a packet (docs/reference/protocol.md, why a slot may be reused), and no sum is wrong
// after one: the slot's other contributions are then stale. Chunks are compared as 32 bits with a sign, so the control
// plane ends a generation before chunk 2^31. A mismatch tells every worker what its sender called; the sender learns
// over the control connection that its peers ended. Slot s of a new job begins with chunk s - S, complete. With a
// parent, too, a slot moves on although the parent's result is not there; the answer above holds for it as well.
// Nothing compares the owner of the pipeline: the switch's own control interface has one client.
#include <core.p4>
#if __TARGET_TOFINO__ == 2
#include <t2na.p4>
#else
#include <tna.p4>
#endif

#ifndef NETFOLD_VALUES
#define NETFOLD_VALUES 32
#endif
// For egress, in front of the packet.
header bridge_t {
  bit<16> index;
  bit<8> leaving;  // leaving_t
}
#define NETFOLD_BRIDGE bridge_t
#include "shared.p4"

parser IngressParser(packet_in packet, out headers_t hdr, out metadata_t meta,
                     out ingress_intrinsic_metadata_t intrinsic) {
  Headers() headers;
  state start {
    packet.extract(intrinsic);
    packet.advance(PORT_METADATA_SIZE);
    meta.port = (port_t)intrinsic.ingress_port;
    meta.disagrees = 0;
    headers.apply(packet, hdr);
    transition accept;
  }
}

// A register of one value for each slot, and what a packet does to it.
#define CELL(i)                                                                                   \
  Register<bit<32>, bit<32>>(NETFOLD_SLOTS) sum_##i;                                              \
  RegisterAction<bit<32>, bit<32>, bit<32>>(sum_##i) store_##i = {                                \
    void apply(inout bit<32> sum, out bit<32> result) {                                           \
      sum = hdr.values.v##i;                                                                      \
      result = sum;                                                                               \
    }                                                                                             \
  };                                                                                              \
  RegisterAction<bit<32>, bit<32>, bit<32>>(sum_##i) add_##i = {                                  \
    void apply(inout bit<32> sum, out bit<32> result) {                                           \
      sum = sum + hdr.values.v##i;                                                                \
      result = sum;                                                                               \
    }                                                                                             \
  };                                                                                              \
  RegisterAction<bit<32>, bit<32>, bit<32>>(sum_##i) larger_##i = {                               \
    void apply(inout bit<32> sum, out bit<32> result) {                                           \
      if ((int<32>)sum < (int<32>)hdr.values.v##i) {                                              \
        sum = hdr.values.v##i;                                                                    \
      }                                                                                           \
      result = sum;                                                                               \
    }                                                                                             \
  };                                                                                              \
  RegisterAction<bit<32>, bit<32>, bit<32>>(sum_##i) or_##i = {                                   \
    void apply(inout bit<32> sum, out bit<32> result) {                                           \
      sum = sum | hdr.values.v##i;                                                                \
      result = sum;                                                                               \
    }                                                                                             \
  };                                                                                              \
  action do_store_##i() { hdr.values.v##i = store_##i.execute(meta.slot); }                       \
  action do_add_##i() { hdr.values.v##i = add_##i.execute(meta.slot); }                           \
  action do_larger_##i() { hdr.values.v##i = larger_##i.execute(meta.slot); }                     \
  action do_or_##i() { hdr.values.v##i = or_##i.execute(meta.slot); }                             \
  table value_##i {                                                                               \
    key = { step: exact; }                                                                        \
    actions = { do_store_##i; do_add_##i; do_larger_##i; do_or_##i; NoAction; }                   \
    default_action = NoAction();                                                                  \
    const entries = {                                                                             \
      STEP_STORE: do_store_##i();                                                                 \
      STEP_ADD: do_add_##i();                                                                     \
      STEP_LARGER: do_larger_##i();                                                               \
      STEP_OR: do_or_##i();                                                                       \
    }                                                                                             \
    size = 4;                                                                                     \
  }

// Values are little-endian in a packet.
#define SWAP(i) \
  hdr.values.v##i = hdr.values.v##i[7:0] ++ hdr.values.v##i[15:8] ++ hdr.values.v##i[23:16] ++ hdr.values.v##i[31:24];
#define CLEAR(i) hdr.values.v##i = 0;
#define APPLY(i) value_##i.apply();

typedef bit<4> step_t;
const step_t STEP_STORE = 1;
const step_t STEP_ADD = 2;
const step_t STEP_LARGER = 3;
const step_t STEP_OR = 4;

control Values(inout headers_t hdr, in metadata_t meta, in step_t step) {
  EACH(CELL)
  apply { EACH(APPLY) }
}

control SwitchIngress(inout headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_t intrinsic,
                      in ingress_intrinsic_metadata_from_parser_t from_parser,
                      inout ingress_intrinsic_metadata_for_deparser_t for_deparser,
                      inout ingress_intrinsic_metadata_for_tm_t for_tm) {
  Check() check;
  Answer() answer;
  Values() values;
  Counter<bit<32>, bit<10>>(NETFOLD_JOBS * NETFOLD_COUNTERS, CounterType_t.PACKETS) outcomes;

  Register<int<32>, bit<32>>(NETFOLD_SLOTS) slot_chunk;
  RegisterAction<int<32>, bit<32>, int<32>>(slot_chunk) enter = {
    void apply(inout int<32> chunk, out int<32> before) {
      before = chunk;
      if (chunk < (int<32>)hdr.netfold.chunk[31:0]) {
        chunk = (int<32>)hdr.netfold.chunk[31:0];
      }
    }
  };

  RegisterAction<int<32>, bit<32>, int<32>>(slot_chunk) look = {
    void apply(inout int<32> chunk, out int<32> before) { before = chunk; }
  };

  Register<bit<32>, bit<32>>(NETFOLD_SLOTS) slot_workers;
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_workers) first_worker = {
    void apply(inout bit<32> workers, out bit<32> before) {
      workers = meta.member;
      before = 0;
    }
  };
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_workers) next_worker = {
    void apply(inout bit<32> workers, out bit<32> before) {
      before = workers;
      workers = workers | meta.member;
    }
  };
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_workers) get_workers = {
    void apply(inout bit<32> workers, out bit<32> before) { before = workers; }
  };

  // Of a job with a parent: 1 once the parent's result has come.
  Register<bit<8>, bit<32>>(NETFOLD_SLOTS) slot_complete;
  RegisterAction<bit<8>, bit<32>, bit<8>>(slot_complete) open_slot = {
    void apply(inout bit<8> complete, out bit<8> before) {
      complete = 0;
      before = 0;
    }
  };
  RegisterAction<bit<8>, bit<32>, bit<8>>(slot_complete) get_complete = {
    void apply(inout bit<8> complete, out bit<8> before) { before = complete; }
  };
  RegisterAction<bit<8>, bit<32>, bit<8>>(slot_complete) finish_slot = {
    void apply(inout bit<8> complete, out bit<8> before) {
      before = complete;
      complete = 1;
    }
  };

  // The call descriptor, in words of 32 bits. Each action returns the word that was agreed on.
#define WORD(name, field)                                                     \
  Register<bit<32>, bit<32>>(NETFOLD_SLOTS) slot_##name;                      \
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_##name) set_##name = {       \
    void apply(inout bit<32> word, out bit<32> agreed) {                      \
      word = field;                                                           \
      agreed = word;                                                          \
    }                                                                         \
  };                                                                          \
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_##name) get_##name = {       \
    void apply(inout bit<32> word, out bit<32> agreed) { agreed = word; }     \
  };
  bit<32> shape = 0;
  bit<32> choices = 0;
  WORD(operation, hdr.netfold.operation)
  WORD(elements, hdr.netfold.elements)
  WORD(shape, shape)
  WORD(choices, choices)

  // The result's packet number, whose high half is 0, and the worker whose contribution came last.
  Register<bit<32>, bit<16>>(NETFOLD_JOBS) job_results;
  RegisterAction<bit<32>, bit<16>, bit<32>>(job_results) next_result = {
    void apply(inout bit<32> count, out bit<32> number) {
      count = count + 1;
      number = count;
    }
  };
  Register<bit<32>, bit<16>>(NETFOLD_JOBS) job_mismatches;
  RegisterAction<bit<32>, bit<16>, bit<32>>(job_mismatches) next_mismatch = {
    void apply(inout bit<32> count, out bit<32> number) {
      count = count + 1;
      number = count;
    }
  };
  Register<bit<32>, bit<16>>(NETFOLD_JOBS) job_sums;
  RegisterAction<bit<32>, bit<16>, bit<32>>(job_sums) next_sum = {
    void apply(inout bit<32> count, out bit<32> number) {
      count = count + 1;
      number = count;
    }
  };
  bit<32> number = 0;
  bit<32> last = 0;
  WORD(number, number)
  WORD(last, last)

  action forward(port_t port) { for_tm.ucast_egress_port = (PortId_t)port; }
  action flood() { for_tm.mcast_grp_a = 1; }
  table hosts {
    key = { hdr.ethernet.dst: exact; }
    actions = { forward; flood; }
    default_action = flood();
    size = 1024;
  }

  action swap() { EACH(SWAP) }
  action clear() { EACH(CLEAR) }

  apply {
    hdr.bridge.setValid();
    hdr.bridge.leaving = FORWARDED;
    bool counts;
    check.apply(hdr, meta, counts);
    if (!counts) {
      hosts.apply();
    } else {
      step_t step = 0;
      if (meta.outcome == STORED) {
        int<32> before = 0;
        if (meta.job.from_parent == 1) {
          before = look.execute(meta.slot);
        } else {
          before = enter.execute(meta.slot);
        }
        int<32> ahead = (int<32>)hdr.netfold.chunk[31:0] - before;
        if (ahead < 0) {
          meta.outcome = STALE;
        } else {
          bit<1> opens = 0;
          if (ahead != 0 && meta.job.from_parent == 0) {
            opens = 1;
          }
          shape = hdr.netfold.count ++ hdr.netfold.wire ++ hdr.netfold.reduce;
          choices = (bit<32>)hdr.netfold.choices;
          bit<32> differs = 0;
          if (opens == 1) {
            set_operation.execute(meta.slot);
            set_elements.execute(meta.slot);
            set_shape.execute(meta.slot);
            set_choices.execute(meta.slot);
          } else {
            differs = differs | (get_operation.execute(meta.slot) ^ hdr.netfold.operation);
            differs = differs | (get_elements.execute(meta.slot) ^ hdr.netfold.elements);
            differs = differs | (get_shape.execute(meta.slot) ^ shape);
            differs = differs | (get_choices.execute(meta.slot) ^ choices);
          }
          bit<32> had = 0;
          if (opens == 1) {
            had = first_worker.execute(meta.slot);
          } else if (meta.job.from_parent == 1 || differs != 0) {
            had = get_workers.execute(meta.slot);
          } else {
            had = next_worker.execute(meta.slot);
          }
          bit<1> mismatch = 0;
          if (hdr.netfold.flags & MISMATCH != 0) {
            mismatch = 1;
          }
          bit<8> complete = 0;
          if (opens == 1) {
            complete = open_slot.execute(meta.slot);
          } else if (meta.job.from_parent == 1 && ahead == 0 && mismatch == 0 && had == meta.job.all && differs == 0) {
            complete = finish_slot.execute(meta.slot);
          } else {
            complete = get_complete.execute(meta.slot);
          }
          if (meta.job.from_parent == 1) {
            if (ahead == 0 && complete == 1) {
              meta.outcome = DUPLICATE;
            } else if (mismatch == 1) {
              meta.outcome = DISAGREES;
            } else if (ahead != 0 || had != meta.job.all) {
              meta.outcome = WINDOW;
            } else if (differs != 0) {
              meta.outcome = MALFORMED;
            } else {
              meta.outcome = COMPLETED;
            }
          } else if (differs != 0) {
            meta.outcome = DISAGREES;
          } else if (had == meta.job.all) {
            if (meta.job.has_parent == 1 && complete == 0) {
              meta.outcome = SUM_RESENT;
            } else {
              meta.outcome = RESENT;
            }
          } else if (had & meta.member != 0) {
            meta.outcome = DUPLICATE;
          } else if (had | meta.member == meta.job.all) {
            if (meta.job.has_parent == 1) {
              meta.outcome = SUMMED;
            } else {
              meta.outcome = COMPLETED;
            }
          }
          if (meta.outcome == RESENT || meta.outcome == SUM_RESENT) {
            clear();  // an or with nothing reads what the slot keeps
            step = STEP_OR;
          } else if (meta.outcome == DISAGREES) {
            clear();
            meta.disagrees = 1;
          } else if (meta.outcome == STORED || meta.outcome == SUMMED || meta.outcome == COMPLETED) {
            swap();
            if (opens == 1 || meta.job.from_parent == 1) {
              step = STEP_STORE;
            } else if (meta.operator == SUM) {
              step = STEP_ADD;
            } else if (meta.operator == MAX) {
              step = STEP_LARGER;
            } else {
              step = STEP_OR;
            }
          }
          values.apply(hdr, meta, step);
          if (step != 0) {
            swap();
          }
        }
      }
      outcomes.count(meta.job.index[3:0] ++ meta.job.from_parent ++ meta.outcome);
      hdr.netfold.worker = meta.name;
      hdr.bridge.leaving = TO_WORKERS;
      if (meta.job.from_parent == 1) {
        hdr.bridge.leaving = PASSED_ON;
      }
      if (meta.outcome == COMPLETED) {
        number = next_result.execute(meta.job.index);
        last = (bit<32>)meta.name;
        set_number.execute(meta.slot);
        set_last.execute(meta.slot);
        for_tm.mcast_grp_a = (MulticastGroupId_t)meta.job.group;
      } else if (meta.outcome == RESENT) {
        number = get_number.execute(meta.slot);
        last = get_last.execute(meta.slot);
        hdr.netfold.worker = last[15:0];
        for_tm.ucast_egress_port = intrinsic.ingress_port;
      } else if (meta.outcome == DISAGREES) {
        number = next_mismatch.execute(meta.job.index);
        for_tm.mcast_grp_a = (MulticastGroupId_t)meta.job.group;
      } else if (meta.outcome == SUMMED || meta.outcome == SUM_RESENT) {
        number = next_sum.execute(meta.job.index);
        hdr.bridge.leaving = TO_PARENT;
        for_tm.ucast_egress_port = (PortId_t)meta.job.up;
      } else {
        for_deparser.drop_ctl = 1;
      }
      hdr.bridge.index = meta.job.index;
      hdr.netfold.packet_number = 32w0 ++ number;
      answer.apply(hdr, meta);
    }
  }
}

control IngressDeparser(packet_out packet, inout headers_t hdr, in metadata_t meta,
                        in ingress_intrinsic_metadata_for_deparser_t for_deparser) {
  apply { packet.emit(hdr); }
}

parser EgressParser(packet_in packet, out headers_t hdr, out metadata_t meta,
                    out egress_intrinsic_metadata_t intrinsic) {
  Headers() headers;
  state start {
    packet.extract(intrinsic);
    packet.extract(hdr.bridge);
    meta.disagrees = 0;
    meta.job.index = hdr.bridge.index;
    meta.leaving = hdr.bridge.leaving;
    headers.apply(packet, hdr);
    transition accept;
  }
}

control SwitchEgress(inout headers_t hdr, inout metadata_t meta, in egress_intrinsic_metadata_t intrinsic,
                     in egress_intrinsic_metadata_from_parser_t from_parser,
                     inout egress_intrinsic_metadata_for_deparser_t for_deparser,
                     inout egress_intrinsic_metadata_for_output_port_t for_output) {
  Address() address;

  apply {
    if (meta.leaving == TO_PARENT || (meta.leaving != FORWARDED && intrinsic.egress_rid != 0)) {
      address.apply(hdr, meta, intrinsic.egress_rid - 1);
    }
    hdr.bridge.setInvalid();
  }
}

control EgressDeparser(packet_out packet, inout headers_t hdr, in metadata_t meta,
                       in egress_intrinsic_metadata_for_deparser_t for_deparser) {
  Checksum() ipv4_checksum;

  apply {
    if (hdr.ipv4.isValid()) {
      hdr.ipv4.checksum = ipv4_checksum.update({hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.length,
                                                hdr.ipv4.id, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol,
                                                hdr.ipv4.src, hdr.ipv4.dst});
    }
    packet.emit(hdr);
  }
}

// Two things are the control plane's here: a flooded frame is kept from its own port by the multicast group's exclusion
// (L2 exclusion id), and IPv4 packets with options are the operator's to refuse.
Pipeline(IngressParser(), SwitchIngress(), IngressDeparser(), EgressParser(), SwitchEgress(), EgressDeparser()) pipe;
Switch(pipe) main;
