// All kinds of weights, and the one place that tells them apart.
//
// A kind is a type of static members, of which everything else is a template:
//   panels    panel_bytes, of one whose weights lie as they are; packed_bytes, of one as it will be packed; pack
//   rows      prepare, an activation row as the products want it, unless kTakesRowsAsIs; store_part, to take it apart
//   products  kValuesPerStep and kParts, and zero, load_sum, store_sum, load, part, factor, dot: a step of gemm_tile.h;
//             or where kGrouped, kGroupBytes and a tile of its own
//             kTiledFrom, how many rows the tile registers multiply, if any, and their tile_dot, or where kGrouped
//             widen; kChained, whether fewer add in the same order, as gemm_chains.h does
//   finish    Scale, from sums to values
//
// A kind that others quantised, kStored, has Codes in place of a pack and products (stored_codes.h), and adds as bf16.
//
// Promises: a new kind is its own header, its number in WeightKind and its line here. Must not know: what they do.
#pragma once

#include "weights/bf16_weights.h"
#include "weights/int4_weights.h"
#include "weights/int8_weights.h"
#include "weights/stored_weights.h"

namespace quire {

// f with the traits of a kind that is made here of bf16.
template <typename F>
inline auto with_made_kind(WeightKind kind, const F& f) {
  switch (kind) {
    case WeightKind::kBf16: return f(Bf16Weights{});
    case WeightKind::kInt8: return f(Int8Weights{});
    default: return f(Int4Weights{});
  }
}

// f with the traits of a kind that others quantised.
template <typename F>
inline auto with_stored_kind(WeightKind kind, const F& f) {
  switch (kind) {
    case WeightKind::kNibbles: return f(StoredWeights<Nibbles>{});
    case WeightKind::kBytes: return f(StoredWeights<SignedBytes>{});
    case WeightKind::kSixBits: return f(StoredWeights<SixBits>{});
    default: return f(StoredWeights<E4m3>{});
  }
}

inline bool is_stored(WeightKind kind) { return kind >= WeightKind::kNibbles; }

// f with the traits of a kind, of one that is not stacked.
template <typename F>
inline auto with_kind(WeightKind kind, const F& f) {
  return is_stored(kind) ? with_stored_kind(kind, f) : with_made_kind(kind, f);
}

}  // namespace quire
