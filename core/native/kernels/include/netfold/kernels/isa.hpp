// The instruction set in use, and the reason for it.
#pragma once

namespace netfold::kernels {

enum class Isa { serial = 0, avx2 = 1, avx512 = 2 };

// Chosen once per process: the best set that the CPU has, or the set that NETFOLD_ISA=serial|avx2|avx512 forces. Where
// the CPU lacks the forced set, or the value is unknown, the best set runs and isa_reason() has the reason.
Isa active_isa();
const char* name(Isa isa);
// Returns one sentence for `netfold doctor` and logs, in static storage.
const char* isa_reason();

}  // namespace netfold::kernels
