// Weights as others quantised them (stored.h), multiplied with activations in bf16.
//
// The products of a group are added as those of bf16 weights are, from zero; the sum times the scale is added to those
// of the groups before, then the group's offset times the sum of its activations.
// Owns what is particular to the kinds, see kinds.h. Must not know: threads, tiles, what becomes of the values.
#pragma once

#include <algorithm>
#include <cstring>

#include "weights/bf16_weights.h"
#include "weights/stored.h"
#include "weights/stored_codes.h"

namespace quire {

template <typename CodesOfKind>
struct StoredWeights : Bf16Weights {
  using Codes = CodesOfKind;
  static constexpr bool kStored = true;
  static constexpr bool kMayBeCoded = false;

  static StoredLayout layout(const Linear& w) { return StoredLayout(w, Codes::kBits); }

  // Panels.
  static int64_t panel_bytes(const Linear& w) { return layout(w).panel_bytes(); }
  static int64_t packed_bytes(const Linear& w, const Source&, int64_t) { return panel_bytes(w); }

  static void pack_stored(const Linear& w, const StoredRows& rows, const StoredRows* above, int64_t panel, char* to) {
    const StoredLayout at = layout(w);
    std::memset(to, 0, static_cast<size_t>(at.panel_bytes()));
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const RowPlace place(w, panel, lane);
      if (place.row < 0) continue;
      const StoredRows& from = place.of_above ? *above : rows;
      pack_codes(w, at, from.codes + place.row * w.columns, lane, to);
      const int64_t groups = (w.columns + w.group - 1) / w.group;
      const int64_t scale_bytes = StoredLayout::scale_bytes(w.scale_form);
      const int64_t offset_bytes = StoredLayout::offset_bytes(w.offset_form);
      const char* scales = static_cast<const char*>(from.scales) + place.row * groups * scale_bytes;
      const char* offsets = static_cast<const char*>(from.offsets) + place.row * groups * offset_bytes;
      for (int64_t g = 0; g < groups; ++g) {
        char* header = to + at.header_at(g);
        put(scales + g * scale_bytes, scale_bytes, lane, header);
        put(offsets + g * offset_bytes, offset_bytes, lane, header + at.offsets_at);
      }
      const int64_t spans = (w.columns + kSpanColumns - 1) / kSpanColumns;
      for (int64_t s = 0; s < spans; ++s) {
        char* units = to + at.span_at(s * at.span);
        if (w.scale_form == ScaleForm::kUnits) put(from.scale_units + place.row * spans + s, 2, lane, units);
        if (w.offset_form == OffsetForm::kUnits) {
          put(from.offset_units + place.row * spans + s, 2, lane, units + at.offset_units_at);
        }
      }
    }
  }

  // Rows: as of bf16, and behind them the sums of every group where there are offsets.
  static constexpr bool kTakesRowsAsIs = false;
  static void prepare(const Linear& w, const RawRow& row, bf16* normed, char* data, float* scale, int32_t* sums) {
    Bf16Weights::prepare(w, row, normed, data, scale, sums);
    add_up(w, reinterpret_cast<const bf16*>(data), reinterpret_cast<float*>(sums));
  }
  // The sums of a row's groups, if offsets multiply them.
  static void add_up(const Linear& w, const bf16* x, float* to) {
    if (w.offset_form == OffsetForm::kNone) return;
    for (int64_t first = 0; first < w.k; first += w.group) {
      Vec sum = vzero();
      const int64_t end = std::min(first + w.group, w.k);
      for (int64_t at = first; at < end; at += kLanes) sum = vadd(sum, vload_bf16(x + at));
      *to++ = lane_sum(sum);
    }
  }

 private:
  static void put(const void* value, int64_t size, int64_t lane, char* to) {
    if (size > 0) std::memcpy(to + lane * size, value, static_cast<size_t>(size));
  }

  static void pack_codes(const Linear& w, const StoredLayout& at, const uint8_t* codes, int64_t lane, char* to) {
    constexpr int64_t kColumns = 2 * Codes::kSteps;  // of a load
    for (int64_t block = 0; block < at.blocks; ++block) {
      char* load = to + at.block_at(block) + lane * 4;
      for (int64_t first = 2 * at.steps * block; first < 2 * at.steps * (block + 1); first += kColumns) {
        uint8_t of_load[kColumns] = {};
        const int64_t live = std::min(kColumns, w.columns - first);
        if (live > 0) std::memcpy(of_load, codes + first, static_cast<size_t>(live));
        Codes::pack(of_load, load);
        load += Codes::kLoadBytes;
      }
    }
  }
};

}  // namespace quire
