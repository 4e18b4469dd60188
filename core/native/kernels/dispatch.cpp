// Chooses the instruction set once per process and sends every public call through its table.
//
// What must always hold: the choice never changes within a process, never exceeds what the CPU has, and has a reason
// (`isa_reason`). Code of an instruction set, its table's set-up included, runs only after the CPU was probed.
#include <netfold/kernels/convert.hpp>
#include <netfold/kernels/isa.hpp>
#include <netfold/kernels/reduce.hpp>

#include <array>
#include <cassert>
#include <cstdlib>
#include <string>

#include "tables.hpp"

namespace netfold::kernels {
namespace {

constexpr std::array kIsas = {Isa::serial, Isa::avx2, Isa::avx512};

bool has(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  switch (isa) {
    case Isa::serial:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::serial;
}

std::array<Table, kIsas.size()> build_tables() {
  std::array<Table, kIsas.size()> tables{kSerialTable, kSerialTable, kSerialTable};
#if defined(__x86_64__)
  if (has(Isa::avx2)) {
    add_avx2(tables[1]);
    tables[2] = tables[1];
  }
  if (has(Isa::avx512)) add_avx512(tables[2]);
#endif
  return tables;
}

struct Choice {
  Isa isa;
  std::string reason;
};

Choice choose() {
  Isa best = Isa::serial;
  for (const Isa isa : kIsas) {
    if (has(isa)) best = isa;
  }
  const std::string best_name = name(best);

  const char* forced = std::getenv("NETFOLD_ISA");
  if (forced == nullptr || *forced == '\0') {
    return {best, best_name + ": the best that this CPU has; NETFOLD_ISA=serial|avx2|avx512 forces another"};
  }
  const std::string setting = std::string("NETFOLD_ISA=") + forced;
  for (const Isa isa : kIsas) {
    if (name(isa) != std::string(forced)) continue;
    if (has(isa)) return {isa, std::string(name(isa)) + ": forced by " + setting};
    return {best, best_name + ": " + setting + " was asked for, but this CPU lacks it; took the best it has"};
  }
  return {best, best_name + ": " + setting + " is not one of serial, avx2, avx512; took the best that this CPU has"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const char* name(DType dtype) {
  constexpr const char* kNames[kDTypeCount] = {"f32", "f64", "f16", "bf16", "i8",      "i16",     "i32", "i64",
                                               "u8",  "u16", "u32", "u64",  "f64_i64", "i64_i64", "bool"};
  const auto value = static_cast<std::uint8_t>(dtype);
  return is_valid_dtype(value) ? kNames[value] : "unknown dtype";
}

const char* name(ReduceOp op) {
  constexpr const char* kNames[kReduceOpCount] = {"sum", "product", "min",     "max",    "band",
                                                  "bor", "bxor",    "min_loc", "max_loc"};
  const auto value = static_cast<std::uint8_t>(op);
  return is_valid_reduce_op(value) ? kNames[value] : "unknown operator";
}

const char* name(Isa isa) {
  constexpr const char* kNames[kIsas.size()] = {"serial", "avx2", "avx512"};
  return kNames[static_cast<std::size_t>(isa)];
}

Isa active_isa() { return choice().isa; }
const char* isa_reason() { return choice().reason.c_str(); }

const Table* find_table(Isa isa) {
  static const auto tables = build_tables();
  return has(isa) ? &tables[static_cast<std::size_t>(isa)] : nullptr;
}

const Table& active_table() {
  static const Table& table = *find_table(active_isa());
  return table;
}

bool is_defined(ReduceOp op, DType dtype) { return kSerialTable.reduce[index(op)][index(dtype)] != nullptr; }

bool reduce(ReduceOp op, DType dtype, void* dst, const void* const* sources, std::size_t source_count,
            std::size_t count) {
  assert(source_count >= 1);
  Table::Reduce* const kernel = active_table().reduce[index(op)][index(dtype)];
  if (kernel == nullptr) return false;
  kernel(dst, sources, source_count, 0, count);
  return true;
}

bool can_average(DType dtype) { return kSerialTable.average[index(dtype)] != nullptr; }

bool average(DType dtype, void* dst, const void* const* sources, std::size_t source_count, std::size_t count,
             const Mean& mean) {
  assert(source_count >= 1);
  Table::Average* const kernel = active_table().average[index(dtype)];
  if (kernel == nullptr) return false;
  kernel(dst, sources, source_count, 0, count, mean);
  return true;
}

bool convert(DType to, void* dst, DType from, const void* src, std::size_t count) {
  Table::Convert* const kernel = active_table().convert[index(to)][index(from)];
  if (kernel == nullptr) return false;
  kernel(dst, src, count);
  return true;
}

}  // namespace netfold::kernels
