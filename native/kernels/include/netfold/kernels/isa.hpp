// Which instruction set runs, and why.
#pragma once

namespace netfold::kernels {

enum class Isa { serial = 0, avx2 = 1, avx512 = 2 };

// Chosen once a process: the best the CPU has, or what NETFOLD_ISA=serial|avx2|avx512 forces. A forced set
// that the CPU lacks, or an unknown word, falls to the best available and `isa_reason()` says so.
Isa active_isa();
const char* name(Isa isa);
// One sentence for `netfold doctor` and logs. Static storage.
const char* isa_reason();

}  // namespace netfold::kernels
