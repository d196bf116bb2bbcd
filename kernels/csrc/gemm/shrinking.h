// The scaled A x of a product's rows, for the epilogue to add B of it.
//
// Promises: the result is valid until the next call. Must not know: the product.
#pragma once

#include "gemm/low_rank.h"
#include "gemm/norm.h"
#include "runtime/context.h"

namespace quire {

// Of rows x [m, columns], after the norm if there is one. Throws std::bad_alloc. Call it while no other op runs.
Addend shrunk_rows(Context& context, const StepAdapters& adapters, int64_t site, const Linear& w, const bf16* x,
                   int64_t m, const Norm* norm);

}  // namespace quire
