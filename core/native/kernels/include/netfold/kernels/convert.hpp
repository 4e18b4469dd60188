// Conversions between a tensor's dtype and the wire format.
#pragma once

#include <netfold/kernels/types.hpp>

namespace netfold::kernels {

// Converts `count` elements. Pairs: any dtype to itself (a copy), and f32 <-> f16, f32 <-> bf16, f64 <-> f32.
// Narrowing rounds to nearest, ties to even; overflow gives Inf; a NaN becomes the canonical quiet NaN (a copy keeps
// its bits). Bits are the same for every instruction set.
//
// Pointers are borrowed, need no alignment, and must not overlap unless equal with equal widths.
//
// Returns false, and writes nothing, for any other pair.
bool convert(DType to, void* dst, DType from, const void* src, std::size_t count);

}  // namespace netfold::kernels
