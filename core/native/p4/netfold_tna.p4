// The hardware profile of the aggregation protocol for Tofino (TNA, T2NA). netfold.p4 is the same for bmv2, and has the
// theory of operation.
//
// Differences. A register can be accessed once by a packet, in one of the pipeline's stages, so a slot's chunk moves
// on before its bitmap is read: a contribution to the next chunk opens it although the present chunk is not complete.
// An honest worker cannot send such a packet (docs/reference/protocol.md, why a slot may be reused), and no sum is wrong
// after one: the slot's other contributions are then stale. Slot s of a new job begins with chunk s - S, complete.
// Chunks are compared as 32 bits with a sign, so the control plane ends a generation before chunk 2^31. Any above is
// stale, but for 2^32 + s - S, which is the chunk that slot s of a new job begins with. A mismatch tells every worker
// what its sender called; the sender learns over the control connection that its peers ended. With a parent, too, a slot
// moves on although the parent's result is not there; the answer above holds for it as well. Nothing compares the owner
// of the pipeline: the switch's own control interface has one client.
//
// The fit. An action has one stage, so each step below is a table or a register action that needs only what earlier
// stages left: order (slot_chunk), differs (slot_operation, slot_shape), had (slot_workers), has_result
// (slot_complete), `progress`, values. Comparisons of a register with the packet are in its stateful ALU. `had` and the
// worker's number decide in one ternary table, because a worker's bit is 1 << its number, and the bits of workers that
// the job has not are set.
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

typedef bit<2> order_t;
const order_t ORDER_PRESENT = 0;
const order_t ORDER_NEXT = 1;
const order_t ORDER_STALE = 2;
const order_t ORDER_BEYOND = 3;  // of a packet from the parent, where a worker's would be next

typedef bit<2> kind_t;
const kind_t KIND_NONE = 0;  // nothing leaves
const kind_t KIND_RESULT = 1;
const kind_t KIND_MISMATCH = 2;
const kind_t KIND_SUM = 3;

#define ALL 0xffffffff  // workers

struct pair_t {
  bit<32> lo;
  bit<32> hi;
}

typedef bit<4> step_t;
const step_t STEP_STORE = 1;
const step_t STEP_ADD = 2;
const step_t STEP_LARGER = 3;
const step_t STEP_OR = 4;

control Values(inout headers_t hdr, in metadata_t meta, in step_t step) {
  EACH(CELL)
  apply { EACH(APPLY) }
}

#define LITERAL(text) #text
// Tofino 2 has 48 containers of 32 bits in which a packet's fields can be computed. A value's bytes are swapped within
// one; egress leaves them to ingress.
#define PLACE(i) @pa_container_size("ingress", LITERAL(hdr.values.v##i), 32)
EACH(PLACE)
@pa_container_size("ingress", "hdr.udp.src", 16)
@pa_container_size("ingress", "hdr.udp.dst", 16)
@pa_container_size("ingress", "hdr.udp.length", 16)
@pa_container_size("ingress", "hdr.udp.checksum", 16)
@pa_container_size("egress", "hdr.ethernet.dst", 16)
@pa_container_size("egress", "hdr.ethernet.src", 16)
@pa_container_size("egress", "hdr.ipv4.src", 16)
@pa_container_size("egress", "hdr.ipv4.dst", 16)
@pa_container_size("egress", "hdr.udp.src", 16)
@pa_container_size("egress", "hdr.udp.dst", 16)
@pa_container_size("egress", "hdr.netfold.job", 16)
@pa_container_size("egress", "hdr.netfold.epoch", 16)
@pa_container_size("egress", "hdr.netfold.incarnation", 16)
// A pair of whole words reaches a stateful ALU without a hash function, of which a stage has few.
@pa_container_size("ingress", "hdr.netfold.operation", 32)
@pa_container_size("ingress", "hdr.netfold.elements", 32)
@pa_container_size("ingress", "hdr.netfold.shape", 32)
#if __TARGET_TOFINO__ == 1
@pa_container_size("ingress", "meta.job.index", 16)
// Two tables of one stage cannot write to one container.
@pa_solitary("ingress", "differs_2")
@pa_solitary("ingress", "differs_3")
#endif
control SwitchIngress(inout headers_t hdr, inout metadata_t meta, in ingress_intrinsic_metadata_t intrinsic,
                      in ingress_intrinsic_metadata_from_parser_t from_parser,
                      inout ingress_intrinsic_metadata_for_deparser_t for_deparser,
                      inout ingress_intrinsic_metadata_for_tm_t for_tm) {
  Check() check;
  Answer() answer;
  Values() values;
  Counter<bit<32>, bit<14>>(NETFOLD_JOBS * NETFOLD_COUNTERS, CounterType_t.PACKETS) outcomes;

  // The relation of a packet's chunk to the slot's. Only a worker's packet moves the slot on.
  Register<int<32>, bit<32>>(NETFOLD_SLOTS) slot_chunk;
  RegisterAction<int<32>, bit<32>, order_t>(slot_chunk) enter = {
    void apply(inout int<32> chunk, out order_t order) {
      if (chunk < (int<32>)hdr.netfold.chunk[31:0]) {
        order = ORDER_NEXT;
        chunk = (int<32>)hdr.netfold.chunk[31:0];
      } else if (chunk > (int<32>)hdr.netfold.chunk[31:0]) {
        order = ORDER_STALE;
      } else {
        order = ORDER_PRESENT;
      }
    }
  };
#if NETFOLD_LEAF
  RegisterAction<int<32>, bit<32>, order_t>(slot_chunk) look = {
    void apply(inout int<32> chunk, out order_t order) {
      if (chunk < (int<32>)hdr.netfold.chunk[31:0]) {
        order = ORDER_BEYOND;
      } else if (chunk > (int<32>)hdr.netfold.chunk[31:0]) {
        order = ORDER_STALE;
      } else {
        order = ORDER_PRESENT;
      }
    }
  };
#endif

  // The workers that contributed. The bits of workers that the job has not are set, so a complete chunk has all bits.
  Register<bit<32>, bit<32>>(NETFOLD_SLOTS) slot_workers;
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_workers) first_worker = {
    void apply(inout bit<32> workers, out bit<32> before) {
      workers = meta.present;
      before = meta.absent;
    }
  };
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_workers) next_worker = {
    void apply(inout bit<32> workers, out bit<32> before) {
      before = workers;
      workers = workers | meta.present;
    }
  };

#if NETFOLD_LEAF
  RegisterAction<bit<32>, bit<32>, bit<32>>(slot_workers) get_workers = {
    void apply(inout bit<32> workers, out bit<32> before) { before = workers; }
  };

  // In a job with a parent: 1 once the parent's result has come.
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
#endif

  // The call descriptor, in pairs of words. The first contribution stores it, and each later one learns whether it
  // differs.
#define CALL(name, first, second)                                             \
  Register<pair_t, bit<32>>(NETFOLD_SLOTS) slot_##name;                       \
  RegisterAction<pair_t, bit<32>, bit<1>>(slot_##name) set_##name = {         \
    void apply(inout pair_t call, out bit<1> differs) {                       \
      call.lo = first;                                                        \
      call.hi = second;                                                       \
      differs = 0;                                                            \
    }                                                                         \
  };                                                                          \
  RegisterAction<pair_t, bit<32>, bit<1>>(slot_##name) check_##name = {       \
    void apply(inout pair_t call, out bit<1> differs) {                       \
      if (call.lo != first || call.hi != second) {                            \
        differs = 1;                                                          \
      } else {                                                                \
        differs = 0;                                                          \
      }                                                                       \
    }                                                                         \
  };
  CALL(operation, hdr.netfold.operation, hdr.netfold.elements)
  CALL(shape, hdr.netfold.shape, (bit<32>)hdr.netfold.choices)

  // packet_number of what leaves, by job and kind; the high half is 0.
  Register<bit<32>, bit<10>>(4 * NETFOLD_JOBS) job_answers;
  RegisterAction<bit<32>, bit<10>, bit<32>>(job_answers) next_answer = {
    void apply(inout bit<32> count, out bit<32> number) {
      count = count + 1;
      number = count;
    }
  };
  // The result's packet_number, and the worker whose contribution came last.
#define WORD(name, type, field)                                        \
  Register<type, bit<32>>(NETFOLD_SLOTS) slot_##name;                  \
  RegisterAction<type, bit<32>, type>(slot_##name) set_##name = {      \
    void apply(inout type word) { word = field; }                      \
  };                                                                   \
  RegisterAction<type, bit<32>, type>(slot_##name) get_##name = {      \
    void apply(inout type word, out type kept) { kept = word; }        \
  };
  WORD(number, bit<32>, hdr.netfold.packet_number[31:0])
  WORD(last, bit<16>, meta.name)

  action forward(port_t port) { for_tm.ucast_egress_port = (PortId_t)port; }
  action flood() { for_tm.mcast_grp_a = 1; }
  table hosts {
    key = { hdr.ethernet.dst: exact; }
    actions = { forward; flood; }
    default_action = flood();
    size = 1024;
  }

  action swap() { EACH(SWAP) }
  action swap_back() { EACH(SWAP) }

  step_t step = 0;
  order_t order = 0;
  bit<1> differs_0 = 0;
  bit<1> differs_1 = 0;
  bit<32> had = 0;
  bit<8> has_result = 0;
  kind_t kind = 0;

  action take(step_t taken) { step = taken; }
  table steps {
    key = {
      meta.job.from_parent: ternary;
      order: ternary;
      meta.operator: ternary;
    }
    actions = { take; }
    default_action = take(STEP_OR);
    const entries = {
      (1, _, _): take(STEP_STORE);
      (_, ORDER_NEXT, _): take(STEP_STORE);
      (_, _, SUM): take(STEP_ADD);
      (_, _, MAX): take(STEP_LARGER);
    }
    size = 4;
  }

#if NETFOLD_LEAF
  action do_open() { has_result = open_slot.execute(meta.slot); }
  action do_finish() { has_result = finish_slot.execute(meta.slot); }
  action do_get() { has_result = get_complete.execute(meta.slot); }
  table results {
    key = {
      meta.job.from_parent: ternary;
      order: ternary;
      differs_0: ternary;
      differs_1: ternary;
      hdr.netfold.flags: ternary;
      had: ternary;
    }
    actions = { do_open; do_finish; do_get; NoAction; }
    default_action = NoAction();
    const entries = {
      (_, ORDER_NEXT, _, _, _, _): do_open();
      (1, ORDER_PRESENT, 0, 0, FROM_SWITCH, ALL): do_finish();
      (_, _, _, _, _, _): do_get();
    }
    size = 3;
  }
#endif

  action store() { }
  action drop(outcome_t outcome) {
    meta.outcome = outcome;
    step = 0;
  }
  // The packet becomes the result, or the sum for the parent.
  action complete(outcome_t outcome, kind_t numbered) {
    meta.outcome = outcome;
    kind = numbered;
  }
  // An or with nothing reads what the slot keeps.
  action resend(outcome_t outcome, kind_t numbered) {
    meta.outcome = outcome;
    kind = numbered;
    step = STEP_OR;
    EACH(CLEAR)
  }
  action disagree() {
    meta.outcome = DISAGREES;
    kind = KIND_MISMATCH;
    meta.disagrees = 1;
    step = 0;
    EACH(CLEAR)
  }
  // `had` has the bits of the workers that contributed before, and of those that the job has not.
#define BIT(i) (32w1 << i)
#define HAS(i) (0, _, _, _, _, _, _, i, BIT(i) &&& BIT(i)): drop(DUPLICATE);
#define ROOT_LACKS(i) (0, 0, _, _, _, _, _, i, (ALL ^ BIT(i)) &&& (ALL ^ BIT(i))): complete(COMPLETED, KIND_RESULT);
#define LEAF_LACKS(i) (0, 1, _, _, _, _, _, i, (ALL ^ BIT(i)) &&& (ALL ^ BIT(i))): complete(SUMMED, KIND_SUM);
  table progress {
    key = {
      meta.job.from_parent: ternary;
      meta.job.has_parent: ternary;
      order: ternary;
      differs_0: ternary;
      differs_1: ternary;
      has_result: ternary;
      hdr.netfold.flags: ternary;
      hdr.netfold.worker: ternary;
      had: ternary;
    }
    actions = { store; drop; complete; resend; disagree; }
    default_action = store();
    const entries = {
      (1, _, ORDER_PRESENT, _, _, 1, _, _, _): drop(DUPLICATE);
      (1, _, _, _, _, _, MISMATCH &&& MISMATCH, _, _): disagree();
      (1, _, ORDER_PRESENT, 0, 0, _, _, _, ALL): complete(COMPLETED, KIND_RESULT);
      (1, _, ORDER_PRESENT, _, _, _, _, _, ALL): drop(MALFORMED);
      (1, _, _, _, _, _, _, _, _): drop(WINDOW);
      (0, _, _, 1, _, _, _, _, _): disagree();
      (0, _, _, _, 1, _, _, _, _): disagree();
      (0, 1, _, _, _, 0, _, _, ALL): resend(SUM_RESENT, KIND_SUM);
      (0, _, _, _, _, _, _, _, ALL): resend(RESENT, KIND_RESULT);
      FIRST_32(HAS)
      FIRST_32(ROOT_LACKS)
      FIRST_32(LEAF_LACKS)
    }
    size = 128;
  }

  apply {
    hdr.bridge.setValid();
    hdr.bridge.leaving = FORWARDED;
    bool counts;
    check.apply(hdr, meta, counts);
    if (!counts) {
      hosts.apply();
    } else {
      swap();
      if (meta.outcome == STORED) {
#if NETFOLD_LEAF
        if (meta.job.from_parent == 1) {
          order = look.execute(meta.slot);
        } else
#endif
        {
          order = enter.execute(meta.slot);
        }
        if (order == ORDER_STALE) {
          meta.outcome = STALE;
        } else {
          if (order == ORDER_NEXT) {
            differs_0 = set_operation.execute(meta.slot);
            differs_1 = set_shape.execute(meta.slot);
          } else {
            differs_0 = check_operation.execute(meta.slot);
            differs_1 = check_shape.execute(meta.slot);
          }
          if (order == ORDER_NEXT) {
            had = first_worker.execute(meta.slot);
          } else if (meta.job.from_parent == 0 && differs_0 == 0 && differs_1 == 0) {
            had = next_worker.execute(meta.slot);
          }
#if NETFOLD_LEAF
          else {
            had = get_workers.execute(meta.slot);
          }
          results.apply();
#endif
          steps.apply();
          progress.apply();
          values.apply(hdr, meta, step);
        }
      }
      swap_back();
      outcomes.count(meta.job.index[7:0] ++ meta.job.from_parent ++ meta.outcome);
      hdr.netfold.worker = meta.name;
      hdr.netfold.packet_number[63:32] = 0;
      hdr.bridge.index = meta.job.index;
      if (meta.job.from_parent == 1) {
        hdr.bridge.leaving = PASSED_ON;
      } else {
        hdr.bridge.leaving = TO_WORKERS;
      }
      if (meta.outcome == RESENT) {
        hdr.netfold.packet_number[31:0] = get_number.execute(meta.slot);
        hdr.netfold.worker = get_last.execute(meta.slot);
        for_tm.ucast_egress_port = intrinsic.ingress_port;
      } else if (kind != KIND_NONE) {
        hdr.netfold.packet_number[31:0] = next_answer.execute(meta.job.index[7:0] ++ kind);
        if (meta.outcome == COMPLETED) {
          set_number.execute(meta.slot);
          set_last.execute(meta.slot);
        }
        if (kind == KIND_SUM) {
          hdr.bridge.leaving = TO_PARENT;
          for_tm.ucast_egress_port = (PortId_t)meta.job.up;
        } else {
          for_tm.mcast_grp_a = (MulticastGroupId_t)meta.job.group;
        }
      } else {
        for_deparser.drop_ctl = 1;
      }
      answer.apply(hdr, meta);
    }
  }
}

control IngressDeparser(packet_out packet, inout headers_t hdr, in metadata_t meta,
                        in ingress_intrinsic_metadata_for_deparser_t for_deparser) {
  apply { packet.emit(hdr); }
}

// The values of an answer pass egress as payload, and any other packet as a whole.
parser EgressParser(packet_in packet, out headers_t hdr, out metadata_t meta,
                    out egress_intrinsic_metadata_t intrinsic) {
  state start {
    packet.extract(intrinsic);
    packet.extract(hdr.bridge);
    meta.disagrees = 0;
    meta.job.index = hdr.bridge.index;
    meta.leaving = hdr.bridge.leaving;
    transition select(hdr.bridge.leaving) {
      FORWARDED: accept;
      default: answer;
    }
  }
  state answer {
    packet.extract(hdr.ethernet);
    packet.extract(hdr.ipv4);
    packet.extract(hdr.udp);
    packet.extract(hdr.netfold);
    transition accept;
  }
}

control SwitchEgress(inout headers_t hdr, inout metadata_t meta, in egress_intrinsic_metadata_t intrinsic,
                     in egress_intrinsic_metadata_from_parser_t from_parser,
                     inout egress_intrinsic_metadata_for_deparser_t for_deparser,
                     inout egress_intrinsic_metadata_for_output_port_t for_output) {
  Address() address;

  apply {
    if (meta.leaving != FORWARDED) {
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
