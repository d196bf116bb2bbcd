// Products that are not divided among ranks by columns alone, beside those of ops.h.
//
// Must not know: layers.
#pragma once

#include "gemm/division.h"
#include "ops.h"

namespace quire {

// As quire_norm_linear, of the panels in `ranges` alone: other columns of `out` stay as they are, and nothing is
// gathered.
int32_t norm_linear_panels(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm, void* out,
                           Epilogue epilogue, const StepAdapters* adapters, int64_t site, const PanelRanges& ranges);

// As quire_norm_linear, all of it by every rank: of few columns that is sooner done than gathered.
int32_t norm_linear_alone(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm, void* out,
                          Epilogue epilogue);

}  // namespace quire
