// Independent of the architecture: packets, a packet's checks, and how what leaves is addressed. No extern is used.
#ifndef NETFOLD_SHARED_P4
#define NETFOLD_SHARED_P4

#include "values.p4"

// Slots of all jobs together; a job has a power of two of them.
#ifndef NETFOLD_SLOTS
#define NETFOLD_SLOTS 4096
#endif
// Jobs at once, and workers of a job at this switch. A switch below this one is a worker.
#ifndef NETFOLD_JOBS
#define NETFOLD_JOBS 16
#endif
#define NETFOLD_WORKERS 32
// Whether a job may have a parent: this switch is then one below the root of a tree.
#ifndef NETFOLD_LEAF
#define NETFOLD_LEAF 1
#endif

typedef bit<48> mac_t;
typedef bit<32> ip_t;
typedef bit<9> port_t;

const bit<16> TYPE_IPV4 = 0x0800;
const bit<8> PROTOCOL_UDP = 17;
const bit<24> MAGIC_AND_VERSION = 0x4e4601;
const bit<16> UDP_BYTES = 8 + 48 + 4 * NETFOLD_VALUES;

const bit<8> FROM_SWITCH = 1;
const bit<8> MISMATCH = 4;
const bit<8> HELLO = 8;
const bit<8> NACK = 16;

const bit<8> U8 = 8;
const bit<8> U16 = 9;
const bit<8> I32 = 6;
const bit<8> U32 = 10;
const bit<8> U64 = 11;
const bit<8> SUM = 0;
const bit<8> MAX = 3;
const bit<8> BOR = 5;

// What became of a packet. 1 to 12 are the drop reasons of core/native/protocol (packet.hpp), with their numbers. The index
// of a counter is the job's index * 64 + the outcome, + 32 for a packet of the parent.
#define NETFOLD_COUNTERS 64
typedef bit<5> outcome_t;
const outcome_t STORED = 0;
const outcome_t MALFORMED = 1;
const outcome_t FOREIGN = 3;
const outcome_t INCARNATION = 4;
const outcome_t EPOCH = 5;
const outcome_t WORKER = 6;
const outcome_t SOURCE = 7;
const outcome_t DIRECTION = 9;
const outcome_t STALE = 10;
const outcome_t DUPLICATE = 11;
const outcome_t WINDOW = 12;
const outcome_t COMPLETED = 13;
const outcome_t RESENT = 14;
const outcome_t DISAGREES = 15;
const outcome_t SUMMED = 16;      // the last worker's, of a job with a parent: the sum goes up
const outcome_t SUM_RESENT = 17;  // a duplicate before the parent's result: the sum goes up once more
const outcome_t ASKED = 18;       // a NACK of the parent, which the profile leaves out

// The ways in which a packet leaves.
typedef bit<8> leaving_t;
const leaving_t FORWARDED = 0;
const leaving_t TO_WORKERS = 1;  // the answer to a worker's packet
const leaving_t TO_PARENT = 2;
const leaving_t PASSED_ON = 3;  // the parent's answer, to the workers

header ethernet_t {
  mac_t dst;
  mac_t src;
  bit<16> type;
}

header ipv4_t {
  bit<4> version;
  bit<4> ihl;
  bit<8> tos;
  bit<16> length;
  bit<16> id;
  bit<16> fragment;
  bit<8> ttl;
  bit<8> protocol;
  bit<16> checksum;
  ip_t src;
  ip_t dst;
}

header udp_t {
  bit<16> src;
  bit<16> dst;
  bit<16> length;
  bit<16> checksum;
}


// docs/reference/protocol.md
header netfold_t {
  bit<16> magic;
  bit<8> version;
  bit<8> flags;
  bit<32> job;
  bit<32> epoch;
  bit<32> incarnation;
  bit<64> chunk;
  bit<64> packet_number;
  bit<32> operation;
  bit<32> elements;
  bit<16> worker;
  bit<32> shape;  // count, wire and reduce
  bit<16> choices;
}

#define FIELD(i) bit<32> v##i;
header values_t {
  EACH(FIELD)
}
#undef FIELD

struct headers_t {
#ifdef NETFOLD_BRIDGE
  NETFOLD_BRIDGE bridge;  // for egress, where an architecture carries no metadata there
#endif
  ethernet_t ethernet;
  ipv4_t ipv4;
  udp_t udp;
  netfold_t netfold;
  values_t values;
}

// A job as the control plane granted it.
struct job_t {
  bit<16> index;  // among this switch's jobs
  bit<1> from_parent;  // the packet came to the port for the parent's packets
  // The identity that the packet must carry: in a packet from the parent, this switch's identity there.
  bit<32> id;
  bit<32> epoch;
  bit<32> incarnation;
  bit<32> owner;    // this switch's incarnation
  bit<16> workers;  // of a packet from the parent: the number of this switch there
  bit<32> all;      // the bits of all workers
  bit<32> base;     // its first slot
  bit<32> mask;     // its slots - 1
  bit<16> group;    // multicast group of its workers
  bit<1> has_parent;
  port_t up;  // the port that leads to the parent
}

struct metadata_t {
  job_t job;
  port_t port;       // where the packet came in
  bit<32> member;    // the sender's bit
  bit<32> absent;    // the bits of workers that the job has not
  bit<32> present;   // those and the sender's bit
  bit<16> name;      // the sender's number in the whole job
  bit<16> behind;    // workers of the job from the sender's number on; 0: the job has no such worker
  bit<8> operator;   // SUM, MAX or BOR
  bit<32> slot;
  outcome_t outcome;
  leaving_t leaving;
  bit<1> disagrees;  // the answer is a mismatch
  // Of a mismatch, for its sender: the call of the worker that contributed first.
  bit<32> operation;
  bit<32> elements;
  bit<32> shape;
  bit<16> choices;
  bit<16> first;
  bit<16> sender;
}

// Extracts a contribution as far as `values`, and any other packet as far as it looks like one.
parser Headers(packet_in packet, out headers_t hdr) {
  state start {
    packet.extract(hdr.ethernet);
    transition select(hdr.ethernet.type) {
      TYPE_IPV4: ipv4;
      default: accept;
    }
  }
  state ipv4 {
    packet.extract(hdr.ipv4);
    transition select(hdr.ipv4.ihl, hdr.ipv4.protocol, hdr.ipv4.fragment) {
      (5, PROTOCOL_UDP, 0 &&& 0x3fff): udp;
      default: accept;
    }
  }
  state udp {
    packet.extract(hdr.udp);
    transition select(hdr.udp.length) {
      UDP_BYTES: magic;
      default: accept;
    }
  }
  state magic {
    transition select(packet.lookahead<bit<24>>()) {
      MAGIC_AND_VERSION: netfold;
      default: accept;
    }
  }
  state netfold {
    packet.extract(hdr.netfold);
    packet.extract(hdr.values);
    transition accept;
  }
}

// Decides whether a packet is a contribution, or an answer of the parent, that may count. `counts`: whether this
// pipeline takes the packet; another packet is forwarded as any packet is, a hello to the control plane's host too.
// Sets meta.outcome to STORED, to the reason to drop the packet, or to ASKED.
control Check(inout headers_t hdr, inout metadata_t meta, out bool counts) {
  action set_job(bit<1> from_parent, bit<16> index, bit<32> id, bit<32> epoch, bit<32> incarnation, bit<32> owner,
                 bit<16> workers, bit<32> all, bit<32> base, bit<32> mask, bit<16> group, bit<1> has_parent,
                 port_t up) {
    meta.job.from_parent = from_parent;
    meta.job.index = index;
    meta.job.id = id;
    meta.job.epoch = epoch;
    meta.job.incarnation = incarnation;
    meta.job.owner = owner;
    meta.job.workers = workers;
    meta.job.all = all;
    meta.job.base = base;
    meta.job.mask = mask;
    meta.job.group = group;
    meta.job.has_parent = has_parent;
    meta.job.up = up;
    meta.absent = ~all;
    meta.slot = hdr.netfold.chunk[31:0] & mask;
    meta.behind = workers |-| hdr.netfold.worker;
  }
  // One entry for the workers' packets, and one for the parent's.
  table job {
    key = {
      hdr.ipv4.dst: exact;
      hdr.udp.dst: exact;
    }
    actions = {
      set_job;
      NoAction;
    }
    default_action = NoAction();
    size = 2 * NETFOLD_JOBS;
  }

#if NETFOLD_LEAF
  // The parent's packets come from its data port, and in by the port that leads to the parent.
  table parent {
    key = {
      meta.job.index: exact;
      hdr.ipv4.src: exact;
      hdr.udp.src: exact;
      meta.port: exact;
    }
    actions = { NoAction; }
    default_action = NoAction();
    size = NETFOLD_JOBS;
  }
#endif

  action set_member(bit<32> member, bit<16> name) {
    meta.member = member;
    meta.present = member | meta.absent;
    meta.name = name;
  }
  // A worker's packets come from the address that it showed in its hello, and in by its own port.
  table member {
    key = {
      meta.job.index: exact;
      hdr.netfold.worker: exact;
      hdr.ipv4.src: exact;
      hdr.udp.src: exact;
      meta.port: exact;
    }
    actions = {
      set_member;
      NoAction;
    }
    default_action = NoAction();
    size = NETFOLD_JOBS * NETFOLD_WORKERS;
  }

  action set_operator(bit<8> operator) { meta.operator = operator; }
  // A bor of any width is one of 32 bits.
  table operators {
    key = {
      hdr.netfold.shape[15:8]: exact @name("wire");
      hdr.netfold.shape[7:0]: exact @name("reduce");
      hdr.netfold.shape[31:16]: range @name("count");
    }
    actions = {
      set_operator;
      NoAction;
    }
    default_action = NoAction();
    const entries = {
      (I32, SUM, 1 .. NETFOLD_VALUES): set_operator(SUM);
      (U32, SUM, 1 .. NETFOLD_VALUES): set_operator(SUM);
      (I32, MAX, 1 .. NETFOLD_VALUES): set_operator(MAX);
      (U8, BOR, 1 .. 4 * NETFOLD_VALUES): set_operator(BOR);
      (U16, BOR, 1 .. 2 * NETFOLD_VALUES): set_operator(BOR);
      (U32, BOR, 1 .. NETFOLD_VALUES): set_operator(BOR);
      (U64, BOR, 1 .. NETFOLD_VALUES / 2): set_operator(BOR);
    }
  }

  apply {
    counts = false;
    meta.outcome = STORED;
    meta.leaving = FORWARDED;
    if (hdr.netfold.isValid()) {
      if (job.apply().hit) {
        meta.slot = meta.slot + meta.job.base;
#if NETFOLD_LEAF
        if (meta.job.from_parent == 1) {
          counts = true;
          meta.name = hdr.netfold.worker;
          if (!parent.apply().hit) {
            meta.outcome = SOURCE;
          } else if (hdr.netfold.flags & ~(FROM_SWITCH | MISMATCH | HELLO | NACK) != 0) {
            meta.outcome = MALFORMED;
          } else if (hdr.netfold.job != meta.job.id) {
            meta.outcome = FOREIGN;
          } else if (hdr.netfold.incarnation != meta.job.incarnation) {
            meta.outcome = INCARNATION;
          } else if (hdr.netfold.epoch != meta.job.epoch) {
            meta.outcome = EPOCH;
          } else if (hdr.netfold.flags & (FROM_SWITCH | HELLO) != FROM_SWITCH) {
            meta.outcome = DIRECTION;
          } else if (hdr.netfold.flags & NACK != 0) {
            if (hdr.netfold.worker != meta.job.workers) {
              meta.outcome = WORKER;
            } else if (hdr.netfold.shape[31:16] != 0 || hdr.netfold.elements == 0) {
              meta.outcome = MALFORMED;
            } else {
              meta.outcome = ASKED;
            }
          }
        } else
#endif
        if (hdr.netfold.flags == 0) {
          counts = true;
          if (meta.behind == 0) {
            meta.outcome = WORKER;
          } else if (!member.apply().hit) {
            meta.outcome = SOURCE;
          } else if (hdr.netfold.job != meta.job.id) {
            meta.outcome = FOREIGN;
          } else if (hdr.netfold.incarnation != meta.job.incarnation) {
            meta.outcome = INCARNATION;
          } else if (hdr.netfold.epoch != meta.job.epoch) {
            meta.outcome = EPOCH;
          } else if (!operators.apply().hit) {
            meta.outcome = MALFORMED;
          }
        }
      }
    }
  }
}

// Turns a packet into an answer from this switch, still addressed to nobody but its sender.
control Answer(inout headers_t hdr, in metadata_t meta) {
  action turn(bit<8> flags) {
    mac_t mac = hdr.ethernet.dst;
    hdr.ethernet.dst = hdr.ethernet.src;
    hdr.ethernet.src = mac;
    ip_t ip = hdr.ipv4.dst;
    hdr.ipv4.dst = hdr.ipv4.src;
    hdr.ipv4.src = ip;
    hdr.ipv4.ttl = 64;
    bit<16> port = hdr.udp.dst;
    hdr.udp.dst = hdr.udp.src;
    hdr.udp.src = port;
    hdr.udp.checksum = 0;  // none: the values changed
    hdr.netfold.flags = flags;
  }

  apply {
    if (meta.disagrees == 1) {
      turn(FROM_SWITCH | MISMATCH);
    } else {
      turn(FROM_SWITCH);
    }
  }
}

// Addresses one copy of a multicast answer, or a sum. `replica`: the worker that the copy is for.
control Address(inout headers_t hdr, in metadata_t meta, in bit<16> replica) {
  action set_address(mac_t mac, ip_t ip, bit<16> port) {
    hdr.ethernet.dst = mac;
    hdr.ipv4.dst = ip;
    hdr.udp.dst = port;
  }
  table address {
    key = {
      meta.job.index: exact;
      replica: exact;
    }
    actions = {
      set_address;
      NoAction;
    }
    default_action = NoAction();
    size = NETFOLD_JOBS * NETFOLD_WORKERS;
  }

#if NETFOLD_LEAF
  action set_identity(bit<32> id, bit<32> epoch, bit<32> incarnation, mac_t mac, ip_t ip, bit<16> port) {
    hdr.netfold.job = id;
    hdr.netfold.epoch = epoch;
    hdr.netfold.incarnation = incarnation;
    hdr.ethernet.src = mac;
    hdr.ipv4.src = ip;
    hdr.udp.src = port;
  }
  // An answer of the parent becomes one of this switch.
  table own {
    key = { meta.job.index: exact; }
    actions = {
      set_identity;
      NoAction;
    }
    default_action = NoAction();
    size = NETFOLD_JOBS;
  }

  action set_parent(bit<32> id, bit<32> epoch, bit<32> incarnation, mac_t mac, ip_t ip, bit<16> port, bit<16> worker,
                    mac_t to_mac, ip_t to_ip, bit<16> to_port) {
    set_identity(id, epoch, incarnation, mac, ip, port);
    hdr.netfold.flags = 0;
    hdr.netfold.worker = worker;
    hdr.ethernet.dst = to_mac;
    hdr.ipv4.dst = to_ip;
    hdr.udp.dst = to_port;
  }
  // A sum is a contribution of this switch, which is a worker of the parent.
  table above {
    key = { meta.job.index: exact; }
    actions = {
      set_parent;
      NoAction;
    }
    default_action = NoAction();
    size = NETFOLD_JOBS;
  }
#endif

  apply {
#if NETFOLD_LEAF
    if (meta.leaving == TO_PARENT) {
      above.apply();
    } else {
      address.apply();
      if (meta.leaving == PASSED_ON) {
        own.apply();
      }
    }
#else
    address.apply();
#endif
  }
}

// Tells the sender of a mismatch the first worker's call. Every other worker gets the sender's call.
control FirstCall(inout headers_t hdr, in metadata_t meta, in bit<16> replica) {
  apply {
    if (meta.disagrees == 1 && meta.leaving == TO_WORKERS && replica == meta.sender) {
      hdr.netfold.operation = meta.operation;
      hdr.netfold.elements = meta.elements;
      hdr.netfold.shape = meta.shape;
      hdr.netfold.choices = meta.choices;
      hdr.netfold.worker = meta.first;
    }
  }
}

#endif
