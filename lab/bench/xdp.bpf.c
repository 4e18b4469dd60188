// A switch for i32 sums in the kernel, compiled and loaded by lab/bench/xdp.py: the slots of docs/reference/protocol.md under
// a spin lock. It has no MACs, mismatch packets, NACKs, other types or operators, and cannot check UDP checksums.
// WORKERS, SLOTS and VALUES come from the compiler's command line. Worker w has the address 10.9.w.2:7000.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define WORKER_PORT 7000
#define DATA_PORT 7777
#define GROUP 0xef090909   // 239.9.9.9: one packet for all workers, as a hardware switch would send it
#define SOURCE 0x0a09ff01  // 10.9.255.1, of results: GRO joins packets of one source only
#define WHOLE(values) _Pragma("clang loop unroll(full)") for (int i = 0; i < (values); ++i)

struct header {
  __u16 magic;
  __u8 version, flags;
  __u32 job, epoch, incarnation;
  __u64 chunk, packet_number;
  __u32 operation, elements;
  __u16 worker, count;
  __u8 wire, reduce;
  __u16 table;
};
// The parts of a packet. x86 reads their fields at odd multiples of 2 bytes in one load.
struct packet {
  struct ethhdr* eth;
  struct iphdr* ip;
  struct udphdr* udp;
  struct header* header;
  __u32* values;
};
#define PACKET_BYTES (14 + 20 + 8 + 48 + 4 * VALUES)

struct slot {
  struct bpf_spin_lock lock;
  __u32 complete;
  __u64 round;  // the slot's chunk divided by SLOTS: memory full of zeros is a job's beginning
  __u64 contributed, number, call[2];
  __u32 values[VALUES];  // the sum so far, then the kept result
};
#define MAP(name, kind, entries, of)   \
  struct {                             \
    __uint(type, BPF_MAP_TYPE_##kind); \
    __uint(max_entries, entries);      \
    __type(key, __u32);                \
    __type(value, of);                 \
  } name SEC(".maps")
MAP(slots, ARRAY, SLOTS, struct slot);
MAP(ports, DEVMAP, WORKERS, __u32);   // interfaces to the workers
MAP(indices, ARRAY, WORKERS, __u32);  // the same, as numbers that a program may read
MAP(onward, DEVMAP_HASH, 64, __u32);  // lab/bench/xdp.py's frames: from a worker's link to the switch's
MAP(backward, HASH, 64, __u32);
__u64 results;

static __always_inline __u16 fold(__u64 sum) {
  WHOLE(4) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

static __always_inline int is_ours(void* at, void* end, struct packet* p) {
  *p = (struct packet){at, at + 14, at + 34, at + 42, at + 90};
  return at + PACKET_BYTES == end && p->eth->h_proto == bpf_htons(ETH_P_IP) && p->ip->ihl == 5 &&
         p->ip->protocol == IPPROTO_UDP && p->udp->dest == bpf_htons(DATA_PORT);
}

// Makes the packet, which has the sum, the result for all workers. Without a checksum GRO would not join results.
static __always_inline void address_to_all(const struct packet* p, __u64 sum_of_values) {
  const __u8 group[6] = {1, 0, 0x5e, 9, 9, 9};
  __builtin_memcpy(p->eth->h_dest, group, 6);
  p->ip->saddr = bpf_htonl(SOURCE);
  p->ip->daddr = bpf_htonl(GROUP);
  p->ip->id = p->ip->check = 0;
  p->ip->ttl = 64;
  __u64 sum = 0;
  WHOLE(10) sum += ((__u16*)p->ip)[i];
  p->ip->check = ~fold(sum);
  p->udp->source = bpf_htons(DATA_PORT);
  p->udp->dest = bpf_htons(WORKER_PORT);
  p->udp->check = 0;
  sum = sum_of_values + bpf_htons(IPPROTO_UDP) + p->udp->len;
  WHOLE(4) sum += ((__u16*)&p->ip->saddr)[i];
  WHOLE(28) sum += ((__u16*)p->udp)[i];
  p->udp->check = ~fold(fold((__u32)sum) + (sum >> 32));
}

static __always_inline void answer_sender(const struct packet* p) {
  __u8 mac[6];
  __builtin_memcpy(mac, p->eth->h_dest, 6);
  __builtin_memcpy(p->eth->h_dest, p->eth->h_source, 6);
  __builtin_memcpy(p->eth->h_source, mac, 6);
  const __u32 address = p->ip->saddr;
  p->ip->saddr = p->ip->daddr;
  p->ip->daddr = address;
  p->udp->source = bpf_htons(DATA_PORT);
  p->udp->dest = bpf_htons(WORKER_PORT);
  p->udp->check = 0;
}

// Handles a contribution as SwitchJob does. XDP_PASS: the packet is now the result for all workers, or not the job's.
static __always_inline int contribute(struct xdp_md* ctx, int* is_complete) {
  struct packet p;
  void *at = (void*)(long)ctx->data, *end = (void*)(long)ctx->data_end;
  if (at + PACKET_BYTES > end || !is_ours(at, end, &p)) return XDP_PASS;
  struct header* h = p.header;
  const __u32 worker = bpf_ntohs(h->worker);
  if (h->magic != bpf_htons(0x4e46) || h->version != 1 || h->flags != 0 || h->job != bpf_htonl(1) ||
      h->epoch != bpf_htonl(1) || h->incarnation != bpf_htonl(1) || worker >= WORKERS || h->wire != 6 ||
      h->reduce != 0 || h->count == 0 || bpf_ntohs(h->count) > VALUES ||
      p.ip->saddr != bpf_htonl(0x0a090002 | worker << 8) || p.udp->source != bpf_htons(WORKER_PORT)) {
    return XDP_DROP;
  }
  const __u64 chunk = bpf_be64_to_cpu(h->chunk), round = chunk / SLOTS, bit = 1ull << worker;
  const __u64 call[2] = {*(__u64*)&h->operation, (__u64) * (__u32*)&h->count << 16 | h->table};
  const __u32 index = chunk % SLOTS;
  struct slot* slot = bpf_map_lookup_elem(&slots, &index);
  if (!slot) return XDP_DROP;
  __u64 sum_of_values = 0;
  int verdict = XDP_DROP;
  bpf_spin_lock(&slot->lock);
  if (round == slot->round + 1 && slot->complete) {
    slot->round = round;
    slot->contributed = slot->complete = 0;
  }
  const __u64 before = slot->contributed;
  if (round != slot->round || (before && (slot->call[0] != call[0] || slot->call[1] != call[1]))) goto out;
  if (slot->complete) {
    WHOLE(VALUES / 2)((__u64*)p.values)[i] = ((__u64*)slot->values)[i];
    verdict = XDP_TX;
  } else if (before & bit) {
    goto out;
  } else if ((before | bit) == (1ull << WORKERS) - 1) {
    WHOLE(VALUES) {
      const __u32 sum = slot->values[i] + p.values[i];
      slot->values[i] = p.values[i] = sum;
      sum_of_values += sum;
      asm volatile("" : "+r"(sum_of_values));  // else the compiler keeps all sums on a stack of 512 bytes
    }
    slot->complete = 1;
    slot->number = __sync_fetch_and_add(&results, 1) + 1;
    verdict = XDP_PASS;
  } else if (before) {
    WHOLE(VALUES) slot->values[i] += p.values[i];
  } else {
    slot->call[0] = call[0];
    slot->call[1] = call[1];
    WHOLE(VALUES / 2)((__u64*)slot->values)[i] = ((__u64*)p.values)[i];
  }
  slot->contributed = before | bit;
out:;
  const __u64 number = slot->number;
  bpf_spin_unlock(&slot->lock);
  if (verdict == XDP_DROP) return XDP_DROP;
  h->flags = 1;
  h->packet_number = bpf_cpu_to_be64(number);
  *is_complete = verdict == XDP_PASS;
  if (*is_complete) address_to_all(&p, sum_of_values);
  if (!*is_complete) answer_sender(&p);
  return verdict;
}

// The kernel copies the packet for each worker.
SEC("xdp") int broadcast(struct xdp_md* ctx) {
  int is_complete = 0;
  const int verdict = contribute(ctx, &is_complete);
  return is_complete ? bpf_redirect_map(&ports, 0, BPF_F_BROADCAST) : verdict;
}

// The packet goes on to GRO, which joins results, and to `copies`.
SEC("xdp") int join(struct xdp_md* ctx) {
  int is_complete = 0;
  return contribute(ctx, &is_complete);
}
SEC("tc") int copies(struct __sk_buff* skb) {
  void* at = (void*)(long)skb->data;
  if (at + 34 > (void*)(long)skb->data_end) return 0;
  if (skb->protocol != bpf_htons(ETH_P_IP) || ((struct iphdr*)(at + 14))->daddr != bpf_htonl(GROUP)) return 0;
  for (__u32 worker = 0; worker < WORKERS; ++worker) {
    const __u32 key = worker, *to = bpf_map_lookup_elem(&indices, &key);
    if (!to) return 2;
    if (worker == WORKERS - 1) return bpf_redirect(*to, 0);
    bpf_clone_redirect(skb, *to, 0);
  }
  return 2;
}

SEC("xdp") int forward(struct xdp_md* ctx) { return bpf_redirect_map(&onward, ctx->ingress_ifindex, XDP_PASS); }
SEC("tc") int back(struct __sk_buff* skb) {
  const __u32 from = skb->ifindex, *to = bpf_map_lookup_elem(&backward, &from);
  return to ? bpf_redirect(*to, 0) : 0;
}
char LICENSE[] SEC("license") = "GPL";
