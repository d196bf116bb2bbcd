// bf16 weights, with fp32 sums: a step is two of k, and a panel may be in the layout of coded.h.
//
// Owns what is particular to the kind, see kinds.h. Must not know: threads, tiles, what becomes of the values.
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm/norm.h"
#include "simd/simd.h"
#include "weights/encode.h"
#include "weights/source.h"

namespace quire {

struct Bf16Weights {
  static constexpr bool kStored = false;
  static constexpr bool kGrouped = false;
  static constexpr bool kMayBeCoded = true;
  static constexpr int64_t kValuesPerStep = 2;
  static constexpr int kParts = kPairParts;
#if defined(QUIRE_AMX)
  static constexpr bool kChained = true;
  static constexpr int64_t kTiledFrom = 5;
#else
  static constexpr bool kChained = false;
  static constexpr int64_t kTiledFrom = 0;
#endif

  // Panels.
  static int64_t panel_bytes(const Linear& w) { return w.k * kPanelRows * 2; }

  static bool is_coded(const Linear& w, int64_t panel) {
    return w.starts[panel + 1] - w.starts[panel] < panel_bytes(w);
  }

  static int64_t packed_bytes(const Linear& w, const Source& from, int64_t panel) {
    const int64_t steps = w.k / 2, repairs = count_repairs(w, from, panel, lowest_exponent(w, from, panel));
    return repairs * kStepsPerRepair > steps ? panel_bytes(w) : CodedHeader::size(repairs) + steps * kCodedStepBytes;
  }

  // `stage` has room for two plain panels.
  static void pack(const Linear& w, const Source& from, int64_t panel, char* stage, const Panel& to) {
    const bool coded = is_coded(w, panel);
    const int lowest = coded ? lowest_exponent(w, from, panel) : 0;
    // Padding meets activations of zero or yields rows that nobody reads: any finite value that needs no repair will
    // do.
    const bf16 padding = static_cast<bf16>(lowest << kExponentShift);
    bf16* rows = reinterpret_cast<bf16*>(stage);
    for (int64_t lane = 0; lane < kPanelRows; ++lane, rows += w.k) {
      const bf16* row = source_row(w, from, panel, lane);
      const int64_t columns = row == nullptr ? 0 : w.columns;
      std::copy(row, row + columns, rows);
      std::fill(rows + columns, rows + w.k, padding);
    }
    const int64_t steps = w.k / 2;
    if (!coded) return transpose(stage, steps, to.weights);
    char* weights = stage + panel_bytes(w);
    transpose(stage, steps, weights);
    const auto repairs = static_cast<int32_t>(count_repairs(w, from, panel, lowest));
    encode_panel(reinterpret_cast<const bf16*>(weights), steps, lowest, repairs, to.weights);
  }

  // Rows: bf16 as they are, padded with zeros.
  static constexpr bool kTakesRowsAsIs = kParts == 1;
  static void prepare(const Linear& w, const RawRow& row, bf16*, char* data, float*, int32_t*) {
    bf16* out = reinterpret_cast<bf16*>(data);
    const bf16* values = row.normed(out);
    if (values != out) std::memcpy(out, values, static_cast<size_t>(w.columns) * sizeof(bf16));
    std::memset(out + w.columns, 0, static_cast<size_t>(w.k - w.columns) * sizeof(bf16));
  }

  // One of a step's two values, as a float.
  static void store_part(const char* step, int part, char* to) {
    bf16 pair[2];
    std::memcpy(pair, step, 4);
    const float value = to_float(pair[part]);
    std::memcpy(to, &value, 4);
  }

  // Products.
  using Sum = Vec;
  using Lane = Pairs;
  using Part = PairPart;
  static Sum zero() { return vzero(); }
  static Sum load_sum(const float* p) { return vload(p); }
  static void store_sum(float* p, Sum s) { vstore(p, s); }
  static Lane load(const char* p) { return pload(reinterpret_cast<const bf16*>(p)); }
  template <int kPart>
  static Part part(Lane w) {
    return pair_part<kPart>(w);
  }
  static Part factor(const char* p) { return pair_factor(reinterpret_cast<const PairFactor*>(p)); }
  static Sum dot(Sum sum, Part w, Part a) { return pair_product(sum, w, a); }
#if defined(QUIRE_AMX)
  template <int kSum, int kA, int kB>
  static void tile_dot() {
    tile_dot_bf16<kSum, kA, kB>();
  }
#endif

  // Sums are values already.
  struct Scale {
    Scale(const Linear&, const Rows&, int64_t) {}
    Vec value(int, int64_t, const float* sums) const { return vload(sums); }
  };

 private:
  // A coded panel costs a misprediction for every repair; where there are more it is slower than a plain one.
  static constexpr int64_t kStepsPerRepair = 8;

  // The panel's lowest exponent if it is coded, judged by every fifth weight.
  static int lowest_exponent(const Linear& w, const Source& from, int64_t panel) {
    constexpr int64_t kSampled = 5;
    ExponentCounts counts;
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const bf16* row = source_row(w, from, panel, lane);
      if (row == nullptr) continue;
      for (int64_t at = lane % kSampled; at < w.columns; at += kSampled) counts.add(row[at]);
    }
    return counts.lowest();
  }

  static int64_t count_repairs(const Linear& w, const Source& from, int64_t panel, int lowest) {
    int64_t repairs = 0;
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const bf16* row = source_row(w, from, panel, lane);
      if (row == nullptr) continue;
      int32_t beyond = 0;
      for (int64_t at = 0; at < w.columns; ++at) beyond += within(row[at], lowest) ? 0 : 1;
      repairs += beyond;
    }
    return repairs;
  }
};

}  // namespace quire
