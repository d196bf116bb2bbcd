// Matrix products of activation rows with packed weights: bf16 with fp32 sums, int8 and int4 with int32 sums.
//
// Every output is one accumulator walked through k in order, whatever the number of activation rows, so that a row's
// result does not depend on its neighbours (batch invariance). Must not know: how rows were prepared, ops.
#pragma once

#include <cstdint>

#include "gemm/activations.h"
#include "gemm/gemm_deal.h"
#include "gemm/low_rank.h"
#include "runtime/pool.h"
#include "weights/linear.h"

namespace quire {

enum class Epilogue : int32_t {
  kStore,
  kStoreFloat,
  kAdd,
  kBest,
#define QUIRE_MEMBER(member, name, function) member,
  QUIRE_ACTIVATIONS(QUIRE_MEMBER)  // of a gate-up pair: what becomes of both
#undef QUIRE_MEMBER
};

constexpr bool is_gated(Epilogue epilogue) { return epilogue > Epilogue::kBest; }

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
  const bf16* residual;               // kAdd: same shape and stride, may be `data`
  Best* best = nullptr;               // kBest: the worker's own, one for each row; `data` is not used
  const uint64_t* allowed = nullptr;  // kBest: [m, panels] bits of columns that may be the best, or null: all may
  float scale = 1.0f;                 // kAdd: of the sums
  Expander* expander = nullptr;       // the worker's own: what adapters add to the sums, or null
  const Linear* whole = nullptr;      // the matrix that the one given is a part of, from its panel `first_panel` on
  int64_t first_panel = 0;
};

// Partial sums and decoded weights that one worker needs for m rows, in bytes.
int64_t gemm_scratch_bytes(const Linear& w, int64_t m);

// What is left of the product, piece by piece (gemm_partition.h); each worker of a run calls it, for each part of a
// matrix that is stacked.
void gemm_worker(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch);

}  // namespace quire
