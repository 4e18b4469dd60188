// The hardware profile of the aggregation protocol for bmv2's simple_switch (v1model).
//
// Theory of operation. docs/reference/hardware-profile.md says what the profile keeps of the protocol and what not. The
// switch forwards Ethernet frames. A contribution to a job that the control plane has installed is taken out, and adds
// to its slot. The packet of the last worker becomes the result and goes to all workers by multicast. Everything else
// of a job, its hellos too, is forwarded to the control plane's host.
//
// In a tree, the packet of the last worker becomes this switch's contribution to its parent, and the parent's result
// goes to the workers. The transitions are those of core/native/protocol (switch_job.hpp, a tree of switches).
//
// A slot holds the chunk that it is for, a bit for each worker that contributed, the call, and one register for each
// value: the sum, which is the kept result once all bits are set. Chunk c of a job with S slots lies in slot c mod S,
// and S is at least twice the window: the halves of the slots are the two versions of a pool. A register has the chunk
// that a slot takes next, S behind its present chunk. The control plane gives slot s of a new job the next chunk s, and
// the bits of all workers. With a parent, a slot is complete once it also has the parent's result; until then the
// registers hold the sum.
//
// One control plane owns the pipeline. Its incarnation stands in a register, and the jobs of any other do not count: a
// control plane that was taken for dead, and is not, must not add in the slots of the next one.
//
// simple_switch runs the ingress pipeline in one thread, so a packet sees all registers as the packet before left them.
#include <core.p4>
#include <v1model.p4>

#include "shared.p4"

parser SwitchParser(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
  Headers() headers;
  state start {
    headers.apply(packet, hdr);
    meta.port = standard.ingress_port;
    transition accept;
  }
}

control CheckIpv4(inout headers_t hdr, inout metadata_t meta) {
  apply {
    verify_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
                    {hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.length, hdr.ipv4.id, hdr.ipv4.fragment,
                     hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst},
                    hdr.ipv4.checksum, HashAlgorithm.csum16);
  }
}

#define REGISTER(i) register<bit<32>>(NETFOLD_SLOTS) sum_##i;

// Values are little-endian in a packet.
#define SWAP(i) \
  hdr.values.v##i = hdr.values.v##i[7:0] ++ hdr.values.v##i[15:8] ++ hdr.values.v##i[23:16] ++ hdr.values.v##i[31:24];

#define STORE(i) sum_##i.write(meta.slot, hdr.values.v##i);

#define ADD(i)                               \
  sum_##i.read(sum, meta.slot);              \
  hdr.values.v##i = hdr.values.v##i + sum;   \
  sum_##i.write(meta.slot, hdr.values.v##i);

#define LARGER(i)                                                                              \
  sum_##i.read(sum, meta.slot);                                                                \
  hdr.values.v##i = (int<32>)hdr.values.v##i < (int<32>)sum ? sum : hdr.values.v##i;           \
  sum_##i.write(meta.slot, hdr.values.v##i);

#define OR(i)                                \
  sum_##i.read(sum, meta.slot);              \
  hdr.values.v##i = hdr.values.v##i | sum;   \
  sum_##i.write(meta.slot, hdr.values.v##i);

#define LOAD(i) sum_##i.read(hdr.values.v##i, meta.slot);

#define CLEAR(i) hdr.values.v##i = 0;

// `stores`: the packet's values take the place of the slot's.
control Values(inout headers_t hdr, in metadata_t meta, in bit<1> stores) {
  EACH(REGISTER)
  bit<32> sum;

  action swap() { EACH(SWAP) }
  action store() { EACH(STORE) }
  action add() { EACH(ADD) }
  action larger() { EACH(LARGER) }
  action or() { EACH(OR) }
  action load() { EACH(LOAD) }
  action clear() { EACH(CLEAR) }

  apply {
    swap();
    if (meta.outcome == RESENT || meta.outcome == SUM_RESENT) {
      load();
    } else if (meta.outcome == DISAGREES) {
      clear();
    } else if (stores == 1) {
      store();
    } else if (meta.operator == SUM) {
      add();
    } else if (meta.operator == MAX) {
      larger();
    } else {
      or();
    }
    swap();
  }
}

control SwitchIngress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
  Check() check;
  Answer() answer;
  Values() values;

  register<bit<64>>(NETFOLD_SLOTS) slot_next;     // the chunk that the slot takes once it is complete
  register<bit<32>>(NETFOLD_SLOTS) slot_workers;  // who has contributed
  register<bit<1>>(NETFOLD_SLOTS) slot_complete;  // of a job with a parent: its result has come
  register<bit<128>>(NETFOLD_SLOTS) slot_call;
  register<bit<16>>(NETFOLD_SLOTS) slot_first;    // who contributed first, by the number in the whole job
  register<bit<16>>(NETFOLD_SLOTS) slot_last;
  register<bit<64>>(NETFOLD_SLOTS) slot_number;   // the result's packet number
  register<bit<64>>(NETFOLD_JOBS) job_results;
  register<bit<64>>(NETFOLD_JOBS) job_mismatches;
  register<bit<64>>(NETFOLD_JOBS) job_sums;       // packets to the parent
  register<bit<64>>(2) lease;                     // the owner's incarnation; a number that the owner counts up
  counter(NETFOLD_JOBS * NETFOLD_COUNTERS, CounterType.packets) outcomes;

  action forward(port_t port) { standard.egress_spec = port; }
  action flood() { standard.mcast_grp = 1; }
  table hosts {
    key = { hdr.ethernet.dst: exact; }
    actions = { forward; flood; }
    default_action = flood();
    size = 1024;
  }

  apply {
    bool counts;
    if (standard.checksum_error == 1) {
      mark_to_drop(standard);
      return;
    }
    check.apply(hdr, meta, counts);
    if (counts) {
      bit<64> owner;
      lease.read(owner, 0);
      counts = owner == (bit<64>)meta.job.owner;
    }
    if (!counts) {
      hosts.apply();
      return;
    }
    bit<1> opens = 0;
    if (meta.outcome == STORED) {
      bit<64> next;
      slot_next.read(next, meta.slot);
      bit<32> workers;
      slot_workers.read(workers, meta.slot);
      bool summed = workers == meta.job.all;
      bit<1> has_result;
      slot_complete.read(has_result, meta.slot);
      bool complete = summed && (meta.job.has_parent == 0 || has_result == 1);
      bool present = hdr.netfold.chunk < next && hdr.netfold.chunk + (bit<64>)meta.job.mask + 1 == next;
      bit<128> call = hdr.netfold.operation ++ hdr.netfold.elements ++ hdr.netfold.shape ++ hdr.netfold.choices ++ 16w0;
      bit<128> agreed;
      slot_call.read(agreed, meta.slot);
      if (hdr.netfold.chunk < next && !present) {
        meta.outcome = STALE;
      } else if (meta.job.from_parent == 1) {
        if (present && complete) {
          meta.outcome = DUPLICATE;
        } else if (hdr.netfold.flags & MISMATCH != 0) {
          meta.outcome = DISAGREES;
          meta.disagrees = 1;
        } else if (!present || !summed) {
          meta.outcome = WINDOW;
        } else if (call != agreed) {
          meta.outcome = MALFORMED;
        } else {
          meta.outcome = COMPLETED;
          slot_complete.write(meta.slot, 1);
        }
      } else {
        if (hdr.netfold.chunk == next && complete) {
          opens = 1;
          workers = 0;
        }
        if (!present && opens == 0) {
          meta.outcome = WINDOW;
        } else if (present && call != agreed) {
          meta.outcome = DISAGREES;
          meta.disagrees = 1;
          meta.operation = agreed[127:96];
          meta.elements = agreed[95:64];
          meta.shape = agreed[63:32];
          meta.choices = agreed[31:16];
          slot_first.read(meta.first, meta.slot);
        } else if (present && complete) {
          meta.outcome = RESENT;
        } else if (present && summed) {
          meta.outcome = SUM_RESENT;
        } else if (workers & meta.member != 0) {
          meta.outcome = DUPLICATE;
        } else {
          workers = workers | meta.member;
          slot_workers.write(meta.slot, workers);
          if (opens == 1) {
            slot_next.write(meta.slot, hdr.netfold.chunk + (bit<64>)meta.job.mask + 1);
            slot_complete.write(meta.slot, 0);
            slot_call.write(meta.slot, call);
            slot_first.write(meta.slot, meta.name);
          }
          if (workers == meta.job.all) {
            meta.outcome = meta.job.has_parent == 1 ? SUMMED : COMPLETED;
          }
        }
      }
    }
    outcomes.count(((bit<32>)meta.job.index << 6) + ((bit<32>)meta.job.from_parent << 5) + (bit<32>)meta.outcome);

    if (meta.outcome == STORED || (meta.outcome >= COMPLETED && meta.outcome != ASKED)) {
      values.apply(hdr, meta, opens | meta.job.from_parent);
    }
    if (meta.outcome < COMPLETED || meta.outcome == ASKED) {
      mark_to_drop(standard);
      return;
    }
    meta.sender = hdr.netfold.worker;
    hdr.netfold.worker = meta.name;
    meta.leaving = meta.job.from_parent == 1 ? PASSED_ON : TO_WORKERS;
    bit<64> number;
    if (meta.outcome == COMPLETED) {
      job_results.read(number, (bit<32>)meta.job.index);
      number = number + 1;
      job_results.write((bit<32>)meta.job.index, number);
      slot_number.write(meta.slot, number);
      slot_last.write(meta.slot, meta.name);
    } else if (meta.outcome == RESENT) {
      slot_number.read(number, meta.slot);
      slot_last.read(hdr.netfold.worker, meta.slot);
    } else if (meta.outcome == DISAGREES) {
      job_mismatches.read(number, (bit<32>)meta.job.index);
      number = number + 1;
      job_mismatches.write((bit<32>)meta.job.index, number);
    } else {
      job_sums.read(number, (bit<32>)meta.job.index);
      number = number + 1;
      job_sums.write((bit<32>)meta.job.index, number);
      meta.leaving = TO_PARENT;
    }
    hdr.netfold.packet_number = number;
    answer.apply(hdr, meta);
    if (meta.outcome == RESENT) {
      standard.egress_spec = standard.ingress_port;
    } else if (meta.leaving == TO_PARENT) {
      standard.egress_spec = meta.job.up;
    } else {
      standard.mcast_grp = meta.job.group;
    }
  }
}

control SwitchEgress(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
  Address() address;
  FirstCall() first_call;

  apply {
    if (meta.leaving == TO_PARENT || (meta.leaving != FORWARDED && standard.egress_rid != 0)) {
      address.apply(hdr, meta, standard.egress_rid - 1);
      first_call.apply(hdr, meta, standard.egress_rid - 1);
    } else if (standard.egress_rid != 0 && standard.egress_port == standard.ingress_port) {
      mark_to_drop(standard);  // a frame is not flooded to where it came from
    }
  }
}

control UpdateIpv4(inout headers_t hdr, inout metadata_t meta) {
  apply {
    update_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
                    {hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.length, hdr.ipv4.id, hdr.ipv4.fragment,
                     hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst},
                    hdr.ipv4.checksum, HashAlgorithm.csum16);
  }
}

control SwitchDeparser(packet_out packet, in headers_t hdr) {
  apply {
    packet.emit(hdr.ethernet);
    packet.emit(hdr.ipv4);
    packet.emit(hdr.udp);
    packet.emit(hdr.netfold);
    packet.emit(hdr.values);
  }
}

V1Switch(SwitchParser(), CheckIpv4(), SwitchIngress(), SwitchEgress(), UpdateIpv4(), SwitchDeparser()) main;
