// Matrix products of activation rows with packed weights: bf16 with fp32 sums, int8 and int4 with int32 sums.
//
// Packed weights are panels of 64 output rows, each [steps][64][4 bytes]: a lane is an output row and a step is two
// bf16 or four int8 of k. Panels of bf16 take three quarters of that where coded.h can tell their weights in it. Every
// output is one accumulator walked through k in order, whatever the number of activation rows, so that a row's result
// does not depend on its neighbours (batch invariance).
#pragma once

#include <cstdint>

#include "runtime/pool.h"
#include "simd/simd.h"
#include "weights/linear.h"

namespace quire {

constexpr int kGroup = 32;                                             // k values that share one int4 scale
constexpr int64_t kGroupBytes = kPanelRows + kPanelRows * kGroup / 2;  // of a panel in int4: scales, then nibbles

// Activation rows as the weights want them.
struct Rows {
  int64_t m;
  const void* data;     // bf16, or for int8 bytes offset by 128, as gemm_rows.h places them; int4: signed bytes [m, k]
  const float* scales;  // int8, int4: [m]
  const int32_t* sums;  // int4: [m, k / 32], 8 * the sum of the group
};

enum class Epilogue : int32_t { kStore = 0, kStoreFloat = 1, kAdd = 2, kSiluMul = 3, kBest = 4 };

// The largest value of a row among the panels that one worker has seen, and the first column that holds it.
struct Best {
  float value;
  int64_t column;  // -1: none yet
  bool finite;     // every value seen was
};

struct Output {
  Epilogue epilogue;
  void* data;  // kStoreFloat: float, else bf16; row stride `stride` elements
  int64_t stride;
  const bf16* residual;  // kAdd: same shape and stride, may be `data`
  Best* best = nullptr;  // kBest: the worker's own, one for each row; `data` is not used
};

// Of one whose weights lie as they are.
inline int64_t plain_panel_bytes(const Linear& w) {
  switch (w.kind) {
    case WeightKind::kBf16: return w.k * kPanelRows * 2;
    case WeightKind::kInt8: return w.k * kPanelRows;
    default: return w.k / kGroup * kGroupBytes;
  }
}

// Whether a panel of bf16 is in the layout of coded.h.
inline bool is_coded(const Linear& w, int64_t panel) {
  return w.starts[panel + 1] - w.starts[panel] < plain_panel_bytes(w);
}

// Partial sums and decoded weights that one worker needs for m rows, in bytes.
int64_t gemm_scratch_bytes(const Linear& w, int64_t m);

// What is left of the product, panel by panel; each worker of a run calls it.
void gemm_worker(Pieces& panels, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch);

}  // namespace quire
